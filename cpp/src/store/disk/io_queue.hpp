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

/// Pages to read or to write, each by one call of `run`.
///
/// Threads: `run` is called by several at a time, for one page each; who waits is another.
class StoreJob {
   public:
    explicit StoreJob(std::int64_t size);
    StoreJob(const StoreJob&) = delete;
    StoreJob& operator=(const StoreJob&) = delete;
    virtual ~StoreJob() = default;

    /// Reads or writes a page on thread `worker` of the queue. Never throws: failures are counted.
    virtual void run(std::int64_t page, std::size_t worker) noexcept = 0;
    /// Once all are done: what the batch came to.
    [[nodiscard]] virtual std::int64_t result() const noexcept = 0;

    [[nodiscard]] std::int64_t size() const noexcept { return size_; }
    [[nodiscard]] bool done() const noexcept;
    /// Forever if `seconds` is negative. Only where `is_here`.
    bool wait(double seconds) const;
    /// Whether its threads are: not so in a child of fork.
    [[nodiscard]] bool is_here() const noexcept;

   protected:
    /// Before it is submitted.
    void set_size(std::int64_t size) noexcept { size_ = left_ = size; }

   private:
    friend class IoQueue;
    void finish_one() noexcept;

    std::int64_t size_;
    std::int64_t next_ = 0;  // to run; the queue's lock is around it
    pid_t process_;
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::int64_t left_;
};

enum class Submission { kAccepted, kFull, kStopped };

/// Threads that run jobs in the order in which they came, each page on its own.
///
/// Owns: the threads.
/// Invariant: no more than `most_pages` wait, but for a job that is larger alone.
/// Threads: any number.
class IoQueue {
   public:
    /// `patience_seconds`: how long a job waits for room. Throws std::system_error where the system
    /// has no thread left.
    IoQueue(int threads, std::int64_t most_pages, double patience_seconds);
    IoQueue(const IoQueue&) = delete;
    IoQueue& operator=(const IoQueue&) = delete;
    ~IoQueue() { stop(); }

    /// Waits until there is room. Unless it says kAccepted, the job does not run. Calls `accepted`
    /// before any of its pages run.
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
    /// Runs what waits and joins the threads.
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
