// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "support/group_probe.hpp"

/// The rules of layer groups, token by token, slowly and without the library's code for them.
class GroupOracle {
   public:
    struct Window {
        kvcore::CacheGroup rule;
        std::int64_t first_lane = 0;
        std::int64_t lanes = 0;
    };

    explicit GroupOracle(const kvcore::CacheConfig& config)
        : tokens_(config.page_size), fewest_(config.partial_page_reuse) {
        for (const kvcore::CacheGroup& group : config.groups) {
            const std::int64_t page = group.page_size == 0 ? tokens_ : group.page_size;
            const std::int64_t lanes = tokens_ / page * group.num_bundles;
            if (group.kind == kvcore::GroupKind::kFull) {
                full_lanes += lanes;
            } else {
                windows.push_back({group, lanes_, lanes});
            }
            lanes_ += lanes;
        }
    }

    std::vector<Window> windows;
    std::int64_t full_lanes = 0;
    [[nodiscard]] std::int64_t lanes() const { return lanes_; }
    [[nodiscard]] std::int64_t columns(std::int64_t tokens) const {
        return (tokens + tokens_ - 1) / tokens_;
    }

    /// The first token that layers of a window read after `n` tokens are written.
    [[nodiscard]] static std::int64_t first_read(const Window& window, std::int64_t n) {
        if (window.rule.kind == kvcore::GroupKind::kSliding) {
            std::int64_t first = n;  // position n reads itself and the span - 1 tokens before it
            while (first > 0 && n - (first - 1) < window.rule.span) --first;
            return first;
        }
        std::int64_t first = n;
        while (first % window.rule.span != 0) --first;
        return first;
    }
    [[nodiscard]] std::int64_t first_column(std::size_t w, std::int64_t n) const {
        return first_read(windows[w], n) / tokens_;
    }
    [[nodiscard]] bool has(const CachedColumn& column, std::size_t w) const {
        return item(column.pages, windows[w].first_lane) >= 0;
    }

    /// The tree's columns of a prompt, up to the first missing column.
    [[nodiscard]] std::vector<const CachedColumn*> path(const Cached& cached,
                                                        const Request& request,
                                                        std::int64_t n) const {
        std::vector<const CachedColumn*> path;
        for (std::int64_t end = tokens_; end <= n; end += tokens_) {
            const auto found = cached.find(request.digest(end));
            if (found == cached.end()) break;
            path.push_back(&found->second);
        }
        return path;
    }
    /// Return true if a hit of `n` tokens, whose last part is copied out of `source`, has every
    /// page that layers read.
    [[nodiscard]] bool is_legal(const std::vector<const CachedColumn*>& path, std::int64_t n,
                                const CachedColumn* source) const {
        for (std::size_t w = 0; w < windows.size(); ++w) {
            // The whole column is copied, because shorter hits may be copied out of it later.
            const bool is_copied = source != nullptr && windows[w].rule.span > 1;
            if (is_copied && !has(*source, w)) return false;
            for (std::int64_t t = first_read(windows[w], n); t < n; ++t) {
                const bool is_in_source = t / tokens_ >= n / tokens_;
                const CachedColumn* column = is_in_source ? source : item(path, t / tokens_);
                if (column == nullptr || !has(*column, w)) return false;
            }
        }
        return true;
    }
    /// The number of tokens in whole pages that a prompt of `n` tokens hits.
    [[nodiscard]] std::int64_t whole_hit(const Cached& cached, const Request& request,
                                         std::int64_t n) const {
        const std::vector<const CachedColumn*> columns = path(cached, request, n);
        std::int64_t hit = count(columns) * tokens_;
        while (!is_legal(columns, hit, nullptr)) hit -= tokens_;
        return hit;
    }
    /// The same with a host tier: a page counts if the tree or a record has it.
    [[nodiscard]] std::int64_t tiered_hit(const Cached& cached, const Cached& records,
                                          const Request& request, std::int64_t n) const {
        const auto here = path(cached, request, n);
        const auto below = path(records, request, n);
        std::int64_t hit = std::max(count(here), count(below)) * tokens_;
        while (!is_served(here, below, hit)) hit -= tokens_;
        return hit;
    }
    /// The same with layers that keep a state: the hit ends at a checkpoint.
    [[nodiscard]] std::int64_t state_hit(const Cached& cached, const Cached& records,
                                         const Request& request, std::int64_t n) const {
        const auto here = path(cached, request, n);
        const auto below = path(records, request, n);
        const auto has_state = [&](std::int64_t c) {
            return (c < count(here) && item(here, c)->state >= 0) ||
                   (c < count(below) && item(below, c)->state >= 0);
        };
        std::int64_t columns = std::max(count(here), count(below));
        while (columns > 0 &&
               (!has_state(columns - 1) || !is_served(here, below, columns * tokens_))) {
            --columns;
        }
        return columns * tokens_;
    }
    /// Return true if the tree or the tier has every window page that `n` tokens read.
    [[nodiscard]] bool is_served(const std::vector<const CachedColumn*>& here,
                                 const std::vector<const CachedColumn*>& below,
                                 std::int64_t n) const {
        const auto has_page = [&](std::int64_t c, std::size_t w) {
            return (c < count(here) && has(*item(here, c), w)) ||
                   (c < count(below) && has(*item(below, c), w));
        };
        for (std::size_t w = 0; w < windows.size(); ++w) {
            for (std::int64_t t = first_read(windows[w], n); t < n; ++t) {
                if (!has_page(t / tokens_, w)) return false;
            }
        }
        return true;
    }
    /// The longest hit of a prompt of `n` tokens that ends inside a page and is longer than
    /// `whole`; 0 if there is no such hit.
    [[nodiscard]] std::int64_t part_hit(const Cached& cached, const Request& request,
                                        std::int64_t n, std::int64_t whole) const {
        const std::vector<const CachedColumn*> columns = path(cached, request, n);
        for (std::int64_t hit = n; hit > whole && fewest_ > 0; --hit) {
            const std::int64_t begin = hit / tokens_ * tokens_;
            if (hit - begin < fewest_ || begin > count(columns) * tokens_) continue;
            for (const auto& [digest, column] : cached) {
                if (column.parent != request.digest(begin)) continue;
                std::int64_t k = 0;
                while (k < hit - begin &&
                       item(column.tokens, k) == item(request.tokens(), begin + k)) {
                    ++k;
                }
                if (k == hit - begin && is_legal(columns, hit, &column)) return hit;
            }
        }
        return 0;
    }

   private:
    std::int64_t tokens_;  // of a column
    std::int64_t fewest_;
    std::int64_t lanes_ = 0;
};
