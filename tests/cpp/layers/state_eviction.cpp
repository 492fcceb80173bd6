// SPDX-License-Identifier: Apache-2.0
// What goes first where layers keep a state: a hit ends at a checkpoint, so pages that none lies
// behind serve nobody.
#include <cstdint>
#include <string>
#include <vector>

#include "support/check.hpp"
#include "support/group_scene.hpp"
#include "support/layer_groups.hpp"

namespace tests::layers::state_eviction {

using kvcore::EvictionOrder;

namespace {

constexpr std::int64_t kPage = 4;

// `pages` whole ones and a token to run.
Tokens prompt(TokenId first, std::int64_t pages) {
    Tokens tokens;
    for (std::int64_t i = 0; i <= pages * kPage; ++i) {
        tokens.push_back(1000 * first + static_cast<TokenId>(i));
    }
    return tokens;
}

kvcore::CacheConfig config(std::int64_t num_pages, std::int64_t num_slots,
                           std::vector<kvcore::CacheGroup> groups, std::int64_t interval = 0) {
    kvcore::CacheConfig config =
        GroupScene::config(static_cast<std::int32_t>(kPage), num_pages, std::move(groups));
    config.max_sequences = 4;
    config.states = {{interval}};
    config.num_state_slots = num_slots;
    return config;
}

/// Requests one after the other in a small pool, whose windows are all kept where it has some.
class Cache {
   public:
    explicit Cache(const kvcore::CacheConfig& config, EvictionOrder order = {})
        : scene_(config, order) {}

    /// Runs a prompt, then `generated` tokens.
    Request start(const Tokens& tokens, std::int64_t generated = 0, std::int32_t priority = 50) {
        Request request = scene_.claim(tokens);
        kvcore::RequestTerms terms;
        terms.priority = priority;
        manager().set_terms(request.sequence, terms);
        const std::int64_t end = request.end() + generated;
        while (request.start < end) {
            CHECK(scene_.run({&request}));
            scene_.step({&request}, 7);
            static_cast<void>(manager().take_state_copies());
        }
        return request;
    }
    void serve(const Tokens& tokens, std::int64_t generated = 0, std::int32_t priority = 50) {
        manager().release(start(tokens, generated, priority).sequence);
    }
    /// So many pages are taken for a moment.
    void take(std::int64_t pages) {
        Request request = scene_.claim(prompt(900 + ++taken_, pages - 1));
        CHECK_EQ(scene_.reserve(request), kvcore::ReserveStatus::kOk);
        manager().release(request.sequence);
    }
    /// The same beside all that is free.
    void evict(std::int64_t pages) { take(manager().stats(0).free_pages + pages); }
    /// With a window, whose pages the last column does not get before a checkpoint is made: one
    /// page more than are free, or two.
    void take_columns() { take((manager().stats(0).free_pages + 1) / 2 + 1); }
    [[nodiscard]] std::int64_t hit(const Tokens& tokens) { return scene_.match(tokens) / kPage; }
    [[nodiscard]] std::int64_t in_tree() { return manager().stats(0).cached_pages; }
    kvcore::CacheManager& manager() { return scene_.manager; }
    GroupScene& scene() { return scene_; }

