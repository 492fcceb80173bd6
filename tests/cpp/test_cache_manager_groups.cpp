// SPDX-License-Identifier: Apache-2.0
// Layers that do not all keep everything: what requests hold, what hits need, what goes first.
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "group_scene.hpp"

using kvcore::CacheGroup;
using kvcore::GroupKind;

namespace {

using Tokens = std::vector<TokenId>;

constexpr CacheGroup kFull{GroupKind::kFull, 0, 1, 0};

CacheGroup sliding(std::int64_t window, std::int32_t num_bundles = 1, std::int32_t page_size = 0) {
    return {GroupKind::kSliding, window, num_bundles, page_size};
}

Tokens count_up(TokenId first, std::int64_t n) {
    Tokens tokens;
    for (std::int64_t i = 0; i < n; ++i) tokens.push_back(first + static_cast<TokenId>(i));
    return tokens;
}

// What one prompt and its repetition hold, and how much a hit needs of each bundle.
void test_hits_need_only_what_windows_read() {
    GroupScene scene(GroupScene::config(16, 64, {kFull, sliding(32, 2)}));
    const Tokens tokens = count_up(0, 55);
    Request first = scene.claim(tokens);
    CHECK_EQ(scene.reserve(first), kvcore::ReserveStatus::kOk);
    for (std::int32_t b = 0; b < 3; ++b) CHECK_EQ(scene.live(first, b), 4);
    CHECK_EQ(scene.used(), 12);
    scene.complete(first);
    CHECK_EQ(scene.live(first, 0), 4);
    CHECK_EQ(scene.live(first, 1), 3);  // 55 tokens: those below 24 are behind
    scene.manager.release(first.sequence);
    CHECK_EQ(scene.used(), 0);
    Tokens again(tokens.begin(), tokens.begin() + 48);
    for (TokenId t = 0; t < 5; ++t) again.push_back(900 + t);
    CHECK_EQ(scene.match(again), 48);
    Request second = scene.claim(again);
    const kvcore::ReservePlan plan = scene.manager.plan(second.view());
    CHECK_EQ(plan.hit_tokens, 48);
    CHECK_EQ(plan.new_pages, 3);
    CHECK_EQ(scene.reserve(second), kvcore::ReserveStatus::kOk);
    CHECK_EQ(second.start, 48);
    CHECK_EQ(scene.live(second, 0), 4);
    CHECK_EQ(scene.live(second, 1), 3);
    CHECK_EQ(scene.live(second, 2), 3);
    scene.complete(second);
    scene.manager.release(second.sequence);
}

// Pages behind the window come back at once: what a request holds is flat in its length.
void test_pages_behind_the_window_come_back() {
    GroupScene scene(GroupScene::config(16, 64, {kFull, sliding(32)}));
    Request request = scene.claim(count_up(0, 320));
    std::vector<std::int64_t> live;
    while (request.start < 320) {
        request.active = request.start + 64;
        CHECK_EQ(scene.reserve(request), kvcore::ReserveStatus::kOk);
        live.push_back(scene.live(request, 1));
        CHECK(scene.run({&request}));
        scene.step({&request}, 5);
    }
    CHECK_EQ(live, (std::vector<std::int64_t>{4, 6, 6, 6, 6}));
    CHECK(scene.run({&request}));
    CHECK_EQ(scene.live(request, 1), 3);
    CHECK_EQ(scene.live(request, 0), 21);
    scene.manager.release(request.sequence);
}

void test_without_a_full_group() {
    GroupScene scene(GroupScene::config(16, 12, {sliding(32)}));
    Request request = scene.claim(count_up(0, 1000));
    scene.complete(request, 48);
    CHECK_EQ(scene.live(request, 0), 3);
    scene.manager.release(request.sequence);
    CHECK(scene.match(count_up(0, 1000)) >= 992 - 16);
}

// A bundle with smaller pages has several in a column.
void test_pages_of_several_sizes() {
    GroupScene scene(GroupScene::config(16, 64, {kFull, sliding(20, 1, 4)}));
    Request request = scene.claim(count_up(0, 100));
    scene.complete(request, 30);
    CHECK_EQ(count(scene.manager.pages_of(request.sequence, 1)), 4 * 7);
    scene.manager.release(request.sequence);
    Tokens longer = count_up(0, 90);
    longer.push_back(5000);
    Request second = scene.claim(longer);
    CHECK_EQ(scene.reserve(second), kvcore::ReserveStatus::kOk);
    CHECK_EQ(second.start, 90);  // ends inside a page
    scene.complete(second);
    scene.manager.release(second.sequence);
}

// Who computes tokens again puts pages where the tree has none.
void test_holes_are_filled() {
    kvcore::CacheConfig config = GroupScene::config(2, 64, {kFull, sliding(4)});
    config.partial_page_reuse = 0;
    GroupScene scene(config);
    const Tokens tokens = count_up(0, 8);
    scene.put(tokens);
    CHECK_EQ(scene.match(tokens), 8);
    CHECK_EQ(scene.match(count_up(0, 6)), 6);
    // 58 pages, of which 56 are free: the window pages of the first two columns go.
    Request big = scene.claim(count_up(500, 96));
    big.active = 20;
    CHECK_EQ(scene.reserve(big), kvcore::ReserveStatus::kOk);
    scene.manager.release(big.sequence);
    CHECK_EQ(scene.match(tokens), 8);
    CHECK_EQ(scene.match(count_up(0, 6)), 0);
    CHECK_EQ(scene.match(count_up(0, 4)), 0);
    Request again = scene.claim(count_up(0, 6));
    CHECK_EQ(scene.reserve(again), kvcore::ReserveStatus::kOk);
    CHECK_EQ(again.start, 0);
    scene.complete(again);
    scene.manager.release(again.sequence);
    CHECK_EQ(scene.match(tokens), 8);
    CHECK_EQ(scene.match(count_up(0, 4)), 4);
}

void test_configurations_that_cannot_be() {
    const auto make = [](const std::vector<CacheGroup>& groups) {
        const kvcore::CacheManager manager(GroupScene::config(16, 64, groups));
    };
    CHECK_THROWS(std::invalid_argument, make({sliding(0)}));
    CHECK_THROWS(std::invalid_argument, make({{GroupKind::kChunked, -1, 1, 0}}));
    CHECK_THROWS(std::invalid_argument, make({{GroupKind::kFull, 0, 0, 0}}));
    CHECK_THROWS(std::invalid_argument, make({sliding(4, 1, 5)}));
    CHECK_THROWS(std::invalid_argument, make(std::vector<CacheGroup>(8, sliding(4))));
    make({kFull});
}

// Truncation goes as far back as drafts may.
void test_truncation_keeps_within_drafts() {
    kvcore::CacheConfig config = GroupScene::config(4, 64, {kFull, sliding(8)});
    config.max_draft_tokens = 5;
    GroupScene scene(config);
    Request request = scene.claim(count_up(0, 40));
    scene.complete(request);
    CHECK_THROWS(std::invalid_argument, scene.manager.truncate(request.sequence, 34));
    scene.manager.truncate(request.sequence, 35);
    request.rewind(36);
    request.start = 35;
    CHECK(scene.run({&request}));
    scene.step({&request}, 3);
    scene.manager.release(request.sequence);
}

}  // namespace

int main() {
    test_hits_need_only_what_windows_read();
    test_pages_behind_the_window_come_back();
    test_without_a_full_group();
    test_pages_of_several_sizes();
    test_holes_are_filled();
    test_configurations_that_cannot_be();
    test_truncation_keeps_within_drafts();
}
