// SPDX-License-Identifier: Apache-2.0
// The state of an emulated driver. Private to the emulation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "emulation.hpp"

namespace kvcore::cuda::emulation {

inline constexpr Status kInvalidValue = 1;
inline constexpr Status kOutOfMemory = 2;
inline constexpr Status kNoDriver = 35;
inline constexpr Status kInvalidDevice = 101;
inline constexpr Status kInvalidHandle = 400;
inline constexpr Status kCaptured = 900;
inline constexpr std::size_t kAlignment = 256;
inline constexpr std::uintptr_t kLegacy = 1;  // a handle, not an address; 0 is the same stream
inline constexpr std::uintptr_t kPerThread = 2;

struct Range {
    const void* begin;
    std::size_t bytes;

    [[nodiscard]] bool overlaps(const Range& other) const {
        const auto a = reinterpret_cast<std::uintptr_t>(begin);
        const auto b = reinterpret_cast<std::uintptr_t>(other.begin);
        return a < b + other.bytes && b < a + bytes;
    }
};

// A signal that is done when the work before an event's recording is done.
struct Signal {
    bool is_done = false;
};

// An event, and the signal of its last recording.
struct Marker {
    int device = 0;
    std::shared_ptr<Signal> last = nullptr;
};

// A task does work, waits for a signal, or sets a signal.
struct Task {
    std::function<void()> work;
    std::shared_ptr<Signal> signal = nullptr;
    bool is_wait = false;
    std::vector<Range> touched = {};  // ranges of copies

    [[nodiscard]] bool is_ready() const { return !is_wait || signal->is_done; }
    void run() const {
        if (work) work();
        if (signal != nullptr) signal->is_done = true;
    }
};

struct Queue {
    int device;
    std::deque<Task> tasks;
    bool is_captured = false;
    std::vector<Task> graph = {};  // captured tasks
};

struct Block {
    int device;
    std::size_t bytes;
};

// The state of a driver.
class Machine {
   public:
    // Objects that still have an owner are kept until the owner releases them. Their addresses must
    // not be used again before that, or the owner would free an object of another owner.
    void reset(int devices, std::int64_t bytes) {
        for (const auto& [key, queue] : streams_) queue->tasks.clear();
        orphans_.clear();
        of_threads_.clear();
        faults_ = 0;
        old_blocks_.merge(blocks_);
        old_streams_.merge(streams_);
        old_events_.merge(events_);
        pinned_.clear();
        defaults_.clear();
        graphs_.clear();
        for (int device = 0; device < devices; ++device) defaults_.push_back(Queue{device, {}});
        free_.assign(static_cast<std::size_t>(devices), bytes);
        total_ = bytes;
        order_ = Order::kAtOnce;
    }
    void set_order(Order order, std::uint64_t seed) {
        run_all();
        order_ = order;
        random_ = seed;
    }
    [[nodiscard]] Status check(int device) const {
        if (defaults_.empty()) return kNoDriver;
        return device >= 0 && device < count() ? kSuccess : kInvalidDevice;
    }
    [[nodiscard]] int count() const { return static_cast<int>(defaults_.size()); }

    [[nodiscard]] Status give(Stream stream, Task task) {
        const Status status = check(stream.device);
        if (status != kSuccess) return status;
        Queue* queue = queue_of(stream);
        if (queue == nullptr) return kInvalidHandle;
        if (queue->is_captured) {
            if (task.signal != nullptr) return kCaptured;  // signals of streams that are not
            queue->graph.push_back(std::move(task));
            return kSuccess;
        }
        put_in_order(*queue);
        queue->tasks.push_back(std::move(task));
        if (order_ == Order::kAtOnce) run_all();
        return kSuccess;
    }
    [[nodiscard]] Status finish(Stream stream) {
        const Status status = check(stream.device);
        if (status != kSuccess) return status;
        Queue* queue = queue_of(stream);
        if (queue == nullptr) return kInvalidHandle;
        if (queue->is_captured) return kCaptured;
        put_in_order(*queue);
        while (!queue->tasks.empty()) run_one();
        return kSuccess;
    }
    [[nodiscard]] Status finish_device(int device) {
        const Status status = check(device);
        if (status != kSuccess) return status;
        bool is_captured = false;
        for_each_queue([&](const Queue& queue) {
            is_captured |= queue.device == device && queue.is_captured;
        });
        if (is_captured) return kCaptured;
        run_all();
        return kSuccess;
    }
    [[nodiscard]] Status check(Stream stream) {
        const Status status = check(stream.device);
        return status == kSuccess && queue_of(stream) == nullptr ? kInvalidHandle : status;
    }
    [[nodiscard]] bool is_captured(Stream stream) {
        return check(stream) == kSuccess && queue_of(stream)->is_captured;
    }
    void begin_capture(Stream stream) {
        if (check(stream) == kSuccess) queue_of(stream)->is_captured = true;
    }
    [[nodiscard]] std::int64_t end_capture(Stream stream) {
        if (!is_captured(stream)) return -1;
        Queue& queue = *queue_of(stream);
        graphs_.push_back(std::exchange(queue.graph, {}));
        queue.is_captured = false;
        return static_cast<std::int64_t>(graphs_.size()) - 1;
    }
    [[nodiscard]] Status replay(std::int64_t graph, Stream stream) {
        if (graph < 0 || graph >= static_cast<std::int64_t>(graphs_.size())) return kInvalidHandle;
        for (const Task& task : graphs_[static_cast<std::size_t>(graph)]) {
            const Status status = give(stream, task);
            if (status != kSuccess) return status;
        }
        return kSuccess;
    }
    void finish(const Signal& signal) {
        while (!signal.is_done) run_one();
    }
    void run_all() {
        while (num_waiting() > 0) run_one();
    }
    [[nodiscard]] std::int64_t num_waiting() const {
        std::int64_t n = 0;
        for_each_queue(
            [&n](const Queue& queue) { n += static_cast<std::int64_t>(queue.tasks.size()); });
        return n;
    }

