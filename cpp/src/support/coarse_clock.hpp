// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <ctime>
#else
#include <chrono>
#endif

namespace kvcore {

/// The time in ns of a clock that never goes back. On Linux a read takes a few ns, because the
/// program does not read the clock of the processor; the time moves every few ms.
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
