// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "support/manager_fixture.hpp"

/// A manager with a host tier, whose copies wait until a test finishes them.
class HostFixture {
   public:
    HostFixture(std::int64_t num_blocks, std::int64_t host_pages)
        : HostFixture(config(num_blocks, host_pages)) {}
    explicit HostFixture(const kvcore::CacheConfig& config) : manager(config) {}
    ~HostFixture() { manager.check_integrity(); }
    HostFixture(const HostFixture&) = delete;
    HostFixture& operator=(const HostFixture&) = delete;

    static kvcore::CacheConfig config(std::int64_t num_blocks, std::int64_t host_pages) {
        kvcore::CacheConfig config = ManagerFixture::config(2, num_blocks);
        config.host_pages = host_pages;
        return config;
    }

    kvcore::CacheManager manager;

    Request claim(const Tokens& tokens, const std::string& name = "") {
        Request request(name, tokens);
        request.sequence = manager.claim();
        return request;
    }
    kvcore::Transfers reserve(Request& request) {
        kvcore::RequestView view = request.view();
        kvcore::Transfers transfers;
        CHECK_EQ(manager.reserve(view, 1, &transfers), kvcore::ReserveStatus::kOk);
        manager.check_integrity();
        request.start = view.start;
        request.active = view.active;
        return transfers;
    }
    /// Commit a step that ran all tokens; return its stores.
    kvcore::Transfers commit(Request& request, TokenId next) {
        ManagerFixture::sample(request, next);
        return commit_batch({&request});
    }
    /// Commit requests whose `start` is after their written tokens.
    kvcore::Transfers commit_batch(const std::vector<Request*>& batch) {
        std::vector<kvcore::RequestView> views;
        for (const Request* request : batch) views.push_back(request->view());
        std::vector<kvcore::PageSwap> swaps;
        kvcore::Transfers stores;
        manager.commit({views.data(), count(views)}, swaps, &stores);
        manager.check_integrity();
        return stores;
    }
    void finish(const kvcore::Transfers& transfers, bool done = true) {
        if (!transfers.empty()) manager.finish(transfers.ticket, done);
        manager.check_integrity();
    }
    /// Leave a prompt in the tier, and none of its pages on the device.
    void put(const Tokens& tokens) {
        Request request = claim(tokens);
        finish(reserve(request));
        finish(commit(request, 0));
        manager.release(request.sequence);
        const std::int64_t pages = manager.config().num_pages;
        Request other = claim(count_up(5000, 2 * pages));
        finish(reserve(other));
        manager.release(other.sequence);
    }
    std::int64_t stored() { return manager.stats(0).host_cached_pages; }
    /// The number of tokens that a prompt would hit, on the device or in the tier.
    std::int64_t hit(Tokens tokens) {
        tokens.push_back(-1);
        Request request = claim(tokens);
        const std::int64_t found = manager.plan(request.view()).hit_tokens;
        manager.release(request.sequence);
        return found;
    }
};
