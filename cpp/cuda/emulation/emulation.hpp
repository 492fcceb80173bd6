// SPDX-License-Identifier: Apache-2.0
// GPUs made of host memory and queues, for tests on machines without GPUs.
//
// Streams are queues of tasks. Order::kAtOnce runs a task when it is enqueued. Order::kAny leaves
// tasks in their queues until the host waits for something, and then runs ready tasks in an order
// drawn from a seed. So work that streams and events do not order shows as wrong bytes. Threads:
// any number; one task runs at a time. The state belongs to the process, like the state of a
// driver.
#pragma once

#include <cstdint>
#include <functional>

#include "kvcore/cuda.hpp"

namespace kvcore::cuda::emulation {

enum class Order : std::uint8_t { kAtOnce, kAny };

/// Restarts with a number of devices of `bytes_per_device` bytes; 0 devices are a machine without a
/// driver. Forgets earlier memory, streams and events.
void reset(int devices, std::int64_t bytes_per_device = std::int64_t{1} << 30);

/// Runs all waiting tasks, then sets the order of later tasks.
void set_order(Order order, std::uint64_t seed = 0);

/// Enqueues a task. Returns kSuccess, or the status for a device that does not exist.
[[nodiscard]] Status enqueue(Stream stream, std::function<void()> task) noexcept;

/// Returns the number of faults: pinned memory that was unpinned while copies of it were waiting.
/// GPUs do not tolerate this.
[[nodiscard]] std::int64_t faults();

/// `begin_capture` puts later tasks of a stream into a graph instead of running them. `end_capture`
/// returns the number of the graph; -1, the number of no graph, if the stream is not captured.
/// `replay` enqueues the tasks of a graph on a stream.
void begin_capture(Stream stream);
[[nodiscard]] std::int64_t end_capture(Stream stream);
[[nodiscard]] Status replay(std::int64_t graph, Stream stream);

/// Makes every other thread's call of the driver wait until `resume`, like a full queue.
void suspend();
void resume();

/// Returns the number of tasks that are enqueued and have not run.
[[nodiscard]] std::int64_t num_waiting();

/// Counts for tests: device allocations, streams, events and pinned ranges that are alive.
struct Alive {
    std::int64_t allocations = 0;
    std::int64_t streams = 0;
    std::int64_t events = 0;
    std::int64_t pinned = 0;
};
[[nodiscard]] Alive alive();

}  // namespace kvcore::cuda::emulation
