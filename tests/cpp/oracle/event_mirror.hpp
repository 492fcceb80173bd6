// SPDX-License-Identifier: Apache-2.0
// The pages that a reader of events has listed, compared with the trees.
#pragma once

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "keys/path_keys.hpp"
#include "kvcore/cache_events.hpp"
#include "support/check.hpp"
#include "support/group_probe.hpp"

/// Keys by replica, medium and group, from events only. The mirror computes every key again from
/// its event. A stored page must be new, and a removed page must exist.
class EventMirror {
   public:
    using Place = std::tuple<std::int32_t, kvcore::CacheMedium, std::int32_t>;
    using Pages = std::map<Place, std::set<kvcore::PageKey>>;

    explicit EventMirror(const kvcore::CacheConfig& config)
        : page_size_(config.page_size), paths_(config.page_size, config.key_seed, nullptr) {}

    void read(const std::vector<kvcore::CacheEvent>& events) {
        for (const kvcore::CacheEvent& event : events) {
            ++num_events_;
            if (event.kind == kvcore::CacheEvent::Kind::kCleared) {
                clear(event.replica);
            } else if (event.kind == kvcore::CacheEvent::Kind::kStored) {
                store(event);
            } else {
                std::set<kvcore::PageKey>& pages = at(event);
                for (const kvcore::PageKey& key : event.keys) CHECK_EQ(pages.erase(key), 1U);
                if (pages.empty()) pages_.erase({event.replica, event.medium, event.group});
            }
        }
    }
    [[nodiscard]] const Pages& pages() const { return pages_; }
    [[nodiscard]] std::int64_t num_events() const { return num_events_; }

    /// The pages in the trees of a manager.
    [[nodiscard]] Pages truth(const kvcore::CacheManager& manager) const {
        Pages pages;
        for (std::int32_t r = 0; r < manager.config().num_replicas; ++r) {
            const kvcore::Replica& replica = kvcore::CacheManagerProbe::replica(manager, r);
            add(replica.tree, replica.columns.get(), r, kvcore::CacheMedium::kDevice, pages);
            if (replica.host == nullptr) continue;
            add(replica.host->tree, replica.host->columns.get(), r, kvcore::CacheMedium::kHost,
                pages);
        }
        return pages;
    }

   private:
    std::set<kvcore::PageKey>& at(const kvcore::CacheEvent& event) {
        return pages_[{event.replica, event.medium, event.group}];
    }
    void clear(std::int32_t replica) {
        for (auto place = pages_.begin(); place != pages_.end();) {
            place = std::get<0>(place->first) == replica ? pages_.erase(place) : std::next(place);
        }
    }
    void store(const kvcore::CacheEvent& event) {
        CHECK(!event.keys.empty());
        CHECK_EQ(event.tokens.size(), event.keys.size() * static_cast<std::size_t>(page_size_));
        kvcore::PageKey before = event.parent.value_or(paths_.root(event.name_space));
        const kvcore::TokenId* tokens = event.tokens.data();
        for (const kvcore::PageKey& key : event.keys) {
            CHECK(key == kvcore::page_key(before, tokens, page_size_));
            CHECK(at(event).insert(key).second);
            before = key;
            tokens += page_size_;
        }
    }
    void add(const kvcore::PrefixTree& tree, const kvcore::ColumnPages* columns,
             std::int32_t replica, kvcore::CacheMedium medium, Pages& pages) const {
        std::map<const kvcore::TreeNode*, kvcore::PageKey> ends;
        for (const kvcore::TreeNode* run : tree.runs()) {
            kvcore::PageKey key = run->parent->is_root()
                                      ? paths_.root(kvcore::PrefixTree::name_of(run))
                                      : ends.at(run->parent);
            for (std::int32_t i = 0; i < run->num_pages; ++i) {
                key = kvcore::page_key(key, run->page_tokens(i, page_size_), page_size_);
                if (columns == nullptr) {
                    pages[{replica, medium, -1}].insert(key);
                } else {
                    add_groups(*columns, run->ids(page_size_)[i], {replica, medium, 0}, key, pages);
                }
            }
            ends[run] = key;
        }
    }
    static void add_groups(const kvcore::ColumnPages& columns, kvcore::BlockId column, Place place,
                           const kvcore::PageKey& key, Pages& pages) {
        const auto& groups = columns.grouping().groups();
        for (std::size_t g = 0; g < groups.size(); ++g) {
            if (columns.page(column, groups[g].first_lane) == kvcore::ColumnPages::kNoPage)
                continue;
            std::get<2>(place) = static_cast<std::int32_t>(g);
            pages[place].insert(key);
        }
    }

    std::int32_t page_size_;
    kvcore::PathKeys paths_;
    Pages pages_;
    std::int64_t num_events_ = 0;
};
