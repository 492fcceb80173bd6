// SPDX-License-Identifier: Apache-2.0
// The victims if layers keep a state, under each policy: the cache evicts the same pages as its
// slow twin, which looks at every run for each victim. --count: operations of each policy and
// configuration.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/check.hpp"
#include "support/eviction_orders.hpp"
#include "support/random.hpp"
#include "traffic/state_side.hpp"

namespace tests::stress::state_policies {

using kvcore::Retention;

namespace {

using Tokens = RealStates::Tokens;

constexpr std::int32_t kPage = RealStates::kPage;

class Lockstep {
   public:
    /// `all_use`: every release counts as a use.
    Lockstep(std::int64_t num_pages, std::int64_t num_slots, kvcore::EvictionOrder order,
             std::uint64_t seed, bool all_use)
        : real_(num_pages, num_slots, order),
          slow_(num_pages, num_slots, order),
          random_(seed),
          all_use_(all_use) {
        slow_.checks_times = all_use && order == kvcore::EvictionOrder::kLru;
        for (int i = 0; i < 5; ++i) prompts_.push_back(tokens(2 * random_.between(1, 10)));
    }

    void operate() {
        act(random_.below(100));
        CHECK_EQ(real_.seen(), slow_.seen());
    }
    void end() {
        while (!real_.rows().empty()) {
            both([](auto& side) { side.release(0, true); });
        }
        while (real_.num_evictable() > 0) {
            both([](auto& side) { CHECK(side.make_room(side.num_free() + 1)); });
            CHECK_EQ(real_.seen(), slow_.seen());
        }
    }
    std::int64_t num_refused = 0;

   private:
    template <class Verb>
    void both(const Verb& verb) {
        verb(real_);
        verb(slow_);
    }
    Tokens tokens(std::int64_t n) {
        Tokens tokens;
        for (std::int64_t i = 0; i < n; ++i) {
            tokens.push_back(static_cast<kvcore::TokenId>(random_.below(2)));
        }
        return tokens;
    }
    // Return a prefix of a random prompt, and some more tokens.
    Tokens prompt() {
        Tokens prompt = random_.pick(prompts_);
        prompt.resize(static_cast<std::size_t>(
            kPage * random_.between(1, static_cast<std::int64_t>(prompt.size()) / kPage)));
        for (const kvcore::TokenId token : tokens(kPage * random_.below(4))) {
            prompt.push_back(token);
        }
        return prompt;
    }
    Retention retention() {
        const auto priority = static_cast<std::int32_t>(20 * random_.below(4));
        return {priority, random_.chance(40) ? now_ + random_.between(1, 60) : Retention::kForever};
    }

    void act(std::int64_t verb) {
        if (verb < 30) {
            if (real_.rows().size() >= 4) return release();
            const Tokens asked = prompt();
            const Retention kept = retention();
            const bool fits = real_.claim(asked, kept);
            CHECK_EQ(fits, slow_.claim(asked, kept));
            num_refused += fits ? 0 : 1;
        } else if (verb < 52) {
            const auto n = static_cast<std::int32_t>(random_.between(1, 6));
            each([=](auto& side, std::size_t i) { side.commit(i, n); });
        } else if (verb < 66) {
            each([](auto& side, std::size_t i) { side.checkpoint(i); });
        } else if (verb < 86) {
            release();
        } else if (verb < 91 && !all_use_) {
            const Tokens held = prompt();
            const std::int64_t pages = random_.below(4);
            both([&](auto& side) { side.hold(held, pages); });
        } else if (verb < 95) {
            const std::int64_t pages = random_.between(1, 9);
            both([&](auto& side) { static_cast<void>(side.make_room(side.num_free() + pages)); });
        } else if (verb < 98) {
            const Tokens used = prompt();
            both([&](auto& side) { side.touch(used); });
        } else {
            now_ += random_.between(1, 20);
            both([&](auto& side) { side.advance(now_); });
        }
    }
    template <class Verb>
    void each(const Verb& verb) {
        if (real_.rows().empty()) return;
        const auto i =
            static_cast<std::size_t>(random_.below(static_cast<std::int64_t>(real_.rows().size())));
        both([&](auto& side) { verb(side, i); });
    }
    void release() {
        const bool touch = all_use_ || random_.chance(85);
        each([=](auto& side, std::size_t i) { side.release(i, touch); });
    }

    RealStates real_;
    SlowStates slow_;
    Random random_;
    std::vector<Tokens> prompts_;
    bool all_use_;
    std::int64_t now_ = 0;
};

TEST(every_policy_agrees_with_its_slow_twin) {
    const std::uint64_t seed = check::seed_or(20261123);
    const std::int64_t operations = check::count_or(35000);
    const std::int64_t sizes[][2] = {{36, 20}, {28, 3}, {60, 7}};  // pages, slots
    std::int64_t refused = 0;
    for (kvcore::EvictionOrder order : eviction_orders::kAll) {
        bool all_use = false;
        for (const auto& [num_pages, num_slots] : sizes) {
            check::note = "order " + std::to_string(static_cast<int>(order)) + ", " +
                          std::to_string(num_pages) + " pages";
            Lockstep pair(num_pages, num_slots, order, seed + static_cast<std::uint64_t>(num_pages),
                          all_use);
            all_use = !all_use;
            for (std::int64_t k = 0; k < operations; ++k) pair.operate();
            pair.end();
            refused += pair.num_refused;
        }
    }
    std::printf("%lld operations of each policy, %lld requests refused\n",
                3 * static_cast<long long>(operations), static_cast<long long>(refused));
}

}  // namespace

}  // namespace tests::stress::state_policies
