// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "support/host_fixture.hpp"

inline kvcore::CacheConfig tier_config(kvcore::WritePolicy policy, std::int64_t num_pages,
                                       std::int64_t host_pages) {
    kvcore::CacheConfig config = HostFixture::config(num_pages, host_pages);
    config.write_policy = policy;
    return config;
}

/// A host tier whose calls wait for stores that make room, as an engine's calls do. Pages have 2
/// tokens.
struct TierScene : HostFixture {
    using HostFixture::HostFixture;

    kvcore::ReserveStatus try_reserve(Request& request, kvcore::Transfers& transfers) {
        kvcore::RequestView view = request.view();
        transfers.clear();
        const kvcore::ReserveStatus status = manager.reserve(view, 1, &transfers);
        manager.check_integrity();
        request.start = view.start;
        request.active = view.active;
        return status;
    }
    /// Reserve, and wait as often as necessary. Return the number of pages that were stored.
    std::int64_t settle(Request& request, bool done = true) {
        std::int64_t stored = 0;
        kvcore::Transfers transfers;
        while (try_reserve(request, transfers) == kvcore::ReserveStatus::kPending) {
            CHECK(!transfers.empty());
            stored += count(transfers.tier_moves);
            finish(transfers, done);
        }
        finish(transfers);
        return stored;
    }
    Request begin(const Tokens& tokens) {
        Request request = claim(tokens);
        settle(request);
        return request;
    }
    /// Run a prompt and release it. Return the number of pages that its step stored.
    std::int64_t serve(const Tokens& tokens) {
        Request request = begin(tokens);
        const kvcore::Transfers stores = commit(request, 0);
        finish(stores);
        manager.release(request.sequence);
        return count(stores.tier_moves);
    }
    /// Take `pages` pages for a moment. Return the number of pages that were stored for it.
    std::int64_t crowd_out(std::int64_t pages, bool done = true) {
        Request other = claim(count_up(5000, 2 * pages));
        const std::int64_t stored = settle(other, done);
        manager.release(other.sequence);
        return stored;
    }
    std::int64_t on_device(const Tokens& tokens) {
        return manager.match(0, "", tokens.data(), count(tokens));
    }
};
