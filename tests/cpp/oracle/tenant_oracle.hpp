// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "kvcore/errors.hpp"
#include "support/group_probe.hpp"
#include "support/request.hpp"

/// Held pages, counted from scratch: pages that are neither free nor evictable.
class HeldPages {
   public:
    HeldPages(const kvcore::CacheManager& manager, std::int32_t index)
        : replica_(kvcore::CacheManagerProbe::replica(manager, index)) {
        for (const std::string name : {"", "other"}) {
            const kvcore::TreeNode* root = replica_.tree.find_namespace(name);
            if (root != nullptr) walk(root);
        }
        const kvcore::BlockPool& pool = replica_.pool;
        for (std::int64_t id = 0; id < pool.num_blocks(); ++id) {
            add_column(static_cast<BlockId>(id), pool.ref_count(static_cast<BlockId>(id)) > 0);
        }
    }
    [[nodiscard]] const std::set<BlockId>& pages() const { return held_; }
    [[nodiscard]] bool is_cached(BlockId page) const { return cached_.count(page) > 0; }

   private:
    // Return true if this run, or a run below it, is pinned.
    bool walk(const kvcore::TreeNode* node) {
        bool is_protected = node->pins > 0;
        kvcore::for_each_child(node, [&](kvcore::TreeNode* child) { is_protected |= walk(child); });
        for (std::int32_t p = 0; !node->is_root() && p < node->num_pages; ++p) {
            columns_[node->ids(replica_.tree.page_size())[p]] = is_protected;
        }
        return is_protected;
    }
    void add_column(BlockId column, bool is_live) {
        if (!is_live) return;
        const auto found = columns_.find(column);
        const bool is_cached = found != columns_.end();
        // A copy may also have a reference to a page of the tree.
        const bool is_held = !is_cached || found->second;
        const auto add = [&](BlockId page, bool held) {
            if (held) held_.insert(page);
            if (is_cached) cached_.insert(page);
        };
        if (replica_.columns == nullptr) return add(column, is_held);
        replica_.columns->for_each_full_page(column, [&](BlockId page) { add(page, is_held); });
        for (std::size_t w = 0; w < replica_.columns->grouping().windows().size(); ++w) {
            const bool is_read = !replica_.columns->is_idle(column, w);
            replica_.columns->for_each_window_page(column, w,
                                                   [&](BlockId page) { add(page, is_read); });
        }
    }

    const kvcore::Replica& replica_;
    std::map<BlockId, bool> columns_;  // columns of the tree; true: protected
    std::set<BlockId> held_;
    std::set<BlockId> cached_;
};

/// The pages that each tenant holds, counted from scratch. No tenant is above its ceiling, and
/// every reservation can be filled. A page changes its owner only if it was not held at the
/// previous check.
class TenantOracle {
   public:
    explicit TenantOracle(const kvcore::CacheManager& manager)
        : manager_(manager), before_(static_cast<std::size_t>(manager.config().num_replicas)) {
        for (std::int32_t r = 0; r < manager_.config().num_replicas; ++r) note(r, {manager_, r});
    }
    void check(std::int64_t verb) {
        try {
            manager_.check_integrity();
        } catch (const kvcore::IntegrityError& error) {
            check::fail(__FILE__, __LINE__,
                        std::string(error.what()) + ", verb " + std::to_string(verb) + text());
        }
        for (std::int32_t r = 0; r < manager_.config().num_replicas; ++r) {
            const HeldPages held(manager_, r);
            check_counts(r, held);
            check_owners(r, held);
            note(r, held);
        }
    }
    std::int64_t num_given = 0;  // pages that another tenant took over

   private:
    struct Page {
        kvcore::Owner owner = 0;
        bool is_held = false;
        bool is_cached = false;
    };

    [[nodiscard]] std::string text() const {
        std::string text = ", held";
        for (std::int32_t r = 0; r < manager_.config().num_replicas; ++r) {
            for (const auto& each : manager_.tenant_stats(r)) {
                text += " " + std::to_string(each.held_pages);
            }
            text += ", " + std::to_string(manager_.stats(r).available_pages()) + " available";
        }
        return text;
    }
    [[nodiscard]] const kvcore::PageOwners& owners(std::int32_t r) const {
        return *kvcore::CacheManagerProbe::replica(manager_, r).owners;
    }
    void note(std::int32_t r, const HeldPages& held) {
        std::vector<Page>& pages = item(before_, r);
        pages.clear();
        for (std::int64_t p = 0; p < manager_.config().num_pages; ++p) {
            const auto page = static_cast<BlockId>(p);
            pages.push_back(
                {owners(r).owner(page), held.pages().count(page) > 0, held.is_cached(page)});
        }
    }
    void check_counts(std::int32_t r, const HeldPages& held) const {
        const std::vector<kvcore::TenantQuota>& quotas = manager_.config().quotas;
        std::vector<std::int64_t> counts(quotas.size() + 1);
        for (const BlockId page : held.pages()) {
            CHECK(owners(r).is_held(page));
            ++counts[owners(r).owner(page)];
        }
        std::int64_t lacking = 0;
        const std::vector<kvcore::TenantStats> stats = manager_.tenant_stats(r);
        for (std::size_t i = 0; i < stats.size(); ++i) {
            CHECK_EQ(stats[i].held_pages, counts[i + 1]);
            CHECK(counts[i + 1] <= quotas[i].max_pages);
            lacking += std::max<std::int64_t>(0, quotas[i].reserved_pages - counts[i + 1]);
        }
        const std::int64_t available =
            manager_.config().num_pages - static_cast<std::int64_t>(held.pages().size());
        CHECK_EQ(manager_.stats(r).available_pages(), available);
        CHECK(available >= lacking);
    }
    void check_owners(std::int32_t r, const HeldPages& held) {
        for (const BlockId page : held.pages()) {
            const Page& before = item(item(before_, r), page);
            if (owners(r).owner(page) == before.owner) continue;
            const bool stayed = before.is_cached && held.is_cached(page);
            CHECK(!before.is_held || !stayed);
            if (stayed) ++num_given;
        }
    }

    const kvcore::CacheManager& manager_;
    std::vector<std::vector<Page>> before_;  // by replica
};
