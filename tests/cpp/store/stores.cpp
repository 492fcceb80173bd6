// SPDX-License-Identifier: Apache-2.0
// Writes to the stores below the host tier: the pages that they get, and the fate of these pages
// when other requests evict, release and reset meanwhile.
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "kvcore/errors.hpp"
#include "kvcore/extra_keys.hpp"
#include "support/store_fixture.hpp"

namespace tests::store::stores {

using kvcore::InvalidHandleError;
using kvcore::kStatePart;
using kvcore::StoreMoves;

namespace {

std::set<BlockId> pages_of(const StoreMoves& moves) {
    std::set<BlockId> pages;
    for (const kvcore::StoredPart& part : moves.parts) pages.insert(part.page);
    return pages;
}

TEST(what_arrives_is_taken_once_in_its_order) {
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
    m.put(prompt);  // already stored
    CHECK_EQ(m.manager.num_waiting_writes(), 0);
}

TEST(tenants_and_adapters_have_keys_of_their_own) {
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

TEST(tokens_with_extra_keys_have_keys_with_them) {
    kvcore::StandIns names;
    const kvcore::ExtraKey image{5, "image"};
    const TokenId stand_in = names.acquire(kvcore::stand_in_name(12, &image, 1));
    kvcore::CacheConfig config = HostFixture::config(16, 16);
    config.stand_ins = &names;
    StoreFixture m(config);
    m.put({10, 11, stand_in, 13, 14, 15, 16, 17});  // the image extends into the fourth page
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

// Pages of a write in flight stay unchanged until it ends, even if the tier is reset and filled.
TEST(what_is_being_written_is_nobody_elses) {
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

TEST(what_waits_is_not_evicted_but_forgotten_with_the_cache) {
    StoreFixture m(16, 4);
    m.put(count_up(10, 8));
    m.put(count_up(100, 8));
    CHECK_EQ(m.hit(count_up(10, 8)), 8);  // no room for the other prompt
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

TEST(every_page_of_a_long_answer_is_written_once) {
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

TEST(a_checkpoint_is_written_with_its_page) {
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

}  // namespace

}  // namespace tests::store::stores
