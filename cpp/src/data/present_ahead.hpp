// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>

namespace kvcore {

/// Makes mapped memory present before it is used, from its start. A thread that writes to fresh
/// memory waits until the system has cleared it, and if several threads write to one huge page at
/// the same time, each of them clears it. The constructor makes the first `ahead` bytes present,
/// and a background thread the bytes after them.
///
/// Owns: the thread. The memory is not owned and must live longer.
/// Invariant: at most `ahead` bytes and one piece are present past the end of the furthest use.
/// Threads: any number may call `use`. In a child of fork, and if the system does not support it or
/// cannot start a thread, nothing is done: memory becomes present when it is written. Do not
/// destroy the object in a child: its thread, and the locks that the thread may hold, belong to the
/// parent.
/// Cost: the constructor clears `ahead` bytes, 0.2 s for 1 GiB of huge pages. `use` is O(1) within
/// the present memory; otherwise it clears the bytes that are missing.
class PresentAhead {
   public:
    PresentAhead(std::byte* memory, std::size_t bytes, std::size_t ahead) noexcept;
    PresentAhead(const PresentAhead&) = delete;
    PresentAhead& operator=(const PresentAhead&) = delete;
    ~PresentAhead();

    /// Call this before a write to bytes before `end`. Ignored if `end` is more than `ahead` bytes
    /// past the present memory.
    void use(std::size_t end) noexcept;
    /// True if this process is a child (by fork) of the process that built the object.
    [[nodiscard]] bool is_forked() const noexcept;
    /// Returns the number of bytes from the start that `use` does not wait for. O(1).
    [[nodiscard]] std::size_t present() const noexcept { return present_; }

   private:
    [[nodiscard]] bool is_behind() const noexcept;
    void advance() noexcept;
    void work() noexcept;

    std::byte* memory_;
    std::size_t bytes_;
    std::size_t ahead_;
    pid_t process_;
    std::atomic<std::size_t> used_{0};
    std::atomic<std::size_t> present_{0};
    std::mutex clearing_;  // held while a step clears memory
    std::mutex mutex_;     // guards the members after it
    std::condition_variable changed_;
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace kvcore
