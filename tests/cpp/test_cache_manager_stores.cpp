// SPDX-License-Identifier: Apache-2.0
// Stores below the host tier: what they are given to keep, what they bring, and what becomes of
// both when others evict, release and reset meanwhile.
#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvcore/errors.hpp"
#include "kvcore/name_space.hpp"
#include "store_fixture.hpp"

using kvcore::CacheGroup;
using kvcore::ColumnParts;
using kvcore::GroupKind;
using kvcore::InvalidHandleError;
using kvcore::kStatePart;
using kvcore::StoreMoves;
using kvcore::StoreSearch;

namespace {

std::set<BlockId> pages_of(const StoreMoves& moves) {
    std::set<BlockId> pages;
    for (const kvcore::StoredPart& part : moves.parts) pages.insert(part.page);
    return pages;
}

kvcore::CacheConfig with_groups(std::vector<CacheGroup> groups, std::int64_t host_pages = 64) {
    kvcore::CacheConfig config = HostFixture::config(32, host_pages);
    config.groups = std::move(groups);
    return config;
}

kvcore::CacheConfig with_states(std::int64_t host_slots) {
    kvcore::CacheConfig config = HostFixture::config(12, 64);
    config.max_sequences = 3;
    config.states = {{0}};
    config.num_state_slots = 6;
    config.num_host_state_slots = host_slots;
    return config;
}

// ---- writes ----------------------------------------

void what_arrives_is_taken_once_in_its_order() {
    StoreFixture m(16, 16);
    const Tokens prompt = count_up(10, 6);
    const Keys keys = m.keys(prompt);
    StoreMoves none;
    CHECK(!m.manager.take_writes(5, none));
    m.put(prompt);
    CHECK_EQ(m.manager.num_waiting_writes(), 3);
    CHECK(!m.manager.take_writes(0, none));
    const StoreMoves first = m.take(2);
    CHECK(first.keys == Keys(keys.begin(), keys.begin() + 2));
    CHECK_EQ(first.replica, 0);
    CHECK(StoreFixture::parts_of(first) == Parts({{0}, {0}}));
    const StoreMoves second = m.take();
    CHECK(second.keys == Keys(keys.begin() + 2, keys.end()));
    CHECK(!m.manager.take_writes(5, none));
    CHECK_EQ(m.manager.num_waiting_writes(), 3);
    m.finish_writes(second);
    CHECK_EQ(m.manager.num_waiting_writes(), 2);
    CHECK_THROWS(InvalidHandleError, m.manager.finish_writes(second.ticket));
    CHECK_THROWS(InvalidHandleError, m.manager.finish_writes(0));
    CHECK_THROWS(InvalidHandleError, m.manager.finish_fill(first.ticket, 1));
    m.finish_writes(first);
    CHECK_EQ(m.manager.num_waiting_writes(), 0);
    CHECK_EQ(m.manager.num_dropped_writes(), 0);
    m.put(prompt);  // it is there
    CHECK_EQ(m.manager.num_waiting_writes(), 0);
}

void tenants_and_adapters_have_keys_of_their_own() {
    StoreFixture m(16, 64);
    const Tokens prompt = count_up(10, 4);
    const std::vector<std::string> names{"",
                                         kvcore::namespace_name("lora", {}),
                                         kvcore::namespace_name({}, "tenant"),
                                         kvcore::namespace_name("lora", "tenant"),
                                         "a name of one's own",
                                         "another one"};
    const std::vector<kvcore::KeyOptions> options{
        {},
        {kvcore::KeyScheme::kKvcore, "", "lora", {}},
        {kvcore::KeyScheme::kKvcore, "", {}, "tenant"},
        {kvcore::KeyScheme::kKvcore, "", "lora", "tenant"},
        {kvcore::KeyScheme::kKvcore, "", "a name of one's own", {}},
        {kvcore::KeyScheme::kKvcore, "", "another one", {}}};
    std::set<kvcore::PageKey> all;
    for (std::size_t i = 0; i < names.size(); ++i) {
        Request request = m.claim(prompt, names[i]);
        m.finish(m.reserve(request));
        m.finish(m.commit(request, 0));
        m.manager.release(request.sequence);
        const StoreMoves moves = m.take();
        const Keys keys = m.keys(prompt, options[i]);
        CHECK(moves.keys == keys);
        all.insert(keys.begin(), keys.end());
        m.finish_writes(moves);
        CHECK(m.manager.root_key_below(names[i]) == kvcore::root_key(options[i]));
    }
    CHECK_EQ(all.size(), 12U);
}

void tokens_with_extra_keys_have_keys_with_them() {
    kvcore::StandIns names;
    const kvcore::ExtraKey image{5, "image"};
    const TokenId stand_in = names.acquire(kvcore::stand_in_name(12, &image, 1));
    kvcore::CacheConfig config = HostFixture::config(16, 16);
    config.stand_ins = &names;
    StoreFixture m(config);
    m.put({10, 11, stand_in, 13, 14, 15, 16, 17});  // it reaches into the fourth page
    m.put({10, 11, 12, 13, 14, 15, 16, 17});
    kvcore::KeyChain chain(2);
    const kvcore::PlacedKey placed{2, 5, "image"};
    const Tokens plain = count_up(10, 8);
    chain.extend(plain.data(), 8, &placed, 1);
    const StoreMoves first = m.take(3);
    CHECK(first.keys == Keys(chain.keys().begin(), chain.keys().begin() + 3));
    const StoreMoves rest = m.take();
    Keys expected{chain.keys()[3]};
    const Keys without = m.keys(plain);
    expected.insert(expected.end(), without.begin() + 1, without.end());
    CHECK(rest.keys == expected);
    m.finish_writes(first);
    m.finish_writes(rest);
    names.release(stand_in);
}

// What is given out stays as it is until it is finished, whoever resets and fills the tier.
void what_is_being_written_is_nobody_elses() {
    for (const bool resets : {false, true}) {
        StoreFixture m(16, 8);
        m.put(count_up(10, 8));
        const StoreMoves taken = m.take();
        if (resets) m.manager.reset_prefix_cache();
        m.put(count_up(100, 16));
        const StoreMoves others = m.take();
        CHECK_EQ(count(others.keys), 4);
        for (const BlockId page : pages_of(others)) CHECK_EQ(pages_of(taken).count(page), 0U);
        m.finish_writes(others);
        m.finish_writes(taken);
        m.manager.reset_prefix_cache();
        CHECK_EQ(m.stored(), 0);
        m.put(count_up(200, 16));
        CHECK_EQ(m.stored(), 8);
    }
}

void what_waits_is_not_evicted_but_forgotten_with_the_cache() {
    StoreFixture m(16, 4);
    m.put(count_up(10, 8));
    m.put(count_up(100, 8));
    CHECK_EQ(m.hit(count_up(10, 8)), 8);  // no room for the other one
    CHECK_EQ(m.manager.num_waiting_writes(), 4);
    const StoreMoves taken = m.take(1);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.manager.num_dropped_writes(), 3);
    CHECK_EQ(m.manager.num_waiting_writes(), 1);
    StoreMoves none;
    CHECK(!m.manager.take_writes(5, none));
    m.finish_writes(taken);
    CHECK_EQ(m.manager.num_waiting_writes(), 0);
}