    [[nodiscard]] Status allocate(int device, std::int64_t bytes, void** pointer) {
        *pointer = nullptr;
        const Status status = check(device);
        if (status != kSuccess || bytes == 0) return status;
        if (bytes < 0) return kInvalidValue;
        std::int64_t& left = free_[static_cast<std::size_t>(device)];
        if (bytes > left) return kOutOfMemory;
        const auto size = static_cast<std::size_t>(bytes);
        *pointer = ::operator new(size, std::align_val_t{kAlignment}, std::nothrow);
        if (*pointer == nullptr) return kOutOfMemory;
        std::memset(*pointer, 0xff, size);  // callers must not rely on zeros
        blocks_[*pointer] = {device, size};
        left -= bytes;
        return kSuccess;
    }
    [[nodiscard]] Status free(void* pointer) {
        if (pointer == nullptr) return kSuccess;
        if (old_blocks_.erase(pointer) == 1) {
            release(pointer);
            return kSuccess;
        }
        const auto found = blocks_.find(pointer);
        if (found == blocks_.end()) return kInvalidValue;
        run_all();  // as cudaFree does
        free_[static_cast<std::size_t>(found->second.device)] +=
            static_cast<std::int64_t>(found->second.bytes);
        release(pointer);
        blocks_.erase(found);
        return kSuccess;
    }
    [[nodiscard]] std::int64_t free_bytes(int device) const {
        return free_[static_cast<std::size_t>(device)];
    }
    [[nodiscard]] std::int64_t total_bytes() const { return total_; }
    [[nodiscard]] int device_of(const void* pointer) const {
        auto after = blocks_.upper_bound(const_cast<void*>(pointer));
        if (after == blocks_.begin()) return -1;
        --after;
        const auto offset =
            static_cast<const std::byte*>(pointer) - static_cast<const std::byte*>(after->first);
        return static_cast<std::size_t>(offset) < after->second.bytes ? after->second.device : -1;
    }
    [[nodiscard]] Status pin(void* pointer, std::int64_t bytes) {
        if (defaults_.empty()) return kNoDriver;
        return pinned_.emplace(pointer, bytes).second ? kSuccess : kInvalidValue;
    }
    // True if memory belongs to a device or is pinned.
    [[nodiscard]] bool knows(const void* pointer) const {
        if (device_of(pointer) >= 0) return true;
        auto after = pinned_.upper_bound(const_cast<void*>(pointer));
        if (after == pinned_.begin()) return false;
        --after;
        return static_cast<const std::byte*>(pointer) -
                   static_cast<const std::byte*>(after->first) <
               after->second;
    }
    // Does not wait, so waiting copies of the range are a fault: a GPU would continue them. Here
    // they run before their memory is released.
    [[nodiscard]] Status unpin(void* pointer) {
        const auto found = pinned_.find(pointer);
        if (found == pinned_.end()) return kInvalidValue;
        const Range range{pointer, static_cast<std::size_t>(found->second)};
        bool is_touched = false;
        for_each_queue([&](const Queue& queue) {
            for (const Task& task : queue.tasks) {
                for (const Range& each : task.touched) is_touched |= each.overlaps(range);
            }
        });
        if (is_touched) {
            ++faults_;
            run_all();
        }
        pinned_.erase(found);
        return kSuccess;
    }
    [[nodiscard]] std::int64_t faults() const { return faults_; }

