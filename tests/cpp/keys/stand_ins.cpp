// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kvcore/errors.hpp"
#include "kvcore/extra_keys.hpp"
#include "kvcore/prefix_tree.hpp"
#include "support/check.hpp"
#include "support/host_fixture.hpp"

namespace tests::keys::stand_ins {

using kvcore::ExtraKey;
using kvcore::stand_in_name;
using kvcore::StandIns;
using kvcore::TokenId;

namespace {

TEST(different_keys_have_different_names) {
    const std::vector<ExtraKey> one{{2, "ab"}};
    const std::vector<std::vector<ExtraKey>> others{{},
                                                    {{2, "a"}},
                                                    {{2, "a"}, {2, "b"}},
                                                    {{3, "ab"}},
                                                    {{1, ""}, {2, "ab"}},
                                                    {{2, "ab\0"}},
                                                    {{2, std::string_view("ab\0", 3)}}};
    const std::string name = stand_in_name(7, one.data(), 1);
    CHECK_EQ(name, stand_in_name(7, one.data(), 1));
    CHECK(name != stand_in_name(8, one.data(), 1));
    CHECK(name != stand_in_name(-7, one.data(), 1));
    for (std::size_t i = 0; i < others.size(); ++i) {
        const bool is_same = i == 5;  // a literal ends at its first zero
        CHECK_EQ(name == stand_in_name(7, others[i].data(), others[i].size()), is_same);
    }
}

TEST(keys_have_one_order_in_a_name) {
    const std::vector<std::vector<ExtraKey>> lists{
        {{2, "a"}, {1, "a"}}, {{2, "b"}, {2, "a"}}, {{2, "a"}, {2, "a"}}};
    for (const std::vector<ExtraKey>& keys : lists) {
        CHECK_THROWS(std::invalid_argument, stand_in_name(7, keys.data(), keys.size()));
    }
    // A name with another order is refused: both lengths are 2, of "b" and "a".
    std::string name = stand_in_name(7, nullptr, 0);
    const ExtraKey a{2, "a"}, b{2, "b"};
    for (const ExtraKey* key : {&b, &a}) name += stand_in_name(7, key, 1).substr(8);
    CHECK_THROWS(std::invalid_argument, kvcore::read_stand_in_name(name));
}

TEST(a_name_has_one_id_and_an_id_one_name) {
    StandIns table;
    CHECK_EQ(table.find("a"), 0);
    const TokenId a = table.acquire("a");
    const TokenId b = table.acquire("b");
    CHECK(a != b);
    CHECK(a >= StandIns::kLowest && a <= StandIns::kHighest);
    CHECK_EQ(table.acquire("a"), a);
    CHECK_EQ(table.find("b"), b);
    CHECK_EQ(table.size(), 2);
    table.release(a);
    table.release(a);
    CHECK_THROWS(kvcore::InvalidHandleError, table.release(a));
    CHECK_THROWS(kvcore::InvalidHandleError, table.release(5));
    CHECK_EQ(table.find("a"), a);  // until a sweep
    table.check_integrity();
}

TEST(names_are_read_back) {
    const std::vector<std::vector<ExtraKey>> lists{
        {}, {{2, "ab"}}, {{1, ""}, {7, std::string_view("\0", 1)}, {1 << 30, "ab"}}};
    for (const TokenId token : {0, 7, -7, 2'147'483'647, -2'147'483'647 - 1}) {
        for (const std::vector<ExtraKey>& keys : lists) {
            const std::string name = stand_in_name(token, keys.data(), keys.size());
            const kvcore::StandInParts parts = kvcore::read_stand_in_name(name);
            CHECK_EQ(parts.token, token);
            CHECK_EQ(parts.keys.size(), keys.size());
            for (std::size_t i = 0; i < keys.size(); ++i) {
                CHECK(parts.keys[i].length == keys[i].length &&
                      parts.keys[i].bytes == keys[i].bytes);
            }
            // A name may end after the token and after every key.
            std::set<std::size_t> ends{8};
            for (const ExtraKey& key : keys) ends.insert(*ends.rbegin() + 16 + key.bytes.size());
            for (std::size_t n = 0; n < name.size(); ++n) {
                if (ends.count(n) > 0) continue;
                CHECK_THROWS(std::invalid_argument, kvcore::read_stand_in_name({name.data(), n}));
            }
        }
    }
    StandIns table;
    const TokenId id = table.acquire("a name");
    CHECK(table.name_of(id) == std::optional<std::string>("a name"));
    CHECK(!table.name_of(id + 1));
    CHECK(!table.name_of(5));
    table.release(id);
    table.begin_sweep();
    table.end_sweep(nullptr, 0);
    CHECK(!table.name_of(id));
}

TEST(a_sweep_keeps_names_that_are_held_or_used_again) {
    StandIns table(100, 4);
    std::vector<TokenId> ids;
    for (const char* name : {"used", "held", "again", "gone"}) {
        CHECK(!table.is_sweep_due());
        ids.push_back(table.acquire(name));
    }
    CHECK(table.is_sweep_due());
    for (std::size_t i = 1; i < 4; ++i) table.release(ids[i]);
    table.begin_sweep();
    CHECK_EQ(table.acquire("again"), ids[2]);
    table.release(ids[2]);  // the id may be in a tree now
    table.end_sweep(&ids[1], 1);
    CHECK_EQ(table.size(), 3);
    CHECK_EQ(table.find("gone"), 0);
    CHECK_EQ(table.find("held"), ids[1]);
    CHECK(!table.is_sweep_due());
    table.begin_sweep();
    table.end_sweep(nullptr, 0);
    CHECK_EQ(table.size(), 1);
    CHECK_EQ(table.find("used"), ids[0]);
    table.check_integrity();
}

TEST(ids_wrap_around_and_run_out) {
    StandIns table(3, 2);
    const TokenId first = table.acquire("0");
    for (int i = 1; i <= 10; ++i) {
        const TokenId id = table.acquire(std::to_string(i));
        CHECK(id != first);
        table.release(id);
        table.begin_sweep();
        table.end_sweep(nullptr, 0);
    }
    static_cast<void>(table.acquire("a"));
    static_cast<void>(table.acquire("b"));
    CHECK_THROWS(kvcore::CapacityError, static_cast<void>(table.acquire("c")));
    CHECK_EQ(table.find("0"), first);
    table.check_integrity();
    CHECK_THROWS(std::invalid_argument, StandIns(0));
    CHECK_THROWS(std::invalid_argument, StandIns((std::int64_t{1} << 30) + 1));
    CHECK_THROWS(std::invalid_argument, StandIns(1, 0));
}

TEST(threads_agree_on_ids) {
    StandIns table(1 << 20, 8);
    const auto work = [&table] {
        for (int i = 0; i < 2000; ++i) {
            const std::string name = std::to_string(i % 50);
            const TokenId id = table.acquire(name);
            CHECK_EQ(table.find(name), id);
            table.release(id);
        }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back(work);
    for (int i = 0; i < 200; ++i) {
        table.begin_sweep();
        table.end_sweep(nullptr, 0);
    }
    for (std::thread& thread : threads) thread.join();
    table.begin_sweep();
    table.end_sweep(nullptr, 0);
    CHECK_EQ(table.size(), 0);
    table.check_integrity();
}

TEST(a_manager_returns_the_tokens_that_it_holds) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    m.put({5, -1'500'000'000, 7, 8});
    m.put({5, -2'000'000'000, 7, -5});
    std::vector<TokenId> found = m.manager.tokens_up_to(StandIns::kHighest);
    std::sort(found.begin(), found.end());
    CHECK_EQ(found, std::vector<TokenId>({-2'000'000'000, -1'500'000'000}));
    Request one = m.claim({1, 2, 3, 4, 5});
    CHECK_EQ(m.manager.first_uncached(one.sequence), 0);
    m.manager.reset_prefix_cache();
    CHECK(m.manager.tokens_up_to(StandIns::kHighest).empty());
}

// Pages in flight to the tier may be in no tree.
TEST(tokens_in_flight_to_the_tier_are_returned) {
    HostFixture m(8, 8);
    Request request = m.claim({1, -2'000'000'000, 3, 4});
    m.finish(m.reserve(request));
    const kvcore::Transfers stores = m.commit(request, 0);
    CHECK(!stores.tier_moves.empty());
    m.manager.release(request.sequence);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.manager.match(0, "", request.tokens().data(), 4), 0);
    CHECK_EQ(m.manager.tokens_up_to(StandIns::kHighest).size(), 1);
    m.finish(stores);
    m.manager.reset_prefix_cache();
    CHECK(m.manager.tokens_up_to(StandIns::kHighest).empty());
}

TEST(long_runs_are_searched) {
    kvcore::PrefixTree tree(1);
    Tokens tokens = count_up(0, 1000);
    Ids ids = count_up(0, 1000);
    std::vector<TokenId> expected;
    for (const int at : {0, 255, 256, 511, 777, 999}) {
        tokens[static_cast<std::size_t>(at)] = StandIns::kHighest - at;
        expected.push_back(StandIns::kHighest - at);
    }
    tokens[300] = StandIns::kHighest + 1;
    std::vector<kvcore::DuplicatePage> duplicates;
    static_cast<void>(
        tree.insert(tree.open_namespace("salt"), tokens.data(), ids.data(), 1000, duplicates));
    std::vector<TokenId> found;
    tree.find_tokens_up_to(StandIns::kHighest, found);
    CHECK_EQ(found, expected);
}

TEST(names_are_returned_and_kept) {
    StandIns table;
    const TokenId id = table.acquire("cat");
    CHECK(table.hold(id) == "cat");
    CHECK(table.hold(id + 1).empty());
    table.release(id);
    table.begin_sweep();
    table.end_sweep(nullptr, 0);
    CHECK_EQ(table.find("cat"), id);
    table.release(id);
    CHECK_THROWS(kvcore::InvalidHandleError, table.release(id));
    table.begin_sweep();
    CHECK(table.hold(id) == "cat");  // the name is in use again
    table.end_sweep(nullptr, 0);
    CHECK_EQ(table.find("cat"), id);
    table.check_integrity();
}

}  // namespace

}  // namespace tests::keys::stand_ins
