// SPDX-License-Identifier: Apache-2.0
// Eviction order with recurrent states. A hit ends at a checkpoint, so pages without a checkpoint
// after them serve no hit.
#include <cstdint>
#include <string>
#include <vector>

#include "support/check.hpp"
#include "support/eviction_orders.hpp"
#include "support/group_scene.hpp"
#include "support/layer_groups.hpp"

namespace tests::layers::state_eviction {

using kvcore::EvictionOrder;

namespace {

constexpr std::int64_t kPage = 4;

// `pages` whole pages and one token to run.
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

/// Serves requests one after the other in a small pool. If the cache has windows, it keeps all of
/// them.
class Cache {
   public:
    explicit Cache(const kvcore::CacheConfig& config, EvictionOrder order = {})
        : scene_(config, order) {}

    /// Runs a prompt, then `generated` tokens.
    Request start(const Tokens& tokens, std::int64_t generated = 0, std::int32_t priority = 50) {
        Request request = scene_.claim(tokens);
        kvcore::RequestPriority terms;
        terms.priority = priority;
        manager().set_priority(request.sequence, terms);
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
    /// Takes `pages` pages for a moment.
    void take(std::int64_t pages) {
        Request request = scene_.claim(prompt(900 + ++taken_, pages - 1));
        CHECK_EQ(scene_.reserve(request), kvcore::ReserveStatus::kOk);
        manager().release(request.sequence);
    }
    /// Takes all free pages and evicts `pages` more.
    void evict(std::int64_t pages) { take(manager().stats(0).free_pages + pages); }
    /// Takes one or two more pages than are free in a cache with windows: the last column gets no
    /// window page before its checkpoint is made.
    void take_columns() { take((manager().stats(0).free_pages + 1) / 2 + 1); }
    [[nodiscard]] std::int64_t hit(const Tokens& tokens) { return scene_.match(tokens) / kPage; }
    [[nodiscard]] std::int64_t in_tree() { return manager().stats(0).cached_pages; }
    kvcore::CacheManager& manager() { return scene_.manager; }
    GroupScene& scene() { return scene_; }

   private:
    GroupScene scene_;
    TokenId taken_ = 0;
};

// Generated pages after the last checkpoint are evicted before the pages of any other request, even
// if the other pages were used earlier and have less value.
TEST(pages_after_the_last_checkpoint_are_evicted_first) {
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
        cache.evict(5);  // now in the order of the policy
        CHECK_EQ(cache.hit(prompt(1, 5)), 0);
        CHECK_EQ(cache.hit(prompt(2, 5)), 5);
    }
    check::note.clear();
}

// If the page of a checkpoint is evicted, the pages back to the checkpoint before it are useless,
// and are evicted next.
TEST(the_pages_before_a_lost_checkpoint_are_evicted_next) {
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

// If a checkpoint loses its slot, its run is useless, although the run was released last.
TEST(the_run_of_a_lost_slot_is_evicted_first) {
    kvcore::CacheConfig few = config(40, 4, {full()});
    Cache cache(few, EvictionOrder::kFifo);
    cache.serve(prompt(1, 5));
    cache.serve(prompt(2, 5));
    cache.serve(prompt(1, 5));  // checkpoint and pages were used last
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

// Pages that prompts share without a checkpoint are evicted when no page follows them, although all
// prompts used them.
TEST(a_common_prefix_is_evicted_when_no_page_follows_it) {
    Cache cache(config(40, 5, {full()}), EvictionOrder::kLfu);
    const Tokens first = prompt(1, 8);
    Tokens second = first;
    for (std::size_t i = 16; i < second.size(); ++i) second[i] += 500;  // four pages in common
    cache.serve(first);
    cache.serve(second);  // also makes a checkpoint at the branch
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

// Useless pages that are used again count as useful when a new checkpoint follows them.
TEST(a_new_checkpoint_makes_pages_useful_again) {
    Cache cache(config(40, 10, {full()}));
    cache.serve(prompt(1, 5), 4 * kPage);
    CHECK_EQ(cache.in_tree(), 9);
    Tokens next = prompt(1, 5);
    for (std::int64_t i = 0; i < 4 * kPage; ++i) next.push_back(7);  // the generated tokens
    cache.serve(next);
    CHECK_EQ(cache.hit(next), 9);
    cache.serve(prompt(2, 5), 2 * kPage);
    CHECK_EQ(cache.in_tree(), 16);
    cache.evict(2);
    CHECK_EQ(cache.hit(next), 9);
    CHECK_EQ(cache.hit(prompt(2, 5)), 5);
    CHECK_EQ(cache.in_tree(), 14);
}

// While a request holds a run, none of its pages is evicted. If the request releases the run
// without a use, the run is useless again.
TEST(held_pages_stay) {
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
    cache.evict(4);  // the rest of the other prompt was useless before
    CHECK_EQ(cache.in_tree(), 9);
    cache.evict(2);
    CHECK_EQ(cache.in_tree(), 7);
    CHECK_EQ(cache.hit(all), 7);
}

// With windows: window pages without a checkpoint after them are evicted first, with the pages
// after the last checkpoint. The pages that the checkpoint reads stay, although requests left them
// in the same departure.
TEST(windows_of_a_checkpoint_stay) {
    for (const EvictionOrder order : eviction_orders::kAll) {
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

// A prompt of whole pages has its checkpoint one page before its end, and the windows of the
// checkpoint are kept.
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