    [[nodiscard]] Status create_stream(int device, Stream* stream) {
        const Status status = check(device);
        if (status != kSuccess) return status;
        auto queue = std::make_unique<Queue>(Queue{device, {}});
        *stream = {device, queue.get()};
        streams_[queue.get()] = std::move(queue);
        return kSuccess;
    }
    // Does not wait: the waiting tasks of the stream run later.
    [[nodiscard]] Status destroy_stream(Stream stream) {
        if (old_streams_.erase(stream.handle) == 1) return kSuccess;
        const auto found = streams_.find(stream.handle);
        if (found == streams_.end()) return kInvalidHandle;
        if (!found->second->tasks.empty()) orphans_.push_back(std::move(found->second));
        streams_.erase(found);
        return kSuccess;
    }
    [[nodiscard]] Status create_event(int device, Event* event) {
        const Status status = check(device);
        if (status != kSuccess) return status;
        auto marker = std::make_shared<Marker>(Marker{device});
        *event = {device, marker.get()};
        events_[event->handle] = std::move(marker);
        return kSuccess;
    }
    [[nodiscard]] Status destroy_event(void* event) {
        if (old_events_.erase(event) == 1) return kSuccess;
        return events_.erase(event) == 1 ? kSuccess : kInvalidHandle;
    }
    [[nodiscard]] std::shared_ptr<Marker> marker_of(void* event) const {
        const auto found = events_.find(event);
        return found == events_.end() ? nullptr : found->second;
    }

    [[nodiscard]] Alive alive() const {
        return {
            static_cast<std::int64_t>(blocks_.size()), static_cast<std::int64_t>(streams_.size()),
            static_cast<std::int64_t>(events_.size()), static_cast<std::int64_t>(pinned_.size())};
    }

    std::mutex mutex;

   private:
    static void release(void* pointer) { ::operator delete(pointer, std::align_val_t{kAlignment}); }
    [[nodiscard]] Queue* queue_of(Stream stream) {
        const auto number = reinterpret_cast<std::uintptr_t>(stream.handle);
        if (number <= kLegacy) return &defaults_[static_cast<std::size_t>(stream.device)];
        if (number == kPerThread) {
            const auto key = std::pair(stream.device, std::this_thread::get_id());
            return &of_threads_.try_emplace(key, Queue{stream.device, {}}).first->second;
        }
        const auto found = streams_.find(stream.handle);
        if (found == streams_.end() || found->second->device != stream.device) return nullptr;
        return found->second.get();
    }
    // SplitMix64 (Steele, Lea and Flood 2014): the seed is its only state.
    [[nodiscard]] std::uint64_t next_random() noexcept {
        random_ += 0x9e3779b97f4a7c15U;
        std::uint64_t bits = random_;
        bits = (bits ^ (bits >> 30U)) * 0xbf58476d1ce4e5b9U;
        bits = (bits ^ (bits >> 27U)) * 0x94d049bb133111ebU;
        return bits ^ (bits >> 31U);
    }
    template <class Visit>
    void for_each_queue(const Visit& visit) const {
        for (const Queue& queue : defaults_) visit(queue);
        for (const auto& [key, queue] : of_threads_) visit(queue);
        for (const auto& [key, queue] : streams_) visit(*queue);
        for (const auto& queue : orphans_) visit(*queue);
    }
    // A device's legacy default stream and the default streams of its threads wait for each other.
    void put_in_order(Queue& queue) {
        Queue& legacy = defaults_[static_cast<std::size_t>(queue.device)];
        for (auto& [key, other] : of_threads_) {
            if (key.first != queue.device) continue;
            if (&queue == &legacy) put_behind(queue, other);
            if (&queue == &other) put_behind(queue, legacy);
        }
    }
    static void put_behind(Queue& queue, Queue& other) {
        if (other.tasks.empty()) return;
        const auto signal = std::make_shared<Signal>();
        other.tasks.push_back({nullptr, signal, false});
        queue.tasks.push_back({nullptr, signal, true});
    }
    // Runs the first task of a random ready queue. A queue is always ready: an event is recorded
    // before it is waited for, so each signal has a task that sets it.
    void run_one() {
        std::vector<Queue*> ready;
        for_each_queue([&ready](const Queue& queue) {
            if (queue.tasks.empty() || !queue.tasks.front().is_ready()) return;
            ready.push_back(const_cast<Queue*>(&queue));
        });
        Queue& chosen = *ready[next_random() % ready.size()];
        const Task task = std::move(chosen.tasks.front());
        chosen.tasks.pop_front();
        task.run();
    }

    std::map<void*, Block> blocks_;
    std::map<void*, std::int64_t> pinned_;
    std::map<void*, std::unique_ptr<Queue>> streams_;
    std::map<void*, std::shared_ptr<Marker>> events_;
    // Blocks, streams and events from before a reset, until their owners release them.
    std::map<void*, Block> old_blocks_;
    std::map<void*, std::unique_ptr<Queue>> old_streams_;
    std::map<void*, std::shared_ptr<Marker>> old_events_;
    std::deque<Queue> defaults_;
    std::map<std::pair<int, std::thread::id>, Queue> of_threads_;
    std::vector<std::unique_ptr<Queue>> orphans_;  // queues of destroyed streams
    std::int64_t faults_ = 0;
    std::vector<std::vector<Task>> graphs_;
    std::vector<std::int64_t> free_;
    std::int64_t total_ = 0;
    Order order_ = Order::kAtOnce;
    std::uint64_t random_ = 0;
};

/// Returns the machine of the process.
[[nodiscard]] Machine& machine();

using Lock = std::lock_guard<std::mutex>;

}  // namespace kvcore::cuda::emulation