   private:
    GroupScene scene_;
    TokenId taken_ = 0;
};

// What a request generated behind its last checkpoint goes before a page of anybody else, though
// that was used before it, and whatever it is worth.
TEST(what_no_checkpoint_follows_goes_first) {
    for (const EvictionOrder order : {EvictionOrder::kLru, EvictionOrder::kLfu,
                                      EvictionOrder::kPriority, EvictionOrder::kCost}) {
        check::note = "order " + std::to_string(static_cast<int>(order));
        Cache cache(config(30, 10, {full()}), order);
        cache.serve(prompt(1, 5), 0, 10);
        for (int i = 0; i < 3; ++i) cache.serve(prompt(2, 5), 6 * kPage, 90);
        CHECK_EQ(cache.in_tree(), 5 + 11);
        cache.evict(6);
        CHECK_EQ(cache.in_tree(), 10);
        CHECK_EQ(cache.hit(prompt(1, 5)), 5);
        CHECK_EQ(cache.hit(prompt(2, 5)), 5);
        cache.evict(5);  // now as the policy says
        CHECK_EQ(cache.hit(prompt(1, 5)), 0);
        CHECK_EQ(cache.hit(prompt(2, 5)), 5);
    }
    check::note.clear();
}

// With the page of a checkpoint goes all that it alone made worth keeping, up to the one in front.
TEST(the_way_to_a_lost_checkpoint_goes_next) {
    Cache cache(config(40, 10, {full()}, 3 * kPage));
    cache.serve(prompt(1, 8));  // checkpoints at 3, 6 and 8
    cache.serve(prompt(2, 9));
    CHECK_EQ(cache.hit(prompt(1, 8)), 8);
    cache.evict(1);
    CHECK_EQ(cache.hit(prompt(1, 8)), 6);
    CHECK_EQ(cache.in_tree(), 16);
    cache.evict(1);  // the seventh page
    CHECK_EQ(cache.hit(prompt(1, 8)), 6);
    cache.evict(1);
    CHECK_EQ(cache.hit(prompt(1, 8)), 3);
    cache.evict(2);
    CHECK_EQ(cache.hit(prompt(1, 8)), 3);
    cache.evict(3);
    CHECK_EQ(cache.in_tree(), 9);
    CHECK_EQ(cache.hit(prompt(2, 9)), 9);
}

// A checkpoint that lost its slot leaves its run useless, though that was let go of last.
TEST(who_lost_the_slot_goes_first) {
    kvcore::CacheConfig few = config(40, 4, {full()});
    Cache cache(few, EvictionOrder::kFifo);
    cache.serve(prompt(1, 5));
    cache.serve(prompt(2, 5));
    cache.serve(prompt(1, 5));  // used last, checkpoint and pages
    std::vector<Request> live;
    for (TokenId i = 0; i < 3; ++i) {
        live.push_back(cache.scene().claim(prompt(20 + i, 0)));
        CHECK_EQ(cache.scene().reserve(live.back()), kvcore::ReserveStatus::kOk);
    }
    CHECK_EQ(cache.hit(prompt(1, 5)), 5);
    CHECK_EQ(cache.hit(prompt(2, 5)), 0);
    for (const Request& request : live) cache.manager().release(request.sequence);
    cache.evict(5);
    CHECK_EQ(cache.in_tree(), 5);
    CHECK_EQ(cache.hit(prompt(1, 5)), 5);
}

// What prompts share without a checkpoint goes once nothing follows it, though it was used by all.
TEST(what_is_in_front_goes_once_nothing_follows) {
    Cache cache(config(40, 5, {full()}), EvictionOrder::kLfu);
    const Tokens first = prompt(1, 8);
    Tokens second = first;
    for (std::size_t i = 16; i < second.size(); ++i) second[i] += 500;  // four pages in common
    cache.serve(first);
    cache.serve(second);  // with a checkpoint where it parts, too
    cache.serve(prompt(3, 4));
    CHECK_EQ(cache.in_tree(), 16);
    CHECK_EQ(cache.hit(first), 8);
    std::vector<Request> live;
    for (TokenId i = 0; i < 4; ++i) {  // all slots but one
        live.push_back(cache.scene().claim(prompt(20 + i, 0)));
        CHECK_EQ(cache.scene().reserve(live.back()), kvcore::ReserveStatus::kOk);
    }
    CHECK_EQ(cache.hit(second), 0);
    for (const Request& request : live) cache.manager().release(request.sequence);
    for (std::int64_t left = 15; left >= 4; --left) {
        cache.evict(1);
        CHECK_EQ(cache.in_tree(), left);
        CHECK_EQ(cache.hit(prompt(3, 4)), 4);
    }
}

// What was condemned and is used again is as good as new once there is a checkpoint behind it.
TEST(a_new_checkpoint_pardons) {
    Cache cache(config(40, 10, {full()}));
    cache.serve(prompt(1, 5), 4 * kPage);
    CHECK_EQ(cache.in_tree(), 9);
    Tokens next = prompt(1, 5);
    for (std::int64_t i = 0; i < 4 * kPage; ++i) next.push_back(7);  // what it generated
    cache.serve(next);
    CHECK_EQ(cache.hit(next), 9);
    cache.serve(prompt(2, 5), 2 * kPage);
    CHECK_EQ(cache.in_tree(), 16);
    cache.evict(2);
    CHECK_EQ(cache.hit(next), 9);
    CHECK_EQ(cache.hit(prompt(2, 5)), 5);
    CHECK_EQ(cache.in_tree(), 14);
}

// While somebody holds its run, nothing of it goes. Let go of without a use, it is useless again.
TEST(what_is_held_stays) {
    Cache cache(config(40, 10, {full()}, 7 * kPage));
    cache.serve(prompt(1, 5));
    cache.serve(prompt(2, 5), 4 * kPage);
    Tokens all = prompt(2, 5);
    for (std::int64_t i = 0; i < 4 * kPage; ++i) all.push_back(7);
    {
        const Request asked = cache.scene().claim(all);
        const kvcore::PrefixHit hit = cache.manager().match(asked.view());
        cache.manager().release(asked.sequence);
        CHECK_EQ(hit.num_pages(), 7);
        cache.evict(1);
        CHECK_EQ(cache.in_tree(), 13);
        CHECK_EQ(cache.hit(prompt(1, 5)), 0);
    }
    cache.evict(4);  // what is left of the other one was useless before
    CHECK_EQ(cache.in_tree(), 9);
    cache.evict(2);
    CHECK_EQ(cache.in_tree(), 7);
    CHECK_EQ(cache.hit(all), 7);
}

// Beside windows: those that no checkpoint follows go first, with the pages behind the last one;
// what the checkpoint reads stays, though requests left it together with the others.
TEST(windows_of_a_checkpoint_stay) {
    for (const EvictionOrder order :
         {EvictionOrder::kLru, EvictionOrder::kLfu, EvictionOrder::kSlru, EvictionOrder::kFifo,
          EvictionOrder::kPriority, EvictionOrder::kCost, EvictionOrder::kArc}) {
        check::note = "order " + std::to_string(static_cast<int>(order));
        Cache cache(config(61, 10, {full(), sliding(3 * kPage)}), order);
        cache.serve(prompt(1, 6), 0, 10);
        for (int i = 0; i < 2; ++i) cache.serve(prompt(2, 6), 2 * kPage, 90);
        const auto cached = [&](std::size_t group) {
            return cache.manager().group_stats(0)[group].cached_pages;
        };
        CHECK_EQ(cached(0), 6 + 8);
        for (int i = 0; cached(0) + cached(1) > 12 + 6; ++i) {
            cache.take_columns();
            CHECK_EQ(cache.hit(prompt(1, 6)), 6);
            CHECK_EQ(cache.hit(prompt(2, 6)), 6);
        }
        CHECK_EQ(cached(0), 12);
        CHECK_EQ(cached(1), 6);
    }
    check::note.clear();
}

// A prompt of whole pages has its checkpoint one page earlier: the windows of that are kept.
TEST(windows_of_a_prompt_of_whole_pages_stay) {
    Cache cache(config(60, 10, {full(), sliding(3 * kPage)}));
    Tokens whole = prompt(1, 6);
    whole.pop_back();
    cache.serve(whole, 4 * kPage);
    for (int i = 0; cache.manager().group_stats(0)[0].cached_pages > 6; ++i) {
        CHECK(i < 40);
        cache.take_columns();
        CHECK_EQ(cache.hit(whole), 5);
    }
}

}  // namespace

}  // namespace tests::layers::state_eviction
