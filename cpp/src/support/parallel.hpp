// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

namespace kvcore::cpu {

/// Bytes below which a thread costs more than it saves.
constexpr std::int64_t kWorthAThread = 1 << 18;

/// The number of pieces of `bytes` each that are worth a thread.
[[nodiscard]] constexpr std::int64_t worth_a_thread(std::int64_t bytes) noexcept {
    return kWorthAThread / std::max<std::int64_t>(1, bytes) + 1;
}

/// Starts a thread, or throws if the system has no thread left.
struct StartThread {
    template <class Work>
    std::thread operator()(Work&& work) const {
        return std::thread(std::forward<Work>(work));
    }
};

/// Threads that are joined in any case: destroying a thread object that still runs ends the
/// process.
class JoiningThreads {
   public:
    JoiningThreads() = default;
    JoiningThreads(const JoiningThreads&) = delete;
    JoiningThreads& operator=(const JoiningThreads&) = delete;
    ~JoiningThreads() {
        for (std::thread& thread : threads_) thread.join();
    }

    /// Returns false if no memory or no thread is left: the caller must do the work.
    template <class Start, class Work>
    [[nodiscard]] bool start(const Start& start, const Work& work) noexcept {
        try {
            threads_.emplace_back();
            threads_.back() = start(work);
            return true;
        } catch (const std::exception&) {
            while (!threads_.empty() && !threads_.back().joinable()) threads_.pop_back();
            return false;
        }
    }

   private:
    std::vector<std::thread> threads_;
};

/// Calls body(begin, end) for parts of 0 .. n, each on its own thread, including the calling
/// thread. Parts of less than `least` are not worth a thread. If a thread cannot be started, the
/// caller does its part and the later parts: a limit of the system costs time, never the process.
template <class Body, class Start = StartThread>
void parallel_for(std::int64_t n, std::int64_t least, int threads, const Body& body,
                  const Start& start = {}) {
    const std::int64_t worth = least > 0 ? n / least : n;
    const std::int64_t parts = std::max<std::int64_t>(1, std::min<std::int64_t>(threads, worth));
    const auto part = [&body, n, parts](std::int64_t i) {
        body(n * i / parts, n * (i + 1) / parts);
    };
    JoiningThreads others;
    std::int64_t next = 1;
    while (next < parts && others.start(start, [part, next] { part(next); })) ++next;
    part(0);
    for (; next < parts; ++next) part(next);
}

}  // namespace kvcore::cpu
