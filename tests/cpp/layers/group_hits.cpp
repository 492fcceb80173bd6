// SPDX-License-Identifier: Apache-2.0
// The longest hit with windows, for every set of pages that a small tree can hold: the search must
// find the longest legal hit of a token-by-token search.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "layers/hit_search.hpp"
#include "support/check.hpp"
#include "tree/policies/lru.hpp"

namespace tests::layers::group_hits {

using kvcore::BlockId;
using kvcore::CacheGroup;
using kvcore::ColumnPages;
using kvcore::GroupKind;
using kvcore::PrefixMatch;
using kvcore::PrefixTree;
using kvcore::TokenId;
using kvcore::TreeNode;

namespace {

using Tokens = std::vector<TokenId>;

constexpr CacheGroup kFull{GroupKind::kFull, 0, 1, 0};

CacheGroup sliding(std::int64_t window) { return {GroupKind::kSliding, window, 1, 0}; }
CacheGroup chunked(std::int64_t chunk) { return {GroupKind::kChunked, chunk, 1, 0}; }

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Prompts with a common prefix in a tree. The bits of `present` choose which columns have the
/// pages of a window.
class Scene {
   public:
    Scene(const kvcore::Grouping& grouping, const std::vector<Tokens>& prompts,
          std::uint64_t present)
        : grouping_(grouping),
          page_size_(grouping.column_tokens()),
          columns_(64),
          tree_(page_size_, make_policy()),
          pages_(grouping, 400, 0, columns_, tree_, *policy_) {
        for (const Tokens& prompt : prompts) put(prompt, present);
    }

    /// Returns the hit in tokens. `fewest` is the smallest partial hit, or 0 for no partial hit.
    [[nodiscard]] std::int64_t found(const Tokens& prompt, std::int32_t fewest) const {
        PrefixMatch match = tree_.match(root(), prompt.data(), count(prompt), fewest > 0);
        if (match.partial_tokens < fewest) {
            match.partial = {};
            match.partial_tokens = 0;
        }
        const kvcore::HitSearch search(pages_, tree_, prompt.data(), count(prompt));
        match = search.longest(match, fewest);
        const std::int64_t n = match.at.depth * page_size_ + match.partial_tokens;
        // The source of the partial hit must have the tokens that the search reports.
        BlockId source = -1;
        if (match.partial_tokens > 0) {
            CHECK_EQ(match.partial.depth, match.at.depth + 1);
            tree_.copy_pages(match.partial, match.at.depth, &source);
            CHECK(common(prompt, source, match.at.depth) >= match.partial_tokens);
        }
        CHECK(is_legal(prompt, n, source));
        return n;
    }
    /// Returns the longest hit by a search over all lengths and sources.
    [[nodiscard]] std::int64_t longest(const Tokens& prompt, std::int32_t fewest) const {
        for (std::int64_t n = count(prompt); n > 0; --n) {
            const std::int64_t tokens = n % page_size_;
            const std::int64_t whole = n / page_size_;
            if (count(path(prompt)) < whole) continue;
            if (tokens == 0 && is_legal(prompt, n, -1)) return n;
            if (tokens == 0 || fewest == 0 || tokens < fewest) continue;
            for (BlockId source = 0; source < static_cast<BlockId>(cached_.size()); ++source) {
                const bool is_there = common(prompt, source, whole) >= tokens;
                if (is_there && is_legal(prompt, n, source)) return n;
            }
        }
        return 0;
    }

   private:
    struct Cached {
        Tokens prefix;  // up to the end of the column
    };

