// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kvcore {

/// A batch of pages to read or write, with a call of `run` for each page.
///
/// Threads: several threads call `run` at a time, each for another page; another thread may wait.
class StoreJob {
   public:
    explicit StoreJob(std::int64_t size);
    StoreJob(const StoreJob&) = delete;
    StoreJob& operator=(const StoreJob&) = delete;
    virtual ~StoreJob() = default;

    /// Reads or writes a page on thread `worker` of the queue. Never throws: failures are counted.
    virtual void run(std::int64_t page, std::size_t worker) noexcept = 0;
    /// The result of the batch, after all pages are done.
    [[nodiscard]] virtual std::int64_t result() const noexcept = 0;

    [[nodiscard]] std::int64_t size() const noexcept { return size_; }
    [[nodiscard]] bool done() const noexcept;
    /// Waits for at most `seconds`, forever if negative. Call it only if `is_here`.
    bool wait(double seconds) const;
    /// Returns true if the threads of the job are in this process: false in a fork.
    [[nodiscard]] bool is_here() const noexcept;

   protected:
    /// Call it before the job is submitted.
    void set_size(std::int64_t size) noexcept { size_ = left_ = size; }

   private:
    friend class IoQueue;
    void finish_one() noexcept;

    std::int64_t size_;
    std::int64_t next_ = 0;  // next page to run; guarded by the queue's lock
    pid_t process_;
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::int64_t left_;
};

enum class Submission { kAccepted, kFull, kStopped };

/// Threads that run jobs in order of arrival, page by page.
///
/// Owns: the threads.
/// Invariant: at most `most_pages` pages wait, except for a single larger job.
/// Threads: any number.
class IoQueue {
   public:
    /// `patience_seconds`: the maximum time that a job waits for room. Throws std::system_error if
    /// the system has no more threads.
    IoQueue(int threads, std::int64_t most_pages, double patience_seconds);
    IoQueue(const IoQueue&) = delete;
    IoQueue& operator=(const IoQueue&) = delete;
    ~IoQueue() { stop(); }

    /// Waits for room. The job runs only if the result is kAccepted. Calls `accepted` before any
    /// page of the job runs.
    template <class Accepted>
    [[nodiscard]] Submission submit(const std::shared_ptr<StoreJob>& job,
                                    const Accepted& accepted) {
        if (job->size() == 0) return Submission::kAccepted;
        std::unique_lock<std::mutex> lock(mutex_);
        const Submission answer = push(job, lock);
        if (answer == Submission::kAccepted) accepted();
        return answer;
    }
    [[nodiscard]] std::int64_t num_waiting() const noexcept;
    /// Runs the waiting jobs and joins the threads.
    void stop() noexcept;

   private:
    [[nodiscard]] Submission push(const std::shared_ptr<StoreJob>& job,
                                  std::unique_lock<std::mutex>& lock);
    void work(std::size_t worker) noexcept;

    mutable std::mutex mutex_;
    std::condition_variable has_work_;
    std::condition_variable has_room_;
    std::deque<std::shared_ptr<StoreJob>> jobs_;
    std::int64_t waiting_ = 0;  // pages
    std::int64_t most_pages_;
    double patience_;  // seconds
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace kvcore
