// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <set>
#include <stdexcept>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/errors.hpp"
#include "support/random.hpp"

namespace tests::pages::block_pool {

using kvcore::BlockId;
using kvcore::BlockPool;
using kvcore::InvalidHandleError;

namespace {

std::vector<BlockId> take(BlockPool& pool, std::int64_t n) {
    std::vector<BlockId> ids(static_cast<std::size_t>(n));
    CHECK(pool.allocate(n, ids.data()));
    return ids;
}

void give(BlockPool& pool, const std::vector<BlockId>& ids) {
    pool.free(ids.data(), static_cast<std::int64_t>(ids.size()));
}

TEST(sizes_are_checked) {
    CHECK_THROWS(std::invalid_argument, BlockPool(0));
    CHECK_THROWS(std::invalid_argument, BlockPool(-1));
    CHECK_THROWS(std::invalid_argument, BlockPool(std::int64_t{1} << 31));
    const BlockPool one(1);
    CHECK_EQ(one.num_blocks(), 1);
    CHECK_EQ(one.num_free(), 1);
}

TEST(ids_are_in_range_and_differ) {
    BlockPool pool(100);
    const std::vector<BlockId> ids = take(pool, 100);
    CHECK_EQ(pool.num_free(), 0);
    CHECK_EQ(std::set<BlockId>(ids.begin(), ids.end()).size(), 100);
    for (const BlockId id : ids) {
        CHECK(id >= 0 && id < 100);
        CHECK_EQ(pool.ref_count(id), 1);
    }
    pool.check_integrity();
}

TEST(too_many_changes_nothing) {
    BlockPool pool(4);
    static_cast<void>(take(pool, 3));
    std::vector<BlockId> out(2, -7);
    CHECK(!pool.allocate(2, out.data()));
    CHECK_EQ(out, (std::vector<BlockId>{-7, -7}));
    CHECK_EQ(pool.num_free(), 1);
    CHECK(pool.allocate(0, nullptr));
    CHECK(pool.allocate(1, out.data()));
}

TEST(last_freed_is_first_out) {
    BlockPool pool(10);
    const std::vector<BlockId> ids = take(pool, 5);
    give(pool, {ids[1], ids[3]});
    std::vector<BlockId> free(7);
    pool.copy_free(free.data());
    CHECK_EQ(free, (std::vector<BlockId>{ids[3], ids[1], 5, 6, 7, 8, 9}));
    CHECK_EQ(take(pool, 3), (std::vector<BlockId>{ids[3], ids[1], 5}));
}

TEST(shared_pages_are_freed_as_often) {
    BlockPool pool(3);
    const std::vector<BlockId> ids = take(pool, 2);
    pool.share(ids.data(), 2);
    pool.share(ids.data(), 1);
    CHECK_EQ(pool.ref_count(ids[0]), 3);
    give(pool, ids);
    give(pool, ids);
    CHECK_EQ(pool.num_free(), 2);
    CHECK_EQ(pool.ref_count(ids[0]), 1);
    CHECK_EQ(pool.ref_count(ids[1]), 0);
    pool.check_integrity();
}

// A call that throws changes nothing, not even the order in which pages are handed out.
TEST(wrong_ids_change_nothing) {
    BlockPool pool(8);
    const std::vector<BlockId> ids = take(pool, 4);
    give(pool, {ids[2]});
    const std::vector<std::vector<BlockId>> wrong = {
        {ids[0], ids[2]},          // already free
        {ids[0], ids[1], ids[0]},  // twice in one call
        {ids[0], 7},               // never handed out
        {ids[1], 8},
        {ids[1], -1},  // no such page
        {std::numeric_limits<BlockId>::max()},
        {std::numeric_limits<BlockId>::min()},
    };
    for (const std::vector<BlockId>& list : wrong) {
        CHECK_THROWS(InvalidHandleError, give(pool, list));
        CHECK_EQ(pool.num_free(), 5);
        for (const BlockId id : {ids[0], ids[1], ids[3]}) CHECK_EQ(pool.ref_count(id), 1);
        pool.check_integrity();
    }
    const std::vector<BlockId> mixed = {ids[0], ids[2]};
    CHECK_THROWS(InvalidHandleError, pool.share(mixed.data(), 2));
    CHECK_EQ(pool.ref_count(ids[0]), 1);
    CHECK_EQ(take(pool, 1), std::vector<BlockId>{ids[2]});
    CHECK_THROWS(InvalidHandleError, pool.ref_count(8));
    CHECK_THROWS(InvalidHandleError, pool.ref_count(-1));
    CHECK_EQ(pool.ref_count(7), 0);
}

TEST(huge_pools_cost_nothing_until_used) {
    BlockPool pool(50'000'000);
    CHECK_EQ(take(pool, 2), (std::vector<BlockId>{0, 1}));
    CHECK_EQ(pool.num_free(), 49'999'998);
    pool.check_integrity();
}

void agrees_with_counts(std::uint64_t seed) {
    Random random(seed);
    const std::int64_t size = random.between(1, 40);
    BlockPool pool(size);
    std::vector<std::uint32_t> counts(static_cast<std::size_t>(size));
    std::int64_t free = size;
    for (int step = 0; step < 2000; ++step) {
        std::vector<BlockId> list;
        for (std::int64_t n = random.below(5); n >= 0; --n) {
            list.push_back(static_cast<BlockId>(random.below(size + 1)));
        }
        const auto n = static_cast<std::int64_t>(list.size());
        const int verb = static_cast<int>(random.below(3));
        std::vector<std::uint32_t> after = counts;
        bool legal = true;
        for (const BlockId id : list) {
            const auto i = static_cast<std::size_t>(id);
            legal = legal && id < size && (verb == 1 ? counts[i] : after[i]) > 0;
            if (legal) after[i] += verb == 1 ? 1U : ~0U;
        }
        if (verb == 0) {
            legal = pool.allocate(n, list.data());
            CHECK_EQ(legal, n <= free);
            after = counts;
            for (const BlockId id : list) {
                if (legal) CHECK_EQ(after[static_cast<std::size_t>(id)]++, 0);
            }
        } else if (!legal) {
            CHECK_THROWS(InvalidHandleError,
                         verb == 1 ? pool.share(list.data(), n) : pool.free(list.data(), n));
        } else {
            verb == 1 ? pool.share(list.data(), n) : pool.free(list.data(), n);
        }
        if (legal) counts = after;
        free = 0;
        for (std::int64_t id = 0; id < size; ++id) {
            const std::uint32_t expected = counts[static_cast<std::size_t>(id)];
            CHECK_EQ(pool.ref_count(static_cast<BlockId>(id)), expected);
            free += expected == 0 ? 1 : 0;
        }
        CHECK_EQ(pool.num_free(), free);
        pool.check_integrity();
    }
}

TEST(agrees_with_counts) {
    const std::uint64_t seed = check::seed_or(11);
    for (std::uint64_t i = 0; i < 20; ++i) agrees_with_counts(seed + i);
}

}  // namespace

}  // namespace tests::pages::block_pool
