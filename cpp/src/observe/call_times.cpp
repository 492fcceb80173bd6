// SPDX-License-Identifier: Apache-2.0
#include "kvcore/metrics.hpp"

#include <chrono>

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace kvcore {
namespace {

std::int64_t read_clock() noexcept {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#if defined(__x86_64__)
// Returns true if the counter runs at a constant rate, whatever the clock rate of the processor.
bool has_counter() noexcept {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d >> 8 & 1) != 0;
}
std::int64_t read_counter() noexcept { return static_cast<std::int64_t>(__rdtsc()); }
#elif defined(__aarch64__)
bool has_counter() noexcept { return true; }
std::int64_t read_counter() noexcept {
    std::int64_t ticks = 0;
    asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
}
#else
bool has_counter() noexcept { return false; }
std::int64_t read_counter() noexcept { return 0; }
#endif

constexpr std::int64_t kMeasured = 2'000'000;  // ns

}  // namespace

double CallTimes::measure_tick() noexcept {
    constexpr double kNanosecond = 1e-9;
    if (!has_counter()) return kNanosecond;
    const std::int64_t begun = read_clock();
    const std::int64_t first = read_counter();
    std::int64_t passed = 0;
    while (passed < kMeasured) passed = read_clock() - begun;
    return static_cast<double>(passed) * kNanosecond / static_cast<double>(read_counter() - first);
}

void CallTimes::start(double seconds_per_tick) noexcept {
    if (num_users_++ > 0 || seconds_per_tick_ > 0.0) return;
    uses_counter_ = has_counter();
    seconds_per_tick_ = seconds_per_tick;
    for (std::size_t i = 0; i < bounds_.size(); ++i) {
        const double seconds = static_cast<double>(LatencyHistogram::kBounds[i]) * 1e-9;
        bounds_[i] = static_cast<std::int64_t>(seconds / seconds_per_tick_);
    }
}

std::int64_t CallTimes::now() const noexcept {
    return uses_counter_ ? read_counter() : read_clock();
}

}  // namespace kvcore
