// SPDX-License-Identifier: Apache-2.0
// Fills from the stores below the host tier: the pages that they bring, and the fate of these pages
// when other requests evict, release and reset meanwhile.
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kvcore/errors.hpp"
#include "support/store_fixture.hpp"

namespace tests::store::fills {

using kvcore::CacheGroup;
using kvcore::ColumnParts;
using kvcore::GroupKind;
using kvcore::InvalidHandleError;
using kvcore::kStatePart;
using kvcore::StoreMoves;
using kvcore::StoreSearch;

namespace {

TEST(what_arrives_in_the_tier_is_found_by_requests) {
    StoreFixture m(16, 16);
    const Tokens prompt = count_up(10, 9);
    const StoreSearch found = m.search(prompt);
    CHECK_EQ(found.have, 0);
    CHECK_EQ(found.most, 4);
    CHECK(found.parent == kvcore::root_key({}));
    const auto needed = m.needed(prompt, 4);
    CHECK_EQ(count(needed), 4);
    const StoreMoves fill = m.begin_fill(prompt);
    CHECK(fill.keys == m.keys(prompt));
    CHECK_EQ(m.hit(count_up(10, 8)), 0);
    CHECK_EQ(m.search(prompt).have, 0);
    m.finish_fill(fill, 3);
    CHECK_EQ(m.hit(count_up(10, 8)), 6);
    CHECK_EQ(m.stored(), 3);
    CHECK_EQ(m.manager.num_waiting_writes(), 0);
    CHECK_THROWS(InvalidHandleError, m.manager.finish_fill(fill.ticket, 3));
    CHECK_THROWS(InvalidHandleError, m.manager.finish_writes(fill.ticket));
    const StoreSearch next = m.search(prompt);
    CHECK_EQ(next.stored, 3);
    CHECK(next.parent == item(m.keys(prompt), 2));
    const StoreMoves rest = m.begin_fill(prompt);
    CHECK_EQ(count(rest.keys), 1);
    m.finish_fill(rest, 1, true);
    CHECK_EQ(m.search(prompt).most, 0);
    const StoreMoves forwarded = m.take();
    CHECK(forwarded.keys == rest.keys);
    m.finish_writes(forwarded);
}

TEST(what_fails_leaves_nothing) {
    StoreFixture m(16, 4);
    const Tokens prompt = count_up(10, 8);
    const StoreMoves fill = m.begin_fill(prompt);
    CHECK_EQ(count(fill.keys), 4);
    CHECK_EQ(m.begin_fill(count_up(100, 8)).ticket, 0);  // no room
    m.finish_fill(fill, 0);
    CHECK_EQ(m.stored(), 0);
    const StoreMoves other = m.begin_fill(count_up(100, 12));
    CHECK_EQ(count(other.keys), 4);  // as many as the tier has room for
    m.finish_fill(other, 4);
    CHECK_EQ(m.stored(), 4);
}

TEST(a_reset_forgets_what_is_on_its_way) {
    StoreFixture m(16, 16);
    const Tokens prompt = count_up(10, 8);
    const StoreMoves fill = m.begin_fill(prompt);
    m.manager.reset_prefix_cache();
    m.finish_fill(fill, 4, true);
    CHECK_EQ(m.stored(), 0);
    CHECK_EQ(m.manager.num_waiting_writes(), 0);
    m.put(prompt);
    CHECK_EQ(m.stored(), 4);
}

TEST(a_manager_goes_with_what_is_under_way) {
    for (const kvcore::CacheConfig& config :
         {HostFixture::config(16, 16), with_states(4),
          with_groups({{GroupKind::kFull, 0, 1, 0}, {GroupKind::kSliding, 4, 1, 0}})}) {
        for (const bool resets : {false, true}) {
            StoreFixture m(config);
            m.finish_fill(m.begin_fill(count_up(10, 8)), 9, true);
            CHECK(m.take(2).ticket != 0);
            CHECK(m.begin_fill(count_up(10, 12)).ticket != 0);
            m.finish_fill(m.begin_fill(count_up(100, 4)), 9, true);
            if (resets) m.manager.reset_prefix_cache();
        }
    }
}

// Two fills of the same pages at the same time, and pages of a request: the first to arrive stays.
TEST(the_same_pages_arrive_twice) {
    StoreFixture m(16, 32);
    const Tokens prompt = count_up(10, 8);
    const StoreMoves one = m.begin_fill(prompt);
    const StoreMoves two = m.begin_fill(prompt);
    CHECK_EQ(count(two.keys), 4);
    m.put(prompt);
    CHECK_EQ(m.stored(), 4);
    m.finish_fill(two, 4);
    m.finish_fill(one, 4);
    CHECK_EQ(m.stored(), 4);
    CHECK_EQ(m.begin_fill(prompt).ticket, 0);
    CHECK_EQ(m.write_all(), 4);
    const StoreMoves late = m.begin_fill(prompt, 4, {{0, 1}, {1, 1}});
    CHECK_EQ(late.ticket, 0);
}

TEST(a_fill_goes_on_from_what_is_there) {
    StoreFixture m(16, 16);
    m.put(count_up(10, 4));
    const Tokens prompt = count_up(10, 8);
    CHECK_EQ(m.begin_fill(prompt, 4, {{3, 1}}).ticket, 0);
    const StoreMoves fill = m.begin_fill(prompt, 4, {{0, 1}, {2, 1}, {3, 0}});
    CHECK(fill.keys == Keys({item(m.keys(prompt), 2)}));
    m.finish_fill(fill, 9);  // more pages than the fill has
    CHECK_EQ(m.stored(), 3);
    m.write_all();
}

TEST(a_request_that_runs_is_not_looked_for) {
    StoreFixture m(16, 16);
    Request request = m.claim(count_up(10, 9));
    CHECK_EQ(m.manager.search_below(request.view()).most, 4);
    m.finish(m.reserve(request));
    CHECK_EQ(m.manager.search_below(request.view()).most, 4);  // a hit could still move it
    m.finish(m.commit(request, 1));
    CHECK_EQ(m.manager.search_below(request.view()).most, 0);
    m.manager.release(request.sequence);
    CHECK_THROWS(kvcore::RequestNotFoundError, m.manager.search_below(request.view()));
    Request one = m.claim({1});
    CHECK_EQ(m.manager.search_below(one.view()).most, 0);
    m.write_all();
}

TEST(what_is_asked_for_wrongly_is_refused) {
    StoreFixture m(16, 16);
    const Tokens prompt = count_up(10, 8);
    CHECK(m.needed(prompt, 0).empty());
    CHECK_THROWS(std::invalid_argument, m.begin_fill(prompt, 4, {{1, 1}, {1, 1}}));
    CHECK_THROWS(std::invalid_argument, m.begin_fill(prompt, 3, {{0, 1}, {3, 1}}));
    CHECK_THROWS(std::invalid_argument, m.begin_fill(prompt, 3, {{-1, 1}}));
    CHECK_EQ(m.begin_fill(prompt, 4, {}).ticket, 0);
    CHECK_EQ(m.begin_fill(prompt, 4, {{0, 2}}).ticket, 0);  // no such part exists
    CHECK_THROWS(std::out_of_range, m.manager.search_below(1, "", prompt.data(), 8));
    CHECK_THROWS(std::out_of_range, m.manager.needed_below(-1, "", prompt.data(), 4));
    HostFixture without(16, 16);
    CHECK_EQ(without.manager.search_below(0, "", prompt.data(), 8).most, 0);
    CHECK_THROWS(std::invalid_argument, without.manager.needed_below(0, "", prompt.data(), 4));
    StoreMoves none;
    CHECK(!without.manager.take_writes(5, none));
    CHECK_THROWS(std::invalid_argument, StoreFixture(HostFixture::config(16, 0)));
    CacheGroup many{GroupKind::kFull, 0, 64, 0};
    CHECK_THROWS(std::invalid_argument, StoreFixture(with_groups({many})));
    many.num_bundles = 63;
    StoreFixture most(with_groups({many}, 200));
    const StoreMoves fill = most.begin_fill(prompt);
    CHECK_EQ(count(fill.keys), 3);
    CHECK_EQ(count(fill.parts), 3 * 63);
    most.finish_fill(fill, 2);
    CHECK_EQ(most.search(prompt).have, 2);
}

// ---- groups and states ----------------------------------------

constexpr std::uint64_t kFull = 1;
constexpr std::uint64_t kWindow = 2 | 4;  // of two layers

std::vector<CacheGroup> full_and_sliding() {
    return {{GroupKind::kFull, 0, 1, 0}, {GroupKind::kSliding, 4, 2, 0}};
}

TEST(windows_are_needed_where_a_hit_reads_them) {
    StoreFixture m(with_groups(full_and_sliding()));
    const Tokens prompt = count_up(10, 10);
    const auto needed = m.needed(prompt, 5);
    CHECK_EQ(count(needed), 5);
    for (const ColumnParts& each : needed) {
        CHECK_EQ(each.parts, each.column >= 3 ? kFull | kWindow : kFull);
    }
    const StoreMoves fill = m.begin_fill(prompt);
    CHECK(StoreFixture::parts_of(fill) == Parts({{0}, {0}, {0}, {0, 1, 2}, {0, 1, 2}}));
    m.finish_fill(fill, 5);
    CHECK_EQ(m.hit(prompt), 10);
    CHECK(m.needed(prompt, 5).empty());
    // A shorter hit reads other columns.
    const auto shorter = m.needed(prompt, 3);
    CHECK_EQ(count(shorter), 2);
    CHECK(shorter[0].column == 1 && shorter[0].parts == kWindow);
    // A part of a window is useless.
    CHECK_EQ(m.begin_fill(prompt, 3, {{1, 2}, {2, 4}}).ticket, 0);
    const StoreMoves half = m.begin_fill(prompt, 3, {{1, 2}, {2, kWindow}});
    CHECK(StoreFixture::parts_of(half) == Parts({{1, 2}}));
    m.finish_fill(half, 1, true);
    // Only that column is written, not the columns after it.
    const StoreMoves moves = m.take();
    CHECK(moves.keys == Keys({item(m.keys(prompt), 2)}));
    CHECK(StoreFixture::parts_of(moves) == Parts({{0, 1, 2}}));
    m.finish_writes(moves);
}

// All layers have windows: columns that no window reads have no pages.
TEST(columns_without_pages_lie_between) {
    StoreFixture m(with_groups({{GroupKind::kSliding, 4, 1, 0}}));
    const Tokens prompt = count_up(10, 12);
    const auto needed = m.needed(prompt, 6);
    CHECK_EQ(count(needed), 2);
    CHECK_EQ(needed[0].column, 4);
    for (const std::int64_t arrives : {0, 1, 2}) {
        const StoreMoves fill = m.begin_fill(prompt);
        CHECK_EQ(count(fill.keys), 2);
        m.finish_fill(fill, arrives);
        CHECK_EQ(m.search(prompt).have, arrives == 2 ? 6 : arrives == 1 ? 5 : 0);
        if (arrives < 2) m.manager.reset_prefix_cache();
    }
    CHECK_EQ(m.hit(prompt), 12);
    m.put(count_up(100, 12));
    for (StoreMoves moves = m.take(); moves.ticket != 0; moves = m.take()) {
        for (const auto& parts : StoreFixture::parts_of(moves)) CHECK(!parts.empty());
        m.finish_writes(moves);
    }
}

// A full tier evicts other pages.
TEST(windows_that_the_hit_takes_stay) {
    StoreFixture m(with_groups({{GroupKind::kSliding, 6, 1, 0}}, 3));
    const Tokens prompt = count_up(10, 6);
    const StoreMoves all = m.begin_fill(prompt);
    m.finish_fill(all, 3);
    const Tokens other = count_up(100, 2);
    const StoreMoves crowd = m.begin_fill(other);
    m.finish_fill(crowd, 1);
    const auto needed = m.needed(prompt, 3);
    CHECK_EQ(count(needed), 1);
    const StoreMoves fill = m.begin_fill(prompt);
    CHECK_EQ(count(fill.keys), 1);
    CHECK_EQ(m.begin_fill(other).ticket, 0);  // the tier evicts no page of the hit now
    m.finish_fill(fill, 1);
    CHECK_EQ(m.hit(prompt), 6);
}

TEST(a_checkpoint_comes_with_its_page) {
    StoreFixture m(with_states(4));
    const Tokens prompt = count_up(10, 6);
    const auto needed = m.needed(prompt, 3);
    CHECK_EQ(needed.back().parts, kFull | std::uint64_t{1} << kStatePart);
    const StoreMoves part = m.begin_fill(prompt);
    CHECK(StoreFixture::parts_of(part) == Parts({{0}, {0}, {0, kStatePart}}));
    m.finish_fill(part, 2);
    CHECK_EQ(m.search(prompt).have, 2);
    CHECK_EQ(m.search(prompt).legal, 0);
    m.finish_fill(m.begin_fill(prompt), 1);
    CHECK_EQ(m.hit(prompt), 6);
    // A checkpoint is also filled without its page.
    const Tokens shorter = count_up(10, 4);
    const StoreMoves alone = m.begin_fill(shorter);
    CHECK(StoreFixture::parts_of(alone) == Parts({{kStatePart}}));
    m.manager.reset_prefix_cache();
    m.finish_fill(alone, 1);
    CHECK_EQ(m.manager.state_stats(0).host_checkpoints, 0);
    // A tier without state slots could not serve a filled checkpoint.
    StoreFixture without(with_states(0));
    CHECK_EQ(without.search(prompt).most, 0);
}

}  // namespace

}  // namespace tests::store::fills
