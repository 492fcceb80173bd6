// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdio>
#include <memory>
#include <mutex>
#include <vector>

#include "fakes/simulated_memory.hpp"

/// The configuration of the host tier as a pool of its own.
inline kvcore::CacheConfig host_config(kvcore::CacheConfig config) {
    config.num_pages = config.host_pages;
    return config;
}

/// A slot for a request that any thread may use, one thread at a time. Unlocked during copies.
struct Slot {
    std::mutex mutex;
    std::unique_ptr<Request> request;  // nullptr: empty
    std::int32_t replica = 0;
};

/// The data that all threads share.
struct Shared {
    static constexpr std::int64_t kSlots = 18;

    explicit Shared(const kvcore::CacheConfig& config)
        : manager(config), memory(config), host(host_config(config)) {}

    kvcore::CacheManager manager;
    SimulatedMemory memory;
    SimulatedMemory host;
    std::array<Slot, static_cast<std::size_t>(kSlots)> slots;
    std::vector<std::vector<TokenId>> prompts;  // constant once the threads run
    std::atomic<std::int64_t> num_batches{0};
    std::atomic<std::int64_t> num_copies{0};
    std::atomic<std::int64_t> num_loads{0};
    std::atomic<std::int64_t> num_stores{0};
    std::atomic<std::int64_t> num_failed{0};
    std::atomic<std::int64_t> num_owed{0};
    std::atomic<std::int64_t> num_waits{0};
    std::atomic<std::int64_t> num_refused{0};
};

inline void report(const Shared& shared) {
    const auto n = [](const std::atomic<std::int64_t>& counter) {
        return static_cast<long long>(counter.load());
    };
    std::printf(
        "%lld batches, %lld copies, %lld loads, %lld stores, %lld tickets failed, %lld times owed "
        "again, %lld times waited, %lld verbs refused\n",
        n(shared.num_batches), n(shared.num_copies), n(shared.num_loads), n(shared.num_stores),
        n(shared.num_failed), n(shared.num_owed), n(shared.num_waits), n(shared.num_refused));
    std::fflush(stdout);
}
