// SPDX-License-Identifier: Apache-2.0
// Windows under policies that use more than the time of the last use. A window stays cached as long
// as the full-attention pages of its prefix, and no longer.
#include <cstdint>
#include <string>
#include <vector>

#include "support/check.hpp"
#include "support/group_scene.hpp"

namespace tests::layers::group_policies {

using kvcore::CacheGroup;
using kvcore::EvictionOrder;
using kvcore::GroupKind;

namespace {

constexpr std::int32_t kPage = 4;
constexpr CacheGroup kFull{GroupKind::kFull, 0, 1, 0};
constexpr CacheGroup kWindow{GroupKind::kSliding, std::int64_t{2} * kPage, 1, 0};

// `columns` whole columns and one token to run.
Tokens prompt(TokenId first, std::int64_t columns) {
    Tokens tokens;
    for (std::int64_t i = 0; i <= columns * kPage; ++i) {
        tokens.push_back(1000 * first + static_cast<TokenId>(i));
    }
    return tokens;
}
std::int64_t whole(const Tokens& tokens) { return count(tokens) / kPage * kPage; }

/// Serves prompts one after the other in a small pool.
class Cache {
   public:
    Cache(EvictionOrder order, std::int64_t num_pages,
          const std::vector<CacheGroup>& groups = {kFull, kWindow})
        : scene_(GroupScene::config(kPage, num_pages, groups), order) {}

    void serve(const Tokens& tokens, std::int32_t priority = 50,
               std::int64_t duration = kvcore::Retention::kForever) {
        Request request = start(tokens, priority, duration);
        scene_.complete(request, kPage);
        scene_.manager.release(request.sequence);
    }
    Request start(const Tokens& tokens, std::int32_t priority = 50,
                  std::int64_t duration = kvcore::Retention::kForever) {
        Request request = scene_.claim(tokens);
        kvcore::RequestPriority terms;
        terms.priority = priority;
        terms.duration = duration;
        scene_.manager.set_priority(request.sequence, terms);
        request.active = std::min<std::int64_t>(kPage, request.end());
        CHECK_EQ(scene_.reserve(request), kvcore::ReserveStatus::kOk);
        return request;
    }
    [[nodiscard]] bool is_whole(const Tokens& tokens) {
        return scene_.match(tokens) == whole(tokens);
    }
    [[nodiscard]] std::int64_t cached(std::size_t group) {
        return scene_.manager.group_stats(0)[group].cached_pages;
    }
    GroupScene& scene() { return scene_; }

   private:
    GroupScene scene_;
};

// The prefix of less value is evicted first, although it was used last: first its windows, then its
// pages. The better prefix keeps its windows until the worse prefix is gone.
void check_order(EvictionOrder order, const Tokens& better, const Tokens& worse, Cache& cache) {
    check::note = "order " + std::to_string(static_cast<int>(order));
    for (TokenId k = 0; cache.cached(0) > whole(better) / kPage; ++k) {
        CHECK(cache.is_whole(better));
        CHECK(k < 40);
        // Each round takes one more page, and no request keeps it.
        Request other = cache.start(prompt(50 + k, 2 + k / 2), 0, 1);
        cache.scene().manager.release(other.sequence);
    }
    CHECK(cache.is_whole(better));
    CHECK_EQ(cache.scene().match(worse), 0);
    check::note.clear();
}

TEST(windows_of_a_higher_priority_stay) {
    Cache cache(EvictionOrder::kPriority, 24);
    const Tokens better = prompt(1, 5);
    const Tokens worse = prompt(2, 5);
    cache.serve(better, 80);
    cache.serve(worse, 20);
    check_order(EvictionOrder::kPriority, better, worse, cache);
}

TEST(windows_of_often_used_prefixes_stay) {
    for (const EvictionOrder order :
         {EvictionOrder::kLfu, EvictionOrder::kSlru, EvictionOrder::kCost, EvictionOrder::kArc}) {
        Cache cache(order, 24);
        const Tokens better = prompt(1, 5);
        const Tokens worse = prompt(2, 5);
        for (int i = 0; i < 3; ++i) cache.serve(better);
        cache.serve(worse);
        check_order(order, better, worse, cache);
    }
}

TEST(fifo_evicts_the_first_prefix_with_its_windows) {
    Cache cache(EvictionOrder::kFifo, 24);
    const Tokens first = prompt(1, 5);
    const Tokens second = prompt(2, 5);
    cache.serve(first);
    cache.serve(second);
    cache.serve(first);
    check_order(EvictionOrder::kFifo, second, first, cache);
}

TEST(windows_past_their_retention_are_evicted_first) {
    Cache cache(EvictionOrder::kPriority, 24);
    cache.scene().manager.advance(10);
    const Tokens lasting = prompt(1, 5);
    const Tokens ending = prompt(2, 5);
    cache.serve(lasting, 20);
    cache.serve(ending, 80, 100);
    cache.scene().manager.advance(111);
    check_order(EvictionOrder::kPriority, lasting, ending, cache);
}

// A common prefix has more value than the tokens after it. Its window before the branch stays,
// whichever request was released last.
TEST(the_window_of_a_common_prefix_stays) {
    Cache cache(EvictionOrder::kLfu, 60);
    const Tokens common = prompt(1, 6);
    for (TokenId k = 0; k < 12; ++k) {
        Tokens tokens(common.begin(), common.begin() + whole(common));
        for (std::int64_t i = 0; i <= std::int64_t{3} * kPage; ++i) {
            tokens.push_back(5000 + 100 * k + static_cast<TokenId>(i));
        }
        cache.serve(tokens);
        cache.serve(prompt(100 + k, 8));  // used once
        if (k > 1) CHECK(cache.is_whole(Tokens(common.begin(), common.end())));
    }
}

// Full-attention pages that can serve no hit are evicted before all pages that can, whatever their
// value.
TEST(pages_without_their_window_are_evicted_first) {
    for (const EvictionOrder order : {EvictionOrder::kPriority, EvictionOrder::kLfu}) {
        check::note = "order " + std::to_string(static_cast<int>(order));
        Cache cache(order, 24);
        const Tokens better = prompt(1, 6);
        for (int i = 0; i < 2; ++i) cache.serve(better, 90);
        // A request evicts the window of `better` but not its full-attention pages. The request
        // runs no token.
        for (std::int64_t columns = 8; cache.scene().match(better) > 0; ++columns) {
            CHECK(columns < 20);
            cache.scene().manager.release(cache.start(prompt(2, columns)).sequence);
        }
        const std::int64_t useless = cache.cached(0);
        CHECK(useless > 2);
        const Tokens worse = prompt(3, 4);
        cache.serve(worse, 10);
        // The next request needs all free pages and all useless pages but one.
        const std::int64_t free = cache.scene().manager.stats(0).free_pages;
        Request other = cache.start(prompt(4, free + useless - 1 - 2), 10);
        CHECK(cache.cached(0) <= 4 + 2);  // a window page of `better` may be left
        CHECK(cache.is_whole(worse));
        CHECK_EQ(cache.scene().match(better), 0);
        cache.scene().manager.release(other.sequence);
    }
    check::note.clear();
}

}  // namespace

}  // namespace tests::layers::group_policies
