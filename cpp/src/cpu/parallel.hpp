// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvcore::cpu {

/// Bytes below which a thread costs more than it saves.
constexpr std::int64_t kWorthAThread = 1 << 18;

/// How many pieces of `bytes` each are worth a thread.
[[nodiscard]] constexpr std::int64_t worth_a_thread(std::int64_t bytes) noexcept {
    return kWorthAThread / std::max<std::int64_t>(1, bytes) + 1;
}

/// Calls body(begin, end) for parts of 0 .. n, each on a thread of its own; the caller's is one of
/// them. Parts of less than `least` are not worth a thread.
template <class Body>
void parallel_for(std::int64_t n, std::int64_t least, int threads, const Body& body) {
    const std::int64_t worth = least > 0 ? n / least : n;
    const std::int64_t parts = std::max<std::int64_t>(1, std::min<std::int64_t>(threads, worth));
    std::vector<std::thread> others;
    for (std::int64_t i = 1; i < parts; ++i) {
        others.emplace_back([&body, n, i, parts] { body(n * i / parts, n * (i + 1) / parts); });
    }
    body(0, n / parts);
    for (std::thread& other : others) other.join();
}

}  // namespace kvcore::cpu