    std::unique_ptr<kvcore::WindowPolicy> make_policy() {
        auto policy = std::make_unique<kvcore::WindowPolicy>(std::make_unique<kvcore::LruPolicy>());
        policy_ = policy.get();
        return policy;
    }
    template <class T>
    static std::int64_t count(const std::vector<T>& items) {
        return static_cast<std::int64_t>(items.size());
    }
    [[nodiscard]] TreeNode* root() const { return tree_.find_namespace(""); }
    void put(const Tokens& prompt, std::uint64_t present) {
        const std::int64_t size = count(prompt) / page_size_;
        const std::int64_t known = count(path(prompt));
        std::vector<BlockId> ids(at(size));
        for (std::int64_t c = known; c < size; ++c) {
            BlockId& id = ids[at(c)];
            CHECK(columns_.allocate(1, &id));
            CHECK_EQ(id, count(cached_));
            cached_.push_back({{prompt.begin(), prompt.begin() + (c + 1) * page_size_}});
            pages_.fill_full(id);
            for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
                const std::size_t bit = at(id) * grouping_.windows().size() + w;
                if ((present >> bit & 1) != 0) pages_.fill(id, w);
            }
        }
        std::vector<kvcore::DuplicatePage> duplicates;
        static_cast<void>(tree_.insert(root(), prompt.data(), ids.data(),
                                       static_cast<std::int32_t>(size), duplicates));
    }
    [[nodiscard]] BlockId find(const Tokens& prefix) const {
        for (std::size_t i = 0; i < cached_.size(); ++i) {
            if (cached_[i].prefix == prefix) return static_cast<BlockId>(i);
        }
        return -1;
    }
    [[nodiscard]] std::vector<BlockId> path(const Tokens& prompt) const {
        std::vector<BlockId> path;
        for (std::int64_t end = page_size_; end <= count(prompt); end += page_size_) {
            const BlockId id = find({prompt.begin(), prompt.begin() + end});
            if (id < 0) break;
            path.push_back(id);
        }
        return path;
    }
    // Returns the number of tokens that the column `source` shares with the prompt after `whole`
    // pages.
    [[nodiscard]] std::int64_t common(const Tokens& prompt, BlockId source,
                                      std::int64_t whole) const {
        const Tokens& prefix = cached_[at(source)].prefix;
        const std::int64_t begin = whole * page_size_;
        if (count(prefix) != begin + page_size_) return 0;
        const auto differs =
            std::mismatch(prefix.begin(), prefix.end(), prompt.begin(), prompt.end()).first;
        return std::max<std::int64_t>(0, differs - prefix.begin() - begin);
    }
    [[nodiscard]] bool is_legal(const Tokens& prompt, std::int64_t n, BlockId source) const {
        std::vector<BlockId> columns = path(prompt);
        columns.resize(at(n / page_size_));
        if (n % page_size_ != 0) columns.push_back(source);
        for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
            const CacheGroup& rule = grouping_.windows()[w].rule;
            // The whole source page is copied, so later hits that are shorter can copy from it.
            const bool is_copied = n % page_size_ != 0 && rule.span > 1;
            if (is_copied && !pages_.has(source, w)) return false;
            for (std::int64_t t = 0; t < n; ++t) {
                const bool is_read = rule.kind == GroupKind::kSliding
                                         ? n - t < rule.span
                                         : t / rule.span == n / rule.span;
                if (is_read && !pages_.has(columns[at(t / page_size_)], w)) return false;
            }
        }
        return true;
    }

    const kvcore::Grouping& grouping_;
    std::int32_t page_size_;
    kvcore::WindowPolicy* policy_ = nullptr;
    kvcore::BlockPool columns_;
    PrefixTree tree_;
    ColumnPages pages_;
    std::vector<Cached> cached_;  // by column id
};

// A prompt, and other prompts that leave it in the columns `branches` after some common tokens.
struct Shape {
    std::int32_t page_size;
    std::int32_t columns;
    std::vector<std::pair<std::int32_t, std::int32_t>> branches;  // column, tokens

    [[nodiscard]] Tokens trunk() const {
        Tokens tokens;
        for (std::int32_t t = 0; t < columns * page_size; ++t) tokens.push_back(t);
        return tokens;
    }
    [[nodiscard]] std::vector<Tokens> prompts() const {
        std::vector<Tokens> prompts{trunk()};
        TokenId other = 1000;
        for (const auto& [column, tokens] : branches) {
            Tokens prompt = trunk();
            prompt.resize(at(std::int64_t{column + 1} * page_size));
            for (std::int32_t t = tokens; t < page_size; ++t) {
                prompt[at(std::int64_t{column} * page_size + t)] = other++;
            }
            prompts.push_back(prompt);
        }
        return prompts;
    }
    [[nodiscard]] std::size_t num_columns() const { return at(columns) + branches.size(); }
};

