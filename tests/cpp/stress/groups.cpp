// SPDX-License-Identifier: Apache-2.0
// Random traffic over layers of which some do not keep every token: small pools, short windows,
// prompts with common prefixes. A layer always reads content that was written for exactly its
// tokens, and `plan` predicts the result of `reserve`. --count: operations of each configuration.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/check.hpp"
#include "support/group_scene.hpp"
#include "support/layer_groups.hpp"
#include "support/random.hpp"

namespace tests::stress::groups {

namespace {

class Traffic {
   public:
    /// `copies_later`: copies are transfers that end later or fail; otherwise they run in list
    /// order.
    Traffic(const kvcore::CacheConfig& config, bool copies_later, std::uint64_t seed)
        : scene_(config), random_(seed), copies_later_(copies_later) {
        for (int i = 0; i < 4; ++i) prompts_.push_back(tokens(random_.between(1, 40)));
    }

    void operate() {
        const std::int64_t verb = random_.below(100);
        if (verb < 18) return claim();
        if (verb < 60) return step();
        if (verb < 68) return release();
        if (verb < 76) return fork();
        if (verb < 82) return truncate();
        if (verb < 86) return pin();
        if (verb < 88) return unpin();
        if (verb < 90) return hold();
        if (verb < 91) return static_cast<void>(scene_.manager.reset_prefix_cache());
        if (verb < 94) return finish();
        reserve();
    }
    [[nodiscard]] std::int64_t num_checked() const { return scene_.num_checked; }
    void end() {
        while (!transfers_.empty()) finish();
        while (!live_.empty()) release();
        while (!pins_.empty()) unpin();
        scene_.manager.reset_prefix_cache();
        CHECK_EQ(scene_.used(), 0);
        CHECK_EQ(scene_.manager.stats(0).free_pages, scene_.manager.config().num_pages);
    }
    void check() const { scene_.manager.check_integrity(); }

   private:
    std::vector<TokenId> tokens(std::int64_t n) {
        std::vector<TokenId> tokens;
        for (std::int64_t i = 0; i < n; ++i) {
            tokens.push_back(static_cast<TokenId>(random_.below(2)));
        }
        return tokens;
    }
    void claim() {
        if (live_.size() >= 5) return release();
        std::vector<TokenId> prompt = random_.pick(prompts_);
        prompt.resize(static_cast<std::size_t>(random_.between(1, count(prompt))));
        for (const TokenId token : tokens(random_.below(12))) prompt.push_back(token);
        if (prompt.empty()) prompt.push_back(1);
        live_.push_back(scene_.claim(prompt, random_.chance(10) ? "other" : ""));
        if (random_.chance(60)) chunk(live_.back());
    }
    // Let only a part of the request's tokens run next.
    void chunk(Request& request) {
        request.active = random_.between(request.start + 1, request.end());
    }
    Request& any() { return random_.pick(live_); }

