// SPDX-License-Identifier: Apache-2.0
// Worlds of random traffic in small pools; each test program has its own.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/layer_groups.hpp"
#include "traffic/group_world.hpp"

/// A pool that a few requests fill, with prompts that are longer than any window.
inline kvcore::CacheConfig small_pool(std::int32_t page_size, std::int64_t num_pages,
                                      const std::vector<kvcore::CacheGroup>& groups,
                                      bool dedup = true, std::int32_t partial = 1,
                                      std::int64_t drafts = 0, std::int32_t replicas = 1) {
    kvcore::CacheConfig config;
    config.page_size = page_size;
    config.num_pages = num_pages;
    config.max_sequences = 8;
    config.max_seq_len = 120;
    config.groups = groups;
    config.dedup = dedup;
    config.partial_page_reuse = partial;
    config.max_draft_tokens = drafts;
    config.num_replicas = replicas;
    return config;
}

/// Run a world, and pass it to `look` before it ends.
template <class Look>
void run_world(const std::string& name, GroupWorld world, std::int64_t operations,
               const Look& look) {
    check::note = name;
    for (std::int64_t k = 0; k < operations; ++k) world.operate();
    look(world);
    world.end();
}
