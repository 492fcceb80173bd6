// SPDX-License-Identifier: Apache-2.0
// Groups of layers that do not all keep every token: pages of requests, pages that hits need, and
// eviction.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/check.hpp"
#include "support/group_scene.hpp"
#include "support/layer_groups.hpp"

namespace tests::layers::groups {

using kvcore::CacheGroup;
using kvcore::GroupKind;

namespace {

// The pages that a prompt and its repetition hold, and the number of pages of each bundle that a
// hit needs.
TEST(hits_need_only_what_windows_read) {
    GroupScene scene(GroupScene::config(16, 64, {full(), sliding(32, 2)}));
    const Tokens tokens = count_up(0, 55);
    Request first = scene.claim(tokens);
    CHECK_EQ(scene.reserve(first), kvcore::ReserveStatus::kOk);
    for (std::int32_t b = 0; b < 3; ++b) CHECK_EQ(scene.live(first, b), 4);
    CHECK_EQ(scene.used(), 12);
    scene.complete(first);
    CHECK_EQ(scene.live(first, 0), 4);
    CHECK_EQ(scene.live(first, 1), 3);  // 55 tokens: tokens below 24 are before the window
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

// Pages before the window are freed at once, so the number of window pages of a request does not
// grow with its length.
TEST(pages_before_the_window_are_freed) {
    GroupScene scene(GroupScene::config(16, 64, {full(), sliding(32)}));
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

TEST(without_a_full_group) {
    GroupScene scene(GroupScene::config(16, 12, {sliding(32)}));
    Request request = scene.claim(count_up(0, 1000));
    scene.complete(request, 48);
    CHECK_EQ(scene.live(request, 0), 3);
    scene.manager.release(request.sequence);
    CHECK(scene.match(count_up(0, 1000)) >= 992 - 16);
}

// A bundle with smaller pages has several pages in a column.
TEST(pages_of_several_sizes) {
    GroupScene scene(GroupScene::config(16, 64, {full(), sliding(20, 1, 4)}));
    Request request = scene.claim(count_up(0, 100));
    scene.complete(request, 30);
    CHECK_EQ(count(scene.manager.pages_of(request.sequence, 1)), 4 * 7);
    scene.manager.release(request.sequence);
    Tokens longer = count_up(0, 90);
    longer.push_back(5000);
    Request second = scene.claim(longer);
    CHECK_EQ(scene.reserve(second), kvcore::ReserveStatus::kOk);
    CHECK_EQ(second.start, 90);  // the hit ends inside a page
    scene.complete(second);
    scene.manager.release(second.sequence);
}

// A request that computes cached tokens again fills the missing window pages in the tree.
TEST(missing_window_pages_are_filled) {
    kvcore::CacheConfig config = GroupScene::config(2, 64, {full(), sliding(4)});
    config.partial_page_reuse = 0;
    GroupScene scene(config);
    const Tokens tokens = count_up(0, 8);
    scene.put(tokens);
    CHECK_EQ(scene.match(tokens), 8);
    CHECK_EQ(scene.match(count_up(0, 6)), 6);
    // The request needs 58 pages and 56 are free, so the window pages of the first two columns are
    // evicted.
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

TEST(impossible_configurations_are_refused) {
    const auto make = [](const std::vector<CacheGroup>& groups) {
        const kvcore::CacheManager manager(GroupScene::config(16, 64, groups));
    };
    CHECK_THROWS(std::invalid_argument, make({sliding(0)}));
    CHECK_THROWS(std::invalid_argument, make({{GroupKind::kChunked, -1, 1, 0}}));
    CHECK_THROWS(std::invalid_argument, make({{GroupKind::kFull, 0, 0, 0}}));
    CHECK_THROWS(std::invalid_argument, make({sliding(4, 1, 5)}));
    CHECK_THROWS(std::invalid_argument, make(std::vector<CacheGroup>(8, sliding(4))));
    make({full()});
}

/// Returns the most pages that a request holds if it runs its `n` tokens one by one; 0 if it is
/// refused.
std::int64_t most_pages(const kvcore::CacheConfig& config, std::int64_t n) {
    GroupScene scene(config);
    Request request = scene.claim(count_up(0, n));
    request.active = 1;
    std::int64_t most = 0;
    try {
        while (request.start < n) {
            request.active = request.start + 1;
            CHECK_EQ(scene.reserve(request), kvcore::ReserveStatus::kOk);
            most = std::max(most, scene.used());
            CHECK(scene.run({&request}));
            scene.step({&request}, 5);
        }
    } catch (const kvcore::CapacityError&) {
        CHECK_EQ(request.start, 0);
        most = 0;
    }
    scene.manager.release(request.sequence);
    return most;
}

// The first reserve refuses a request that does not fit with any chunk length, and only such
// requests.
TEST(requests_that_never_fit_are_refused_at_once) {
    const std::vector<std::vector<CacheGroup>> families = {
        {full(), sliding(6)},       {full(2), sliding(7, 3)},     {sliding(6)},
        {full(), chunked(8)},       {full(), chunked(7)},         {full(), chunked(9), sliding(3)},
        {full(), sliding(9, 1, 2)}, {full(1, 2), chunked(10, 2)},
    };
    for (std::size_t i = 0; i < families.size(); ++i) {
        for (const std::int64_t drafts : {0, 3}) {
            for (const bool by_chunk : {false, true}) {
                kvcore::CacheConfig config = GroupScene::config(4, 1000, families[i]);
                config.max_draft_tokens = drafts;
                config.reserve_chunks = by_chunk;
                for (const std::int64_t n : {1, 4, 9, 17, 30}) {
                    check::note = "family " + std::to_string(i) + ", " + std::to_string(n);
                    config.num_pages = 1000;
                    const std::int64_t most = most_pages(config, n);
                    config.num_pages = most;
                    CHECK_EQ(most_pages(config, n), most);
                    config.num_pages = most - 1;
                    if (most > 1) CHECK_EQ(most_pages(config, n), 0);
                }
            }
        }
    }
    check::note.clear();
}

// Truncation is limited to the number of draft tokens.
TEST(truncation_is_limited_to_drafts) {
    kvcore::CacheConfig config = GroupScene::config(4, 64, {full(), sliding(8)});
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

// No call moves a request back before its windows except a truncation.
TEST(requests_do_not_move_back_before_their_windows) {
    GroupScene scene(GroupScene::config(4, 64, {full(), sliding(8)}));
    Request request = scene.claim(count_up(0, 40));
    scene.complete(request);  // 40 tokens: the window reads from token 33 on, in column 8
    const std::vector<BlockId> pages = scene.manager.pages_of(request.sequence, 1);
    for (const std::int64_t start : {0, 4, 31, 32, 38}) {
        kvcore::RequestView view = request.view();
        view.start = start;
        kvcore::FetchTarget target;
        CHECK_THROWS(std::invalid_argument, scene.manager.plan(view));
        CHECK_THROWS(std::invalid_argument, scene.manager.match(view));
        CHECK_THROWS(std::invalid_argument, scene.manager.reserve(view));
        CHECK_THROWS(std::invalid_argument, scene.manager.reserve_batch({&view, 1}));
        CHECK_THROWS(std::invalid_argument, scene.manager.fetch({&view, 1}, 1, &target));
        Request child("", count_up(0, 41));
        kvcore::RequestView other = child.view();
        CHECK_THROWS(std::invalid_argument, scene.manager.fork(view, {&other, 1}));
        CHECK_EQ(scene.manager.pages_of(request.sequence, 1), pages);
    }
    // A commit with a lower count of written tokens does not allow it either.
    kvcore::RequestView view = request.view();
    view.start = 8;
    scene.manager.commit({&view, 1}, scene.swaps);
    kvcore::FetchTarget target;
    CHECK_THROWS(std::invalid_argument, scene.manager.fetch({&view, 1}, 1, &target));
    request.rewind(40);  // the last token runs again: the pages that it reads are still held
    CHECK_EQ(request.start, 39);
    CHECK(scene.run({&request}));
    scene.step({&request}, 3);
    scene.manager.release(request.sequence);
}

// Without a full-attention group, pinned prefixes hold more columns than pages. If all columns are
// held, the answer is kNoSpace.
TEST(columns_that_are_all_held_are_no_space) {
    kvcore::CacheConfig config = GroupScene::config(4, 200, {sliding(8)});
    config.max_sequences = 1;
    GroupScene scene(config);
    std::vector<kvcore::PinHandle> pins;
    bool has_room = true;
    for (TokenId k = 0; has_room && k < 40; ++k) {
        Request request = scene.claim(count_up(10000 * k, 1900));
        request.active = 64;
        const kvcore::ReservePlan plan = scene.manager.plan(request.view());
        has_room = scene.reserve(request) == kvcore::ReserveStatus::kOk;
        CHECK_EQ(plan.fits, has_room);
        if (has_room) scene.complete(request, 64);
        scene.manager.release(request.sequence);
        if (has_room) pins.push_back(scene.manager.pin(0, "", request.tokens().data(), 1900));
    }
    CHECK(!has_room && scene.manager.stats(0).available_pages() > 100);
    for (const kvcore::PinHandle& pin : pins) scene.manager.unpin(pin);
    scene.put(count_up(500000, 1900), 64);
}

// A fork gets window pages only for the columns that it has. Window pages that its parent reserved
// ahead stay with the parent.
TEST(forks_reserve_for_themselves) {
    GroupScene scene(GroupScene::config(4, 64, {full(), sliding(8)}));
    Request parent = scene.claim(count_up(0, 30));
    parent.active = 10;
    CHECK(scene.run({&parent}));
    scene.step({&parent}, 5);
    CHECK_EQ(scene.reserve(parent), kvcore::ReserveStatus::kOk);  // windows for 30 tokens
    CHECK_EQ(scene.live(parent, 1), 8);
    Request child("", count_up(0, 10));
    for (TokenId t = 0; t < 9; ++t) child.append(700 + t);
    kvcore::RequestView view = child.view();
    scene.manager.fork(parent.view(), {&view, 1});
    child.sequence = view.sequence;
    child.start = view.start;
    child.active = 19;
    CHECK_EQ(scene.live(child, 1), 3);
    const kvcore::ReservePlan plan = scene.manager.plan(child.view());
    CHECK_EQ(plan.new_pages, 2 + 2 + 2);  // two new columns, and own pages for the shared column
    CHECK(scene.run({&child, &parent}));
    scene.step({&child, &parent}, 3);
    scene.manager.release(child.sequence);
    scene.manager.release(parent.sequence);
}

}  // namespace

}  // namespace tests::layers::groups