void every_page_of_a_long_answer_is_written_once() {
    StoreFixture m(32, 32);
    Request request = m.claim(count_up(10, 5));
    m.finish(m.reserve(request));
    m.finish(m.commit(request, 20));
    std::int64_t written = 0;
    Tokens all = count_up(10, 5);
    for (TokenId k = 0; k < 12; ++k) {
        all.push_back(20 + k);
        m.finish(m.reserve(request));
        m.finish(m.commit(request, 21 + k));
        if (k % 5 == 4) written += m.write_all();
    }
    const StoreMoves last = m.take();
    CHECK_EQ(written + count(last.keys), 8);
    CHECK(last.keys.back() == item(m.keys(all), 7));
    m.finish_writes(last);
    m.manager.release(request.sequence);
}

void a_checkpoint_is_written_with_its_page() {
    StoreFixture m(with_states(4));
    Request request = m.claim(count_up(10, 7));
    m.finish(m.reserve(request));
    request.start = request.active;
    request.active = request.end();
    m.finish(m.commit_batch({&request}));
    const StoreMoves moves = m.take();
    CHECK(moves.keys == Keys(m.keys(count_up(10, 6))));
    CHECK(StoreFixture::parts_of(moves) == Parts({{0}, {0}, {0, kStatePart}}));
    m.finish_writes(moves);
    StoreMoves none;
    CHECK(!m.manager.take_writes(5, none));
    m.manager.release(request.sequence);
}

// ---- fills ----------------------------------------

