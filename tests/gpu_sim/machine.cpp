// SPDX-License-Identifier: Apache-2.0
#include "machine.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace gpu_sim {

namespace {

bool is_done(const Point& point) { return point.queue->done >= point.number; }

bool is_ready(const Queue& queue) {
    if (queue.works.empty()) return false;
    const std::vector<Point>& after = queue.works.front().after;
    return std::all_of(after.begin(), after.end(), is_done);
}

bool is_legacy(const void* stream) { return reinterpret_cast<std::uintptr_t>(stream) <= 1; }

}  // namespace

Machine& machine() {
    static Machine& the_machine = *new Machine;  // outlives all owners of its memory
    return the_machine;
}

void Machine::reset(int devices, std::int64_t bytes) {
    run_all();
    for (auto& [handle, queue] : streams_) old_.insert(std::move(queue));
    for (auto& [handle, event] : events_) old_.insert(std::move(event));
    legacy_.clear();
    own_.clear();
    streams_.clear();
    events_.clear();
    leaving_.clear();
    captures_.clear();
    for (int device = 0; device < devices; ++device) {
        legacy_.push_back(std::make_shared<Queue>());
        legacy_.back()->device = device;
    }
    failed_.assign(static_cast<std::size_t>(devices), kSuccess);
    memory.reset(devices, bytes);
    is_any_order_ = false;
    keeps_order_ = false;
}

void Machine::set_order(bool is_any, std::uint64_t seed) {
    run_all();
    is_any_order_ = is_any;
    draw_ = Draw(seed);
}

Status Machine::check(int device) const {
    if (legacy_.empty()) return kNoDriver;
    if (device < 0 || device >= count()) return kInvalidDevice;
    return failed_[static_cast<std::size_t>(device)];
}

std::int64_t Machine::num_failed() const {
    return static_cast<std::int64_t>(failed_.size()) -
           std::count(failed_.begin(), failed_.end(), kSuccess);
}

// ---- streams ----------------------------------------------------------------------------------

Status Machine::create_stream(int device, bool is_blocking, void** stream) {
    const Status status = check(device);
    if (status != kSuccess) return status;
    auto queue = std::make_shared<Queue>();
    queue->device = device;
    queue->is_blocking = is_blocking;
    *stream = queue.get();
    streams_[*stream] = std::move(queue);
    return kSuccess;
}

Status Machine::destroy_stream(void* stream) {
    const auto found = streams_.find(stream);
    if (found == streams_.end()) return kInvalidHandle;
    if (!found->second->works.empty()) leaving_.push_back(found->second);
    old_.insert(found->second);
    streams_.erase(found);
    return kSuccess;
}

std::shared_ptr<Queue> Machine::queue_of(int device, void* stream) {
    if (is_legacy(stream)) return legacy_[static_cast<std::size_t>(device)];
    if (reinterpret_cast<std::uintptr_t>(stream) == 2) {
        auto& own = own_[{std::this_thread::get_id(), device}];
        if (own == nullptr) {
            own = std::make_shared<Queue>();
            own->device = device;
            own->is_blocking = true;
        }
        return own;
    }
    const auto found = streams_.find(stream);
    return found == streams_.end() ? nullptr : found->second;
}

Status Machine::give(int device, void* stream, Task task) {
    const Status status = check(device);
    if (status != kSuccess) return status;
    const std::shared_ptr<Queue> queue = queue_of(device, stream);
    if (queue == nullptr) return kInvalidHandle;
    if (queue->capture != nullptr) {
        if (!queue->capture->is_valid) return kCaptureInvalidated;
        queue->capture->tasks.push_back(std::move(task));
        return kSuccess;
    }
    Work work{std::move(task), {}};
    if (is_legacy(stream)) {
        for (const auto& other : queues()) {
            if (other->device != device || !other->is_blocking) continue;
            if (other->capture != nullptr) return invalidate(other, kCaptureImplicit);
            work.after.push_back({other, other->given});
        }
    } else if (queue->is_blocking) {
        const auto& legacy = legacy_[static_cast<std::size_t>(queue->device)];
        work.after.push_back({legacy, legacy->given});
    }
    ++queue->given;
    queue->works.push_back(std::move(work));
    if (!is_any_order_) run_all();
    return kSuccess;
}

Status Machine::finish(int device, void* stream) {
    const Status status = check(device);
    if (status != kSuccess) return status;
    const std::shared_ptr<Queue> queue = queue_of(device, stream);
    if (queue == nullptr) return kInvalidHandle;
    if (queue->capture != nullptr) return invalidate(queue, kCaptureUnsupported);
    wait_for({queue, queue->given});
    return check(device);
}

