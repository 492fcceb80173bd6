// SPDX-License-Identifier: Apache-2.0
// The counts of held pages by tenant, and the limits of quotas.
#include "pages/page_owners.hpp"

#include <cstdint>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "support/check.hpp"

namespace tests::pages::page_owners {

using kvcore::BlockId;
using kvcore::BlockPool;
using kvcore::HeldCounts;
using kvcore::Owner;
using kvcore::PageOwners;
using kvcore::TenantQuota;

namespace {

constexpr Owner kFirst = 1;
constexpr Owner kSecond = 2;

/// The first tenant has 3 .. 5 pages, the second 2 .. 4.
std::vector<TenantQuota> quotas() { return {{3, 5}, {2, 4}}; }

TEST(reservations_that_lack_pages_must_stay_available) {
    HeldCounts counts(quotas());
    CHECK_EQ(counts.num_reserved(), 5);
    CHECK(counts.is_lawful(5));
    CHECK(!counts.is_lawful(4));
    counts.add(kFirst, 2);
    CHECK_EQ(counts.unfilled(), 3);
    CHECK(counts.is_lawful(3));
    CHECK(!counts.is_lawful(2));
    counts.add(0, 7);  // pages of no tenant fill no reservation
    CHECK_EQ(counts.unfilled(), 3);
}

TEST(no_tenant_holds_more_than_its_ceiling) {
    HeldCounts counts(quotas());
    counts.add(kFirst, 5);
    CHECK(counts.is_lawful(2));
    counts.add(kFirst, 1);
    CHECK(!counts.is_lawful(100));
    counts.add(kFirst, -1);
    CHECK(counts.is_lawful(2));
}

TEST(a_page_counts_for_the_tenant_that_took_it_while_it_is_held) {
    BlockPool pool(8);
    PageOwners owners(pool, quotas());
    pool.set_listener(&owners);
    std::vector<BlockId> pages(3);
    CHECK(pool.allocate(3, pages.data()));
    owners.set_taker(kSecond);
    owners.take(pages.data(), 3);
    for (const BlockId page : pages) CHECK_EQ(owners.owner(page), kSecond);
    CHECK_EQ(owners.counts().held(kSecond), 3);
    owners.let_go(pages.data(), 1);  // evictable: the page keeps its owner
    CHECK(!owners.is_held(pages[0]));
    CHECK_EQ(owners.owner(pages[0]), kSecond);
    CHECK_EQ(owners.counts().held(kSecond), 2);
    owners.hold(pages.data(), 2);
    CHECK_EQ(owners.counts().held(kSecond), 3);
    owners.give(pages.data(), 1, kFirst);
    CHECK_EQ(owners.counts().held(kFirst), 1);
    CHECK_EQ(owners.counts().held(kSecond), 2);
    owners.check_integrity();
    pool.free(pages.data(), 3);
    CHECK_EQ(owners.counts().held(kFirst) + owners.counts().held(kSecond), 0);
    owners.check_integrity();
}

}  // namespace

}  // namespace tests::pages::page_owners