void what_arrives_in_the_tier_is_found_by_requests() {
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

void what_fails_leaves_nothing() {
    StoreFixture m(16, 4);
    const Tokens prompt = count_up(10, 8);
    const StoreMoves fill = m.begin_fill(prompt);
    CHECK_EQ(count(fill.keys), 4);
    CHECK_EQ(m.begin_fill(count_up(100, 8)).ticket, 0);  // no room
    m.finish_fill(fill, 0);
    CHECK_EQ(m.stored(), 0);
    const StoreMoves other = m.begin_fill(count_up(100, 12));
    CHECK_EQ(count(other.keys), 4);  // as many as there is room for
    m.finish_fill(other, 4);
    CHECK_EQ(m.stored(), 4);
}

void a_reset_forgets_what_is_on_its_way() {
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

void a_manager_goes_with_what_is_under_way() {
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

// Two at the same time, and the requests' own pages: the first that arrives stays.
void the_same_pages_arrive_twice() {
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

void a_fill_goes_on_from_what_is_there() {
    StoreFixture m(16, 16);
    m.put(count_up(10, 4));
    const Tokens prompt = count_up(10, 8);
    CHECK_EQ(m.begin_fill(prompt, 4, {{3, 1}}).ticket, 0);
    const StoreMoves fill = m.begin_fill(prompt, 4, {{0, 1}, {2, 1}, {3, 0}});
    CHECK(fill.keys == Keys({item(m.keys(prompt), 2)}));
    m.finish_fill(fill, 9);  // no more than there are
    CHECK_EQ(m.stored(), 3);
    m.write_all();
}

void a_request_that_runs_is_not_looked_for() {
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

void what_is_asked_for_wrongly_is_refused() {
    StoreFixture m(16, 16);
    const Tokens prompt = count_up(10, 8);
    CHECK(m.needed(prompt, 0).empty());
    CHECK_THROWS(std::invalid_argument, m.begin_fill(prompt, 4, {{1, 1}, {1, 1}}));
    CHECK_THROWS(std::invalid_argument, m.begin_fill(prompt, 3, {{0, 1}, {3, 1}}));
    CHECK_THROWS(std::invalid_argument, m.begin_fill(prompt, 3, {{-1, 1}}));
    CHECK_EQ(m.begin_fill(prompt, 4, {}).ticket, 0);
    CHECK_EQ(m.begin_fill(prompt, 4, {{0, 2}}).ticket, 0);  // there is no such part
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

void windows_are_needed_where_a_hit_reads_them() {
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
    // A shorter one reads others.
    const auto shorter = m.needed(prompt, 3);
    CHECK_EQ(count(shorter), 2);
    CHECK(shorter[0].column == 1 && shorter[0].parts == kWindow);
    // Half of a window is none.
    CHECK_EQ(m.begin_fill(prompt, 3, {{1, 2}, {2, 4}}).ticket, 0);
    const StoreMoves half = m.begin_fill(prompt, 3, {{1, 2}, {2, kWindow}});
    CHECK(StoreFixture::parts_of(half) == Parts({{1, 2}}));
    m.finish_fill(half, 1, true);
    // That column alone is written, not all behind it.
    const StoreMoves moves = m.take();
    CHECK(moves.keys == Keys({item(m.keys(prompt), 2)}));
    CHECK(StoreFixture::parts_of(moves) == Parts({{0, 1, 2}}));
    m.finish_writes(moves);
}

// Layers that all have windows: columns that none of them reads have no pages.
void columns_without_pages_lie_between() {
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

// Of a tier that is full, others go first.
void windows_that_the_hit_takes_stay() {
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
    CHECK_EQ(m.begin_fill(other).ticket, 0);  // nothing of it goes for others now
    m.finish_fill(fill, 1);
    CHECK_EQ(m.hit(prompt), 6);
}

void a_checkpoint_comes_with_its_page() {
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
    // And by itself.
    const Tokens shorter = count_up(10, 4);
    const StoreMoves alone = m.begin_fill(shorter);
    CHECK(StoreFixture::parts_of(alone) == Parts({{kStatePart}}));
    m.manager.reset_prefix_cache();
    m.finish_fill(alone, 1);
    CHECK_EQ(m.manager.state_stats(0).host_checkpoints, 0);
    // A tier without slots could not serve what it got.
    StoreFixture without(with_states(0));
    CHECK_EQ(without.search(prompt).most, 0);
}

}  // namespace

int main() {
    what_arrives_is_taken_once_in_its_order();
    tenants_and_adapters_have_keys_of_their_own();
    tokens_with_extra_keys_have_keys_with_them();
    what_is_being_written_is_nobody_elses();
    what_waits_is_not_evicted_but_forgotten_with_the_cache();
    every_page_of_a_long_answer_is_written_once();
    a_checkpoint_is_written_with_its_page();
    what_arrives_in_the_tier_is_found_by_requests();
    what_fails_leaves_nothing();
    a_reset_forgets_what_is_on_its_way();
    a_manager_goes_with_what_is_under_way();
    the_same_pages_arrive_twice();
    a_fill_goes_on_from_what_is_there();
    a_request_that_runs_is_not_looked_for();
    what_is_asked_for_wrongly_is_refused();
    windows_are_needed_where_a_hit_reads_them();
    columns_without_pages_lie_between();
    windows_that_the_hit_takes_stay();
    a_checkpoint_comes_with_its_page();
}
