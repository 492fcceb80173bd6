// SPDX-License-Identifier: Apache-2.0
// GPUs made of host memory and queues, for tests on machines that have none.
//
// Streams are queues of tasks. Order::kAtOnce runs a task when it is given; Order::kAny leaves
// tasks in their queues until the host waits for something, and then runs those whose turn it is in
// an order drawn from a seed. Whatever is not ordered by streams and events so shows as wrong
// bytes. Threads: any number; one task runs at a time. State is the process's, as a driver's is.
#pragma once

#include <cstdint>
#include <functional>

#include "kvcore/cuda.hpp"

namespace kvcore::cuda::emulation {

enum class Order : std::uint8_t { kAtOnce, kAny };

/// Begins anew with so many devices of so many bytes, 0 for a machine without a driver. Memory,
/// streams and events of before are forgotten.
void reset(int devices, std::int64_t bytes_per_device = std::int64_t{1} << 30);

/// How tasks given from now on run; runs what there is.
void set_order(Order order, std::uint64_t seed = 0);

/// Enqueues a task. kSuccess, or the status of a device that does not exist.
[[nodiscard]] Status enqueue(Stream stream, std::function<void()> task) noexcept;

/// What no GPU forgives, and what this emulation counts: pinned memory that was given back while
/// copies of it waited.
[[nodiscard]] std::int64_t faults();

/// What is given to a stream from now on goes into a graph and does not run; the graph's number,
/// and its tasks given to a stream. A number of no graph, -1, for a stream that nobody captures.
void begin_capture(Stream stream);
[[nodiscard]] std::int64_t end_capture(Stream stream);
[[nodiscard]] Status replay(std::int64_t graph, Stream stream);

/// Makes every other thread's call of the driver wait until `resume`, as a full queue does.
void suspend();
void resume();

/// Tasks that were given and have not run.
[[nodiscard]] std::int64_t num_waiting();

/// What tests look at: allocations of devices, streams, events and pinned ranges that are alive.
struct Alive {
    std::int64_t allocations = 0;
    std::int64_t streams = 0;
    std::int64_t events = 0;
    std::int64_t pinned = 0;
};
[[nodiscard]] Alive alive();

}  // namespace kvcore::cuda::emulation
