// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "support/request.hpp"

namespace oracle {

/// A page with its id, shared by all its holders: forks, or the cache. -1: not known yet.
using Own = std::shared_ptr<BlockId>;

struct CachedPage {
    Digest key = 0;     // of all tokens up to the page's end
    Digest before = 0;  // of the tokens before the page
    CachedPage* parent = nullptr;
    std::vector<TokenId> tokens;
    std::string name_space;
    BlockId id = 0;
    Own page;
    std::int64_t depth = 1;  // number of pages in the prefix that ends with it
    std::int64_t children = 0;
    std::int64_t holders = 0;  // sequences, pins and copies that hold it or a page below
    std::uint64_t stamp = 0;   // time of its last release
};

inline std::int64_t depth_of(const CachedPage* page) { return page == nullptr ? 0 : page->depth; }

/// All tokens up to the end of `page`.
inline std::vector<TokenId> tokens_to(const CachedPage* page) {
    std::vector<TokenId> tokens;
    for (; page != nullptr; page = page->parent) {
        tokens.insert(tokens.begin(), page->tokens.begin(), page->tokens.end());
    }
    return tokens;
}
/// Ids of the pages up to and including `page`.
inline std::vector<BlockId> ids_to(const CachedPage* page) {
    std::vector<BlockId> ids(static_cast<std::size_t>(depth_of(page)));
    for (; page != nullptr; page = page->parent) item(ids, page->depth - 1) = page->id;
    return ids;
}

/// Return the ancestor that ends the first `depth` pages.
inline CachedPage* up_to(CachedPage* page, std::int64_t depth) {
    while (depth_of(page) > depth) page = page->parent;
    return page;
}

/// Protect the prefix that ends with `page`.
inline void hold(CachedPage* page) {
    for (; page != nullptr; page = page->parent) ++page->holders;
}
/// Undo one `hold`.
inline void drop(CachedPage* page) {
    for (; page != nullptr; page = page->parent) --page->holders;
}

/// The cached pages of one replica, without any order: every query looks at all of them.
class Cache {
   public:
    explicit Cache(std::int32_t page_size) : page_size_(page_size) {}

    [[nodiscard]] const std::unordered_map<Digest, CachedPage>& pages() const { return pages_; }
    [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(pages_.size()); }

    /// The number of pages without a holder, except the pages on the paths to `at` and `source`.
    [[nodiscard]] std::int64_t num_evictable(const CachedPage* at = nullptr,
                                             const CachedPage* source = nullptr) const {
        std::int64_t evictable = 0;
        for (const auto& entry : pages_) evictable += entry.second.holders == 0 ? 1 : 0;
        for (; at != nullptr; at = at->parent) evictable -= at->holders == 0 ? 1 : 0;
        return evictable - (source != nullptr && source->holders == 0 ? 1 : 0);
    }

    /// Return the page that ends the longest cached prefix of the first `n` tokens.
    [[nodiscard]] CachedPage* match(const Request& request, std::int64_t n) {
        CachedPage* at = nullptr;
        for (std::int64_t end = page_size_; end <= n; end += page_size_) {
            const auto found = pages_.find(request.digest(end));
            if (found == pages_.end()) break;
            at = &found->second;
        }
        return at;
    }

    /// Find all pages that continue the first `depth` pages by the most tokens. Return the number
    /// of these tokens.
    std::int64_t find_sources(const Request& request, std::int64_t depth,
                              std::vector<CachedPage*>& sources) {
        const std::int64_t whole = depth * page_size_;
        const std::int64_t limit =
            std::min<std::int64_t>(request.end() - 1 - whole, page_size_ - 1);
        std::int64_t longest = 0;
        for (auto& entry : pages_) {
            CachedPage& page = entry.second;
            if (page.before != request.digest(whole)) continue;
            std::int64_t common = 0;
            while (common < limit &&
                   item(page.tokens, common) == item(request.tokens(), whole + common)) {
                ++common;
            }
            if (common == 0 || common < longest) continue;
            if (common > longest) sources.clear();
            longest = common;
            sources.push_back(&page);
        }
        return longest;
    }

    /// Return the page with the tokens of `column` below `parent`. If it is not cached, insert it
    /// with `id`.
    CachedPage* enter(const Request& request, CachedPage* parent, std::int64_t column, BlockId id) {
        const Digest key = request.digest((column + 1) * page_size_);
        const auto [place, is_new] = pages_.try_emplace(key);
        CachedPage& page = place->second;
        if (!is_new) return &page;
        const auto begin =
            request.tokens().begin() + static_cast<std::ptrdiff_t>(column * page_size_);
        page.key = key;
        page.before = request.digest(column * page_size_);
        page.parent = parent;
        page.tokens.assign(begin, begin + page_size_);
        page.name_space = request.name_space();
        page.id = id;
        page.depth = column + 1;
        if (parent != nullptr) ++parent->children;
        return &page;
    }

    /// Evict the least recently released page that has no holder and no child. Return its id.
    BlockId evict(const CachedPage* spared) {
        CachedPage* victim = nullptr;
        for (auto& entry : pages_) {
            CachedPage& page = entry.second;
            if (page.holders > 0 || page.children > 0 || &page == spared) continue;
            if (victim == nullptr || page.stamp < victim->stamp) victim = &page;
        }
        CHECK(victim != nullptr);
        if (victim->parent != nullptr) --victim->parent->children;
        const BlockId id = victim->id;
        pages_.erase(Digest{victim->key});
        return id;
    }

    /// Evict all pages without a holder. Return their number.
    std::int64_t reset() {
        for (auto& entry : pages_) {
            const CachedPage& page = entry.second;
            if (page.holders == 0 && page.parent != nullptr) --page.parent->children;
        }
        const std::int64_t before = size();
        for (auto it = pages_.begin(); it != pages_.end();) {
            it = it->second.holders == 0 ? pages_.erase(it) : std::next(it);
        }
        return before - size();
    }

   private:
    std::int64_t page_size_;
    std::unordered_map<Digest, CachedPage> pages_;  // addresses are stable
};

}  // namespace oracle