    void reserve() {
        if (live_.empty()) return;
        Request& request = any();
        const std::int64_t steps = random_.chance(80) ? 1 : random_.between(2, 5);
        try {
            const kvcore::ReservePlan plan = scene_.manager.plan(request.view(), steps);
            const std::int64_t evicted = scene_.manager.metrics().evicted_pages;
            const std::int64_t free = scene_.manager.stats(0).free_pages;
            kvcore::Transfers transfers;
            const kvcore::ReserveStatus status =
                scene_.reserve(request, steps, copies_later_ ? &transfers : nullptr);
            if (!transfers.empty()) transfers_.push_back(transfers);
            if (status == kvcore::ReserveStatus::kPending) return scene_.settle(request);
            CHECK_EQ(plan.fits, status == kvcore::ReserveStatus::kOk);
            if (!plan.fits) CHECK_EQ(scene_.manager.stats(0).free_pages, free);
            const std::int64_t went = scene_.manager.metrics().evicted_pages - evicted;
            if (!plan.fits) CHECK_EQ(went, 0);
            if (plan.fits) CHECK(went >= plan.evicted_pages);
        } catch (const kvcore::CapacityError&) {
            drop(request);
        }
    }
    void step() {
        if (live_.empty()) return;
        std::vector<Request*> batch;
        for (Request& request : live_) {
            if (random_.chance(60)) batch.push_back(&request);
        }
        if (batch.empty()) return;
        while (!transfers_.empty()) finish();
        try {
            if (!scene_.run(batch, copies_later_)) return release();
        } catch (const kvcore::CapacityError&) {
            return release();
        }
        scene_.step(batch, static_cast<TokenId>(random_.below(2)));
        for (Request* request : batch) {
            if (random_.chance(40)) chunk(*request);
        }
    }
    // End copies that were handed out: done or failed.
    void finish() {
        if (transfers_.empty()) return;
        const auto i = random_.below(count(transfers_));
        scene_.finish(item(transfers_, i), random_.chance(80));
        transfers_.erase(transfers_.begin() + i);
    }
    void drop(Request& request) {
        scene_.manager.release(request.sequence);
        live_.erase(live_.begin() + (&request - live_.data()));
    }
    void release() {
        if (!live_.empty()) drop(any());
    }
    void fork() {
        if (live_.empty() || live_.size() >= 5) return;
        Request& parent = any();
        std::vector<TokenId> all(parent.tokens().begin(), parent.tokens().begin() + parent.start);
        for (const TokenId token : tokens(random_.between(1, 6))) all.push_back(token);
        Request child(parent.name_space(), all);
        kvcore::RequestView view = child.view();
        try {
            scene_.manager.fork(parent.view(), {&view, 1});
        } catch (const std::invalid_argument&) {
            return;  // the truncated tokens are no longer written
        } catch (const kvcore::PendingTransfersError&) {
            return;
        }
        child.sequence = view.sequence;
        child.start = view.start;
        child.active = view.active;
        live_.push_back(child);
    }
    void truncate() {
        if (live_.empty()) return;
        Request& request = any();
        const std::int64_t n =
            random_.chance(50) ? request.start - random_.below(6) : random_.below(request.end());
        try {
            scene_.manager.truncate(request.sequence, n);
        } catch (const std::invalid_argument&) {
            return;
        } catch (const kvcore::PendingTransfersError&) {
            return;
        }
        if (n < request.start) {
            request.start = n;
            request.rewind(n + 1);
            request.start = n;
        }
    }
    void pin() {
        if (pins_.size() >= 2) return unpin();
        const std::vector<TokenId>& prompt = random_.pick(prompts_);
        pins_.push_back(scene_.manager.pin(0, "", prompt.data(), count(prompt)));
    }
    void unpin() {
        if (pins_.empty()) return;
        scene_.manager.unpin(pins_.back());
        pins_.pop_back();
    }
    // A hit that is held while other requests run, and is taken or dropped later.
    void hold() {
        if (live_.empty()) return;
        Request& request = any();
        kvcore::PrefixHit hit = scene_.manager.match(request.view());
        scene_.manager.check_integrity();
        if (random_.chance(50)) return;
        kvcore::RequestView view = request.view();
        try {
            kvcore::Transfers transfers;
            static_cast<void>(
                scene_.manager.allocate(hit, view, view.end, copies_later_ ? &transfers : nullptr));
            if (!transfers.empty()) transfers_.push_back(transfers);
        } catch (const kvcore::CapacityError&) {
            return;
        }
        request.start = view.start;
        request.active = view.active;
        if (!copies_later_) scene_.copy();
    }

    GroupScene scene_;
    Random random_;
    std::vector<std::vector<TokenId>> prompts_;
    std::vector<Request> live_;
    std::vector<kvcore::PinHandle> pins_;
    bool copies_later_;
    std::vector<kvcore::Transfers> transfers_;
};

kvcore::CacheConfig with(kvcore::CacheConfig config, bool dedup, std::int32_t partial,
                         std::int64_t drafts, bool caching = true) {
    config.dedup = dedup;
    config.partial_page_reuse = partial;
    config.max_draft_tokens = drafts;
    config.prefix_caching = caching;
    config.max_seq_len = 200;
    return config;
}

TEST(layers_read_their_own_tokens) {
    const std::uint64_t seed = check::seed_or(20261122);
    const std::int64_t operations = check::count_or(20000);
    const auto config = GroupScene::config;
    const std::vector<kvcore::CacheConfig> configs = {
        with(config(4, 60, {full(), sliding(8)}), true, 1, 0),
        with(config(2, 50, {full(), sliding(4, 2)}), true, 0, 0),
        with(config(4, 40, {full(), sliding(5), sliding(11)}), true, 1, 3),
        with(config(4, 44, {full(2), chunked(12)}), true, 1, 0),
        with(config(8, 40, {full(), sliding(6, 1, 2)}), true, 1, 2),
        with(config(4, 14, {sliding(7)}), true, 1, 0),
        with(config(2, 40, {sliding(5, 2), full()}), false, 1, 0),
        with(config(4, 40, {full(), sliding(1)}), true, 1, 0),
        with(config(4, 40, {full(), sliding(9), chunked(8)}), true, 2, 1),
        with(config(4, 40, {full(), sliding(8)}), true, 1, 0, false),
        with(config(1, 60, {full(), sliding(3)}), true, 1, 0),
        with(config(16, 24, {full(), sliding(100)}), true, 1, 0),
    };
    std::int64_t checked = 0;
    for (std::size_t i = 0; i < configs.size(); ++i) {
        for (const bool copies_later : {false, true}) {
            check::note =
                "configuration " + std::to_string(i) + (copies_later ? ", transfers" : "");
            Traffic traffic(configs[i], copies_later, seed + i);
            for (std::int64_t k = 0; k < operations; ++k) {
                traffic.operate();
                if (k % 16 == 0) traffic.check();
            }
            checked += traffic.num_checked();
            traffic.end();
        }
    }
    std::printf("%lld operations, %lld positions read\n",
                static_cast<long long>(operations) * 2 * static_cast<long long>(configs.size()),
                static_cast<long long>(checked));
}

}  // namespace

}  // namespace tests::stress::groups
