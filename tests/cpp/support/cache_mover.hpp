// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "support/check.hpp"
#include "support/request.hpp"

/// A snapshot of a replica by page ids only, and its restore.
namespace cache_mover {

using Columns = std::vector<kvcore::CachedColumn>;

/// An exported run: `tokens` are the tokens of its whole prefix.
struct Run {
    std::string name;
    std::vector<TokenId> tokens;
    std::int32_t first = 0;
    std::int32_t rank = 0;
    Columns columns;
    std::vector<BlockId> pages;
};

inline kvcore::ColumnSpan span_of(const kvcore::CacheManager& manager, const Run& run,
                                  std::int32_t replica = 0) {
    kvcore::ColumnSpan span;
    span.replica = replica;
    span.num_resets = manager.num_resets();
    span.name_space = run.name;
    span.tokens = run.tokens.data();
    span.n = count(run.tokens);
    span.first = run.first;
    return span;
}

/// List the cached runs, with their prefixes.
inline std::vector<Run> list(const kvcore::CacheManager& manager, std::int32_t replica = 0) {
    const kvcore::CachedTree tree = manager.cached_tree(replica);
    const std::int32_t page = manager.config().page_size;
    std::vector<Run> runs;
    auto next = tree.tokens.begin();
    for (const kvcore::CachedRun& each : tree.runs) {
        Run run;
        run.name = item(tree.name_spaces, each.name_space);
        if (each.parent >= 0) {
            const Run& parent = item(runs, each.parent);
            CHECK_EQ(count(parent.tokens), std::int64_t{each.first} * page);
            CHECK(parent.rank >= each.rank || each.rank <= item(tree.runs, each.parent).rank);
            run.tokens = parent.tokens;
        } else {
            CHECK_EQ(each.first, 0);
        }
        const std::ptrdiff_t size = std::ptrdiff_t{each.num_columns} * page;
        run.tokens.insert(run.tokens.end(), next, next + size);
        next += size;
        run.first = each.first;
        run.rank = each.rank;
        runs.push_back(run);
    }
    CHECK(next == tree.tokens.end());
    return runs;
}

/// Export the whole cache.
inline std::vector<Run> save(kvcore::CacheManager& manager, std::int32_t replica = 0) {
    std::vector<Run> runs = list(manager, replica);
    for (Run& run : runs) {
        const kvcore::CacheExport held = manager.export_columns(span_of(manager, run, replica));
        manager.check_integrity();
        run.columns = held.columns();
        run.pages = held.pages();
    }
    return runs;
}

/// Import the runs that fit, the most valuable first. Return the number of written pages.
inline std::int64_t restore(kvcore::CacheManager& manager, std::vector<Run> runs,
                            std::int32_t replica = 0) {
    std::stable_sort(runs.begin(), runs.end(),
                     [](const Run& a, const Run& b) { return a.rank > b.rank; });
    std::int64_t written = 0;
    for (const Run& run : runs) {
        kvcore::CacheImport taken =
            manager.import_columns(span_of(manager, run, replica), run.columns.data());
        manager.check_integrity();
        const bool holds = taken.status() == kvcore::ImportStatus::kTaken ||
                           taken.status() == kvcore::ImportStatus::kKnown;
        if (!holds) continue;
        written += std::count_if(taken.pages().begin(), taken.pages().end(),
                                 [](BlockId page) { return page >= 0; });
        CHECK(manager.publish(taken));
        manager.check_integrity();
    }
    std::stable_sort(runs.begin(), runs.end(),
                     [](const Run& a, const Run& b) { return a.rank < b.rank; });
    for (const Run& run : runs) {
        manager.touch(replica, run.name, run.tokens.data(), count(run.tokens));
    }
    manager.check_integrity();
    return written;
}

}  // namespace cache_mover
