// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "kvcore/cache_config.hpp"
#include "kvcore/prefix_tree.hpp"

namespace kvcore {

/// The rules that decide which cached pages the host tier stores, and when: the options of
/// CacheConfig, and a mark for each page. With groups, a page here is a column.
///
/// Owns: a byte per page of the device, unless the policy is write-through: the number of uses, or
/// with write-back whether the page was offered to the tier since its last use.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(1) per page; no memory after construction.
class StoreRules {
   public:
    /// `end`: the end of the page ids of each replica.
    StoreRules(const CacheConfig& config, std::int64_t end);

    [[nodiscard]] bool writes_back() const noexcept {
        return policy_ == WritePolicy::kWriteBack && !marks_.empty();
    }
    /// Returns true if the caller has to report hits, and pages that enter the cache.
    [[nodiscard]] bool has_marks() const noexcept { return !marks_.empty(); }
    /// Returns true if a page need not be stored when it enters the cache, but may be due at a
    /// later commit of a request that uses it.
    [[nodiscard]] bool is_selective() const noexcept { return is_selective_; }

    /// A page entered the cache, which is its first use.
    void enter(std::int32_t replica, BlockId page) noexcept {
        mark(replica, page) = policy_ == WritePolicy::kSelective ? 1 : 0;
    }
    /// A page was used again.
    void use(std::int32_t replica, BlockId page) noexcept {
        std::uint8_t& uses = mark(replica, page);
        if (policy_ == WritePolicy::kWriteBack) {
            uses = 0;
        } else if (uses < kMostUses) {
            ++uses;
        }
    }
    /// Makes the pages on the path to `at` due now, regardless of their number of uses. O(pages).
    void demand(const PrefixTree& tree, std::int32_t replica, TreePosition at) noexcept {
        if (policy_ == WritePolicy::kSelective) set_all(tree, replica, at, kMostUses);
    }
    /// With write-back: the pages on the path to `at` were offered to the tier. O(pages).
    void offer(const PrefixTree& tree, std::int32_t replica, TreePosition at) noexcept {
        set_all(tree, replica, at, 1);
    }
    [[nodiscard]] bool was_offered(std::int32_t replica, BlockId page) const noexcept {
        return mark(replica, page) != 0;
    }

    /// The end of the due pages: pages `first` .. end - 1 on the path to `at` are due, and end <=
    /// at.depth. O(1), with selective rules O(these pages).
    [[nodiscard]] std::int32_t end_of_due(const PrefixTree& tree, std::int32_t replica,
                                          TreePosition at, std::int32_t first) const noexcept {
        return is_selective_ && first < at.depth ? find_end(tree, replica, at, first) : at.depth;
    }

   private:
    static constexpr std::uint8_t kMostUses = std::numeric_limits<std::uint8_t>::max();

    [[nodiscard]] std::uint8_t& mark(std::int32_t replica, BlockId page) noexcept {
        return marks_[static_cast<std::size_t>(replica)][static_cast<std::size_t>(page)];
    }
    [[nodiscard]] std::uint8_t mark(std::int32_t replica, BlockId page) const noexcept {
        return marks_[static_cast<std::size_t>(replica)][static_cast<std::size_t>(page)];
    }
    void set_all(const PrefixTree& tree, std::int32_t replica, TreePosition at,
                 std::uint8_t value) noexcept;
    [[nodiscard]] std::int32_t find_end(const PrefixTree& tree, std::int32_t replica,
                                        TreePosition at, std::int32_t first) const noexcept;

    friend struct CacheManagerProbe;  // in tests, to compare whole states

    WritePolicy policy_;
    bool is_selective_;
    std::uint8_t threshold_;
    std::int32_t min_priority_;
    std::vector<std::vector<std::uint8_t>> marks_;
};

}  // namespace kvcore