std::int64_t search_all(const std::vector<CacheGroup>& groups, const Shape& shape) {
    const kvcore::Grouping grouping(shape.page_size, groups);
    const std::size_t bits = shape.num_columns() * grouping.windows().size();
    std::int64_t searched = 0;
    for (std::uint64_t present = 0; present < std::uint64_t{1} << bits; ++present) {
        const Scene scene(grouping, shape.prompts(), present);
        for (const Tokens& prompt : shape.prompts()) {
            for (std::size_t n = 1; n <= prompt.size() + 1; ++n) {
                Tokens asked = prompt;
                asked.resize(n, -1);
                for (const std::int32_t fewest : {0, 1, 2}) {
                    const std::int64_t found = scene.found(asked, fewest);
                    const std::int64_t longest = scene.longest(asked, fewest);
                    if (found != longest) {
                        check::note = "present " + std::to_string(present) + ", tokens " +
                                      std::to_string(n) + ", fewest " + std::to_string(fewest);
                    }
                    CHECK_EQ(found, longest);
                    ++searched;
                }
            }
        }
    }
    return searched;
}

TEST(the_longest_hit_is_found) {
    const std::vector<std::vector<CacheGroup>> one = {
        {kFull, sliding(1)},  {kFull, sliding(2)},  {kFull, sliding(4)}, {kFull, sliding(6)},
        {kFull, sliding(40)}, {kFull, chunked(3)},  {kFull, chunked(4)}, {kFull, chunked(5)},
        {sliding(3)},         {kFull, chunked(40)}, {chunked(7)},
    };
    std::int64_t searched = 0;
    for (const auto& groups : one) {
        searched += search_all(groups, {2, 6, {{3, 1}}});
        searched += search_all(groups, {3, 4, {{1, 2}, {3, 2}, {3, 1}}});
        searched += search_all(groups, {4, 3, {{0, 3}, {2, 3}, {2, 1}}});
    }
    const std::vector<std::vector<CacheGroup>> two = {
        {kFull, sliding(3), sliding(6)},
        {kFull, chunked(5), sliding(4)},
        {chunked(3), sliding(5)},
    };
    for (const auto& groups : two) searched += search_all(groups, {3, 3, {{2, 2}, {2, 1}}});
    std::printf("%lld hits\n", static_cast<long long>(searched));
}

// Many pages continue a prefix. If the page with the longest common part lacks a window page, the
// search takes another page with an equal part.
TEST(large_families) {
    for (const std::int32_t lacking : {0, 1, 5, 30}) {
        const kvcore::Grouping grouping(4, {kFull, sliding(4)});
        std::vector<Tokens> prompts;
        for (TokenId t = 0; t < 40; ++t) prompts.push_back({1, 2, 3, t});
        for (TokenId t = 0; t < 20; ++t) prompts.push_back({1, 2, 50 + t, 0});
        for (TokenId t = 0; t < 20; ++t) prompts.push_back({1, 70 + t, 0, 0});
        // The bits draw columns 0 .. 63: the first columns, with the longest common parts, lack
        // their window pages.
        const std::uint64_t present = ~std::uint64_t{0} << lacking;
        prompts.resize(60);
        const Scene scene(grouping, prompts, present);
        CHECK_EQ(scene.found({1, 2, 3, 99}, 1), scene.longest({1, 2, 3, 99}, 1));
        CHECK_EQ(scene.found({1, 2, 3, 99}, 1), 3);
        const Scene none(grouping, prompts, ~std::uint64_t{0} << 40);
        CHECK_EQ(none.found({1, 2, 3, 99}, 1), 2);
        CHECK_EQ(none.found({1, 2, 49, 99}, 1), 2);
        CHECK_EQ(none.found({1, 1, 49, 99}, 1), 1);
        CHECK_EQ(none.found({2, 1, 49, 99}, 1), 0);
    }
}

}  // namespace

}  // namespace tests::layers::group_hits
