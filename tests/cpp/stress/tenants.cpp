// SPDX-License-Identifier: Apache-2.0
// Random traffic of several tenants with reservations and ceilings, with holds of pages, pins,
// exports, imports and forgotten pages. After every call the world counts each tenant's held pages
// from scratch. --count: operations of each configuration.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/layer_groups.hpp"
#include "traffic/tenant_world.hpp"

namespace tests::stress::tenants {

using kvcore::TenantQuota;

namespace {

constexpr std::int64_t kNone = TenantQuota::kNoCeiling;

kvcore::CacheConfig config(std::int32_t page_size, std::int64_t num_pages,
                           const std::vector<TenantQuota>& quotas,
                           const std::vector<kvcore::CacheGroup>& groups = {}) {
    kvcore::CacheConfig config;
    config.page_size = page_size;
    config.num_pages = num_pages;
    config.max_sequences = 8;
    config.max_seq_len = 120;
    config.quotas = quotas;
    config.groups = groups;
    return config;
}

std::vector<kvcore::CacheConfig> configs() {
    std::vector<kvcore::CacheConfig> all = {
        config(4, 24, {{8, 14}, {0, 10}, {4, kNone}}),
        config(4, 20, {{0, 10}, {0, 10}}),
        config(4, 20, {{10, kNone}, {10, kNone}}),
        config(2, 40, {{10, 20}, {5, 5}, {0, 16}}),
        config(4, 24, {{8, 14}, {0, 12}, {4, kNone}}),
        config(4, 24, {{8, 14}, {0, 12}}),
        config(1, 48, {{12, 30}, {0, 25}}),
        config(4, 24, {{8, 14}, {0, 12}, {2, kNone}}),
        config(4, 60, {{20, 40}, {0, 30}, {6, kNone}}, {full(), sliding(7)}),
        config(4, 60, {{20, 40}, {0, 30}}, {sliding(9, 2), full()}),
        config(4, 30, {{8, 20}, {0, 16}}, {sliding(7), chunked(8)}),
        config(4, 60, {{20, 40}, {0, 36}}, {full(), chunked(8)}),
    };
    all[4].dedup = false;
    all[5].prefix_caching = false;
    all[6].num_replicas = 2;
    all[7].partial_page_reuse = 0;
    all[7].reserve_chunks = true;
    all[9].dedup = false;
    all[11].reserve_chunks = true;
    all[11].max_draft_tokens = 2;
    all.push_back(config(4, 24, {{8, 14}, {0, 12}, {2, kNone}}));
    all.back().host_pages = 12;
    for (const auto policy : {kvcore::WritePolicy::kWriteBack, kvcore::WritePolicy::kSelective}) {
        for (const std::size_t like : {0U, 2U, 8U}) {
            all.push_back(all[like]);
            all.back().host_pages = 60;
            all.back().write_policy = policy;
        }
    }
    return all;
}

TEST(tenants_hold_their_pages) {
    const std::uint64_t seed = check::seed_or(20261122);
    const std::int64_t operations = check::count_or(400);
    std::int64_t fits = 0;
    std::int64_t refused = 0;
    std::int64_t given = 0;
    std::int64_t held = 0;
    std::int64_t imported = 0;
    const std::vector<kvcore::CacheConfig> all = configs();
    for (std::size_t i = 0; i < all.size(); ++i) {
        for (const bool copies_later : {false, true}) {
            if (!copies_later && all[i].host_pages > 0) continue;
            check::note =
                "configuration " + std::to_string(i) + (copies_later ? ", transfers" : "");
            TenantWorld world(all[i], copies_later, seed + i);
            for (std::int64_t k = 0; k < operations; ++k) world.operate();
            fits += world.num_fits;
            refused += world.num_refused;
            given += world.num_given();
            held += world.num_held;
            imported += world.num_imported;
            world.end();
        }
    }
    std::printf(
        "%lld reservations, %lld refused, %lld pages taken over, %lld holds, %lld imports\n",
        static_cast<long long>(fits), static_cast<long long>(refused),
        static_cast<long long>(given), static_cast<long long>(held),
        static_cast<long long>(imported));
    CHECK(operations < 400 || (fits > 0 && refused > 0 && given > 0 && held > 0 && imported > 0));
}

}  // namespace

}  // namespace tests::stress::tenants
