// SPDX-License-Identifier: Apache-2.0
// Streams, events and graphs of simulated devices.
//
// A stream is a queue of work. Work waits for points: "the first n tasks of that queue are done".
// After `set_order` the queues run in an order drawn from a seed, and only when the host waits, so
// a missing order between two streams produces wrong bytes. Statuses are CUDA's. Callers hold the
// mutex.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "memory.hpp"
#include "run.hpp"

namespace gpu_sim {

using Status = int;
constexpr Status kSuccess = 0;
constexpr Status kInvalidValue = 1;
constexpr Status kOutOfMemory = 2;
constexpr Status kNoDriver = 35;
constexpr Status kInvalidDevice = 101;
constexpr Status kInvalidHandle = 400;
constexpr Status kNotReady = 600;
constexpr Status kAlreadyPinned = 712;
constexpr Status kNotPinned = 713;
constexpr Status kCaptureUnsupported = 900;
constexpr Status kCaptureInvalidated = 901;
constexpr Status kCaptureIsolation = 905;
constexpr Status kCaptureImplicit = 906;
constexpr Status kCapturedEvent = 907;

using Task = std::function<void()>;

struct Capture {
    bool is_global = true;  // unsafe calls in other threads also end it
    std::thread::id thread;
    bool is_valid = true;
    std::vector<Task> tasks;
};

struct Queue;
/// The first `number` tasks of a queue.
struct Point {
    std::shared_ptr<Queue> queue;
    std::uint64_t number;
};
struct Work {
    Task task;
    std::vector<Point> after;
};
struct Queue {
    int device = 0;
    bool is_blocking = false;  // in order with the legacy default stream
    std::deque<Work> works;
    std::uint64_t given = 0;
    std::uint64_t done = 0;
    std::shared_ptr<Capture> capture;
};
struct Event {
    int device = 0;
    std::optional<Point> point;
    std::shared_ptr<Capture> capture;  // the capture that recorded it
};

class Machine {
   public:
    std::mutex mutex;
    Memory memory;

    void reset(int devices, std::int64_t bytes);
    void set_order(bool is_any, std::uint64_t seed);
    [[nodiscard]] int count() const { return static_cast<int>(legacy_.size()); }
    /// Returns kSuccess if a device exists and no kernel has failed on it.
    [[nodiscard]] Status check(int device) const;
    /// The number of devices with a failure.
    [[nodiscard]] std::int64_t num_failed() const;

    // ---- streams: nullptr and 1 are the legacy default stream, 2 is the calling thread's own
    // -----
    [[nodiscard]] Status create_stream(int device, bool is_blocking, void** stream);
    /// Does not wait: queued work still runs.
    [[nodiscard]] Status destroy_stream(void* stream);
    /// Appends work to a stream of the device, or to the graph that the stream captures. Legacy
    /// streams wait for blocking streams, and blocking streams for legacy streams.
    [[nodiscard]] Status give(int device, void* stream, Task task);
    [[nodiscard]] Status finish(int device, void* stream);
    [[nodiscard]] Status finish_device(int device);
    [[nodiscard]] std::shared_ptr<Queue> queue_of(int device, void* stream);
    [[nodiscard]] std::int64_t num_waiting() const;
    void run_all();

    // ---- events -------------------------------------------------------------------------------
    [[nodiscard]] Status create_event(int device, void** event);
    [[nodiscard]] Status destroy_event(void* event);
    [[nodiscard]] Status record(int device, void* event, void* stream);
    [[nodiscard]] Status wait(int device, void* stream, void* event);
    [[nodiscard]] Status query(void* event);
    [[nodiscard]] Status finish_event(void* event);

    // ---- graphs -------------------------------------------------------------------------------
    [[nodiscard]] Status begin_capture(int device, void* stream, bool is_global);
    [[nodiscard]] Status end_capture(int device, void* stream, std::vector<Task>* tasks);
    /// Ends the captures that a call touches, if no capture can hold the call.
    [[nodiscard]] Status refuse_in_capture(bool is_thread_relaxed);
    [[nodiscard]] Status invalidate(const std::shared_ptr<Queue>& queue, Status status);

    // ---- kernels and copies ---------------------------------------------------------------------
    /// Runs blocks, warps and lanes in a random order, or in their natural order if `keep_order`.
    [[nodiscard]] Status launch(void* stream, Launch launch);
    void keep_order(bool keep) { keeps_order_ = keep; }
    /// Copies bytes between any memories, in stream order. `is_batch`: also from pageable memory.
    [[nodiscard]] Status copy(int device, void* stream, void* to, const void* from,
                              std::size_t bytes, bool is_batch);
    [[nodiscard]] std::map<std::string, Counts>& counts() { return counts_; }
    [[nodiscard]] std::size_t num_streams() const { return streams_.size(); }
    [[nodiscard]] std::size_t num_events() const { return events_.size(); }

   private:
    [[nodiscard]] std::vector<std::shared_ptr<Queue>> queues() const;
    void run_one();
    void wait_for(const Point& point);
    void perform(int device, const Task& task);

    std::vector<std::shared_ptr<Queue>> legacy_;
    std::map<std::pair<std::thread::id, int>, std::shared_ptr<Queue>> own_;  // of threads
    std::map<void*, std::shared_ptr<Queue>> streams_;
    std::vector<std::shared_ptr<Queue>> leaving_;  // destroyed with unfinished work
    std::map<void*, std::shared_ptr<Event>> events_;
    std::vector<std::shared_ptr<Capture>> captures_;
    std::set<std::shared_ptr<void>> old_;  // handles of earlier machines, never reused
    std::vector<Status> failed_;           // of each device
    std::map<std::string, Counts> counts_;
    bool is_any_order_ = false;
    bool keeps_order_ = false;
    Draw draw_{1};
};

/// The machine of the process.
[[nodiscard]] Machine& machine();

using Lock = std::lock_guard<std::mutex>;

}  // namespace gpu_sim
