// SPDX-License-Identifier: Apache-2.0
#include "store/disk/io_queue.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace kvcore {

StoreJob::StoreJob(std::int64_t size) : size_(size), process_(::getpid()), left_(size) {}

bool StoreJob::is_here() const noexcept { return ::getpid() == process_; }

bool StoreJob::done() const noexcept {
    if (!is_here()) return false;  // the lock may stay locked forever
    const std::lock_guard<std::mutex> lock(mutex_);
    return left_ == 0;
}

bool StoreJob::wait(double seconds) const {
    constexpr double kForever = 1e9;
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_done = [this] { return left_ == 0; };
    if (seconds < 0 || seconds > kForever) {
        changed_.wait(lock, is_done);
        return true;
    }
    return changed_.wait_for(lock, std::chrono::duration<double>(seconds), is_done);
}

void StoreJob::finish_one() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--left_ == 0) changed_.notify_all();
}

IoQueue::IoQueue(int threads, std::int64_t most_pages, double patience_seconds)
    : most_pages_(most_pages), patience_(patience_seconds) {
    try {
        for (int i = 0; i < threads; ++i) {
            threads_.emplace_back([this, i] { work(static_cast<std::size_t>(i)); });
        }
    } catch (...) {
        stop();
        throw;
    }
}

Submission IoQueue::push(const std::shared_ptr<StoreJob>& job, std::unique_lock<std::mutex>& lock) {
    const bool has_room = has_room_.wait_for(lock, std::chrono::duration<double>(patience_), [&] {
        return stopping_ || waiting_ == 0 || waiting_ + job->size() <= most_pages_;
    });
    if (!has_room) return Submission::kFull;
    if (stopping_) return Submission::kStopped;
    jobs_.push_back(job);
    waiting_ += job->size();
    has_work_.notify_all();
    return Submission::kAccepted;
}

std::int64_t IoQueue::num_waiting() const noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    return waiting_;
}

void IoQueue::stop() noexcept {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        has_work_.notify_all();
        has_room_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

void IoQueue::work(std::size_t worker) noexcept {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        has_work_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        const std::shared_ptr<StoreJob> job = jobs_.front();
        const std::int64_t page = job->next_++;
        if (job->next_ == job->size()) jobs_.pop_front();
        --waiting_;
        has_room_.notify_all();
        lock.unlock();
        job->run(page, worker);
        job->finish_one();
        lock.lock();
    }
}

}  // namespace kvcore