Status Machine::finish_device(int device) {
    for (const auto& queue : queues()) {
        if (queue->device == device) wait_for({queue, queue->given});
    }
    return check(device);
}

std::vector<std::shared_ptr<Queue>> Machine::queues() const {
    std::vector<std::shared_ptr<Queue>> all = legacy_;
    for (const auto& [thread, queue] : own_) all.push_back(queue);
    for (const auto& [handle, queue] : streams_) all.push_back(queue);
    all.insert(all.end(), leaving_.begin(), leaving_.end());
    return all;
}

std::int64_t Machine::num_waiting() const {
    std::size_t n = 0;
    for (const auto& queue : queues()) n += queue->works.size();
    return static_cast<std::int64_t>(n);
}

void Machine::run_all() {
    while (num_waiting() > 0) run_one();
}

void Machine::wait_for(const Point& point) {
    while (!is_done(point)) run_one();
}

// Work is queued after the work it waits for, so some queue is ready.
void Machine::run_one() {
    std::vector<std::shared_ptr<Queue>> ready;
    for (auto& queue : queues()) {
        if (is_ready(*queue)) ready.push_back(std::move(queue));
    }
    Queue& queue = *ready.at(draw_.below(ready.size()));
    const Work work = std::move(queue.works.front());
    queue.works.pop_front();
    perform(queue.device, work.task);
    ++queue.done;
    const auto is_empty = [](const auto& one) { return one->works.empty(); };
    leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(), is_empty), leaving_.end());
}

// After a failure a device runs nothing more; each call returns the error.
void Machine::perform(int device, const Task& task) {
    Status& failed = failed_[static_cast<std::size_t>(device)];
    if (failed != kSuccess || !task) return;
    try {
        task();
    } catch (const Fault& fault) {
        std::fprintf(stderr, "simulated GPU %d: %s\n", device, fault.what());
        failed = fault.status();
    }
}

// ---- events -----------------------------------------------------------------------------------

Status Machine::create_event(int device, void** event) {
    const Status status = check(device);
    if (status != kSuccess) return status;
    auto made = std::make_shared<Event>();
    made->device = device;
    *event = made.get();
    events_[*event] = std::move(made);
    return kSuccess;
}

Status Machine::destroy_event(void* event) {
    const auto found = events_.find(event);
    if (found == events_.end()) return kInvalidHandle;
    old_.insert(found->second);
    events_.erase(found);
    return kSuccess;
}

Status Machine::record(int device, void* event, void* stream) {
    const auto found = events_.find(event);
    if (found == events_.end()) return kInvalidHandle;
    const std::shared_ptr<Queue> queue =
        check(device) == kSuccess ? queue_of(device, stream) : nullptr;
    if (queue == nullptr || found->second->device != queue->device) return kInvalidHandle;
    Event& to = *found->second;
    to.capture = queue->capture;
    if (to.capture != nullptr) return to.capture->is_valid ? kSuccess : kCaptureInvalidated;
    const Status status = give(device, stream, nullptr);
    if (status == kSuccess) to.point = Point{queue, queue->given};
    return status;
}

Status Machine::wait(int device, void* stream, void* event) {
    const auto found = events_.find(event);
    if (found == events_.end()) return kInvalidHandle;
    const std::shared_ptr<Queue> queue =
        check(device) == kSuccess ? queue_of(device, stream) : nullptr;
    if (queue == nullptr) return kInvalidHandle;
    const Event& of = *found->second;
    if (of.capture != nullptr && queue->capture == nullptr) queue->capture = of.capture;  // joins
    if (queue->capture != of.capture) return invalidate(queue, kCaptureIsolation);
    if (queue->capture != nullptr || !of.point) return kSuccess;
    const Point point = *of.point;
    const Status status = give(device, stream, nullptr);
    if (status == kSuccess && !queue->works.empty()) queue->works.back().after.push_back(point);
    return status;
}

Status Machine::query(void* event) {
    const auto found = events_.find(event);
    if (found == events_.end()) return kInvalidHandle;
    const Event& of = *found->second;
    if (of.capture != nullptr) return kCapturedEvent;
    if (of.point && !is_done(*of.point)) return kNotReady;
    return check(of.device);
}

