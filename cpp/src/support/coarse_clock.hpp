// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <ctime>
#else
#include <chrono>
#endif

namespace kvcore {

/// The time in ns, from a clock of which no read is less than an earlier read. On Linux the kernel
/// stores this time every few ms, and a call only reads the stored time.
[[nodiscard]] inline std::int64_t coarse_time() noexcept {
#if defined(__linux__)
    std::timespec now{};
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
#else
    using std::chrono::steady_clock;
    return std::chrono::nanoseconds(steady_clock::now().time_since_epoch()).count();
#endif
}

}  // namespace kvcore
