// SPDX-License-Identifier: Apache-2.0
// The victims if layers have windows, and some layers have a state, under each policy: ColumnPages
// evicts the same pages as its slow twin, in trees with the same history.
// --count: operations of each policy and configuration.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/check.hpp"
#include "support/eviction_orders.hpp"
#include "support/layer_groups.hpp"
#include "support/random.hpp"
#include "traffic/group_side.hpp"

namespace tests::stress::group_policies {

using kvcore::CacheGroup;
using kvcore::ColumnPages;
using kvcore::EvictionOrder;
using kvcore::Grouping;
using kvcore::Retention;
using kvcore::TokenId;

namespace {

using Real = GroupSide<ColumnPages, kvcore::WindowPolicy>;
using Slow = GroupSide<SlowColumns, SlowPolicy>;
using Tokens = Real::Tokens;

constexpr std::int32_t kPage = Real::kPage;

class Lockstep {
   public:
    Lockstep(const std::vector<CacheGroup>& groups, std::int64_t num_pages, std::int64_t num_slots,
             EvictionOrder order, std::uint64_t seed)
        : grouping_(kPage, groups),
          real_(grouping_, num_pages,
                std::make_unique<kvcore::WindowPolicy>(kvcore::make_policy({order, 16}, kPage),
                                                       static_cast<std::size_t>(num_slots)),
                num_slots),
          slow_(grouping_, num_pages,
                std::make_unique<SlowPolicy>(kvcore::EvictionConfig{order, 16}, kPage), num_slots),
          has_states_(num_slots > 0),
          random_(seed) {
        for (int i = 0; i < 5; ++i) prompts_.push_back(tokens(2 * random_.between(1, 10)));
    }

    void operate() {
        act();
        CHECK_EQ(real_.seen(), slow_.seen());
    }
    [[nodiscard]] std::int64_t evicted() const { return evicted_; }
    void end() {
        while (!real_.rows().empty()) {
            both([](auto& side) { side.release(0, 0); });
        }
        CHECK_EQ(real_.seen(), slow_.seen());
        real_.pages().check_integrity(std::vector<std::uint32_t>(4096));
        while (both([](auto& side) { return side.evict(1, {}); }) > 0) {
            CHECK_EQ(real_.seen(), slow_.seen());
        }
    }

   private:
    // Call a verb on both sides and compare the results.
    template <class Verb>
    std::int64_t both(const Verb& verb) {
        if constexpr (std::is_void_v<decltype(verb(real_))>) {
            verb(real_);
            verb(slow_);
            return 0;
        } else {
            const std::int64_t result = verb(real_);
            CHECK_EQ(result, verb(slow_));
            if (result > 0) evicted_ += result;
            return result;
        }
    }
    Tokens tokens(std::int64_t n) {
        Tokens tokens;
        for (std::int64_t i = 0; i < n; ++i) {
            tokens.push_back(static_cast<TokenId>(random_.below(2)));
        }
        return tokens;
    }
    // Return a prefix of a random prompt, and some more tokens.
    Tokens prompt() {
        Tokens prompt = random_.pick(prompts_);
        prompt.resize(static_cast<std::size_t>(
            kPage * random_.between(1, static_cast<std::int64_t>(prompt.size()) / kPage)));
        for (const TokenId token : tokens(kPage * random_.below(4))) prompt.push_back(token);
        return prompt;
    }
    Retention retention() {
        const auto priority = static_cast<std::int32_t>(20 * random_.below(4));
        return {priority, random_.chance(40) ? now_ + random_.between(1, 60) : Retention::kForever};
    }
    std::int32_t columns() { return static_cast<std::int32_t>(random_.between(1, 14)); }

    void act() {
        const std::int64_t verb = random_.below(100);
        if (verb < 30) {
            if (real_.rows().size() >= 4) return release();
            const Tokens asked = prompt();
            const Retention kept = retention();
            const std::int32_t most = random_.chance(80) ? 100 : columns();
            both([&](auto& side) { return side.claim(asked, kept, most); });
        } else if (verb < 50) {
            const bool ends = has_states_ && random_.chance(60);
            each([&](auto& side, std::size_t i, std::int32_t n) {
                side.commit(i, n);
                if (ends) side.checkpoint(i);
            });
        } else if (verb < 65) {
            const std::uint64_t how = random_.next();
            each([&](auto& side, std::size_t i, std::int32_t n) { side.pass(i, n, how); });
        } else if (verb < 85) {
            release();
        } else if (verb < 90) {
            const Tokens asked = prompt();
            const std::int32_t most = columns();
            const std::int64_t pages = random_.below(4);
            const bool copies = random_.chance(50);
            both([&](auto& side) {
                return copies ? side.copy(asked, most, pages) : side.look(asked, most, pages);
            });
        } else if (verb < 94) {
            // With checkpoints, no page is the source of a partial copy.
            const Tokens guarded = !has_states_ && random_.chance(30) ? prompt() : Tokens();
            const std::int64_t pages = random_.between(1, 5);
            both([&](auto& side) { return side.evict(pages, guarded); });
        } else if (verb < 96) {
            const Tokens used = prompt();
            both([&](auto& side) { side.touch(used); });
        } else if (verb < 99 || !random_.chance(10)) {
            now_ += random_.between(1, 20);
            both([&](auto& side) { side.advance(now_); });
        } else {
            both([](auto& side) { side.reset(); });
        }
    }
    template <class Verb>
    void each(const Verb& verb) {
        if (real_.rows().empty()) return;
        const auto i =
            static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(real_.rows().size())));
        const std::int32_t n = columns();
        both([&](auto& side) { verb(side, i, n); });
    }
    void release() {
        const std::uint64_t how = random_.next();
        each([&](auto& side, std::size_t i, std::int32_t) { side.release(i, how); });
    }

    Grouping grouping_;
    Real real_;
    Slow slow_;
    bool has_states_;
    Random random_;
    std::vector<Tokens> prompts_;
    std::int64_t now_ = 0;
    std::int64_t evicted_ = 0;
};

TEST(every_policy_agrees_with_its_slow_twin) {
    const std::uint64_t seed = check::seed_or(20261124);
    const std::int64_t operations = check::count_or(10000);
    struct Configuration {
        std::vector<CacheGroup> groups;
        std::int64_t num_pages;
        std::int64_t num_slots = 0;  // slots for checkpoints, if layers keep a state
    };
    const std::vector<Configuration> configurations = {
        {{full(), sliding(6)}, 50},
        {{full(), sliding(4), sliding(9)}, 80},
        {{full(), chunked(6), sliding(5, 2)}, 90},
        {{sliding(5), chunked(8, 1, 1)}, 60},
        {{full(), sliding(6)}, 50, 20},
        {{full(), chunked(6), sliding(5, 2)}, 90, 4},
        {{sliding(5), chunked(8, 1, 1)}, 60, 9},
    };
    std::int64_t evicted = 0;
    for (kvcore::EvictionOrder order : eviction_orders::kAll) {
        for (std::size_t i = 0; i < configurations.size(); ++i) {
            check::note = "order " + std::to_string(static_cast<int>(order)) + ", configuration " +
                          std::to_string(i);
            Lockstep pair(configurations[i].groups, configurations[i].num_pages,
                          configurations[i].num_slots, order, seed + i);
            for (std::int64_t k = 0; k < operations; ++k) {
                pair.operate();
            }
            pair.end();
            evicted += pair.evicted();
        }
    }
    std::printf("%lld operations of each policy, %lld pages evicted\n",
                7 * static_cast<long long>(operations), static_cast<long long>(evicted));
}

}  // namespace

}  // namespace tests::stress::group_policies