Status Machine::finish_event(void* event) {
    const auto found = events_.find(event);
    if (found == events_.end()) return kInvalidHandle;
    const Event of = *found->second;
    if (of.capture != nullptr) return kCapturedEvent;
    if (of.point) wait_for(*of.point);
    return check(of.device);
}

// ---- graphs -----------------------------------------------------------------------------------

Status Machine::begin_capture(int device, void* stream, bool is_global) {
    const Status status = check(device);
    if (status != kSuccess) return status;
    const std::shared_ptr<Queue> queue = queue_of(device, stream);
    if (queue == nullptr) return kInvalidHandle;
    if (is_legacy(stream)) return kCaptureUnsupported;
    if (queue->capture != nullptr) return kInvalidValue;
    queue->capture = std::make_shared<Capture>();
    queue->capture->is_global = is_global;
    queue->capture->thread = std::this_thread::get_id();
    captures_.push_back(queue->capture);
    return kSuccess;
}

Status Machine::end_capture(int device, void* stream, std::vector<Task>* tasks) {
    const std::shared_ptr<Queue> queue =
        check(device) == kSuccess ? queue_of(device, stream) : nullptr;
    if (queue == nullptr || queue->capture == nullptr) return kInvalidValue;
    const std::shared_ptr<Capture> capture = queue->capture;
    for (const auto& one : queues()) {
        if (one->capture == capture) one->capture = nullptr;
    }
    captures_.erase(std::find(captures_.begin(), captures_.end(), capture));
    if (!capture->is_valid) return kCaptureInvalidated;
    *tasks = capture->tasks;
    return kSuccess;
}

Status Machine::refuse_in_capture(bool is_thread_relaxed) {
    if (is_thread_relaxed) return kSuccess;
    Status status = kSuccess;
    for (const auto& capture : captures_) {
        if (!capture->is_global && capture->thread != std::this_thread::get_id()) continue;
        capture->is_valid = false;
        status = kCaptureUnsupported;
    }
    return status;
}

Status Machine::invalidate(const std::shared_ptr<Queue>& queue, Status status) {
    if (queue->capture != nullptr) queue->capture->is_valid = false;
    return status;
}

// ---- kernels and copies -----------------------------------------------------------------------

Status Machine::launch(void* stream, Launch launch) {
    const std::shared_ptr<Queue> queue = queue_of(launch.device, stream);
    if (queue == nullptr || queue->device != launch.device) return kInvalidHandle;
    const auto work = [this, launch = std::move(launch)]() mutable {
        launch.seed = keeps_order_ ? 0 : 1 + draw_.below(std::uint64_t{1} << 32);
        run(launch, memory, counts_[launch.kernel.name]);
    };
    return give(launch.device, stream, work);
}

Status Machine::copy(int device, void* stream, void* to, const void* from, std::size_t bytes,
                     bool is_batch) {
    const Status status = check(device);
    if (status != kSuccess || bytes == 0) return status;
    const std::shared_ptr<Queue> queue = queue_of(device, stream);
    if (queue == nullptr) return kInvalidHandle;
    const bool is_read_now = !is_batch && memory.region_of(from).owner == Owner::kPageable;
    const bool is_written_now = !is_batch && memory.region_of(to).owner == Owner::kPageable;
    if (queue->capture != nullptr && (is_read_now || is_written_now)) {
        return invalidate(queue, kCaptureUnsupported);
    }
    // For pageable memory a driver copies the source now, or waits before it writes the target.
    std::vector<std::byte> staged(is_read_now ? bytes : 0);
    if (is_read_now) std::memcpy(staged.data(), from, bytes);
    const Owner owners[2] = {memory.region_of(to).owner, memory.region_of(from).owner};
    const auto work = [=, staged = std::move(staged)] {
        const void* ends[2] = {to, from};
        for (int side = 0; side < 2; ++side) {
            const Region region = memory.region_of(ends[side]);
            const auto last = reinterpret_cast<std::uintptr_t>(ends[side]) + bytes;
            if (region.owner == Owner::kPageable && owners[side] == Owner::kPageable) continue;
            if (region.owner != owners[side] || region.owner >= Owner::kPageable ||
                last > region.end) {
                throw Fault(kIllegalAddress, std::string("a copy of ") + std::to_string(bytes) +
                                                 (side == 0 ? " bytes to" : " bytes from") +
                                                 " memory that ends before, or is no more");
            }
        }
        std::memmove(to, staged.empty() ? from : staged.data(), bytes);
    };
    const Status given = give(device, stream, work);
    return given == kSuccess && is_written_now ? finish(device, stream) : given;
}

}  // namespace gpu_sim
