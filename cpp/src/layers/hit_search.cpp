// SPDX-License-Identifier: Apache-2.0
#include "layers/hit_search.hpp"

#include <algorithm>
#include <array>

#include "tree/tree_node.hpp"

namespace kvcore {

HitSearch::HitSearch(const ColumnPages& columns, const PrefixTree& tree, const TokenId* tokens,
                     std::int64_t n) noexcept
    : columns_(columns), tree_(tree), tokens_(tokens), n_(n), page_size_(tree.page_size()) {
    for (const Grouping::Window& window : columns.grouping().windows()) {
        const bool is_chunked = window.rule.kind == GroupKind::kChunked;
        if (is_chunked && window.rule.span % page_size_ != 0) has_ends_inside_ = true;
    }
}

PrefixMatch HitSearch::longest(const PrefixMatch& found, std::int32_t fewest) const noexcept {
    const std::int64_t n = tokens_in(found.at.depth) + found.partial_tokens;
    const bool has_part = found.partial_tokens > 0;
    if (has_part && columns_.can_serve_part(found.at, found.partial, n)) return found;
    const std::int32_t whole = columns_.longest_hit(found.at);
    if (fewest > 0 && (has_part || found.at.depth != whole)) {
        PrefixMatch part{found.at, {}, 0};
        if (!has_part && part.at.depth > whole) part.at = next_branch(part.at);
        while (part.at.depth >= whole) {
            if (find_part(part, fewest)) return part;
            if (part.at.depth == 0) break;
            part.at = next_branch(part.at);
        }
    }
    return {PrefixTree::position(found.at.node, whole), {}, 0};
}

// The next position towards the root at which another column may be copied.
TreePosition HitSearch::next_branch(TreePosition at) const noexcept {
    if (has_ends_inside_) return PrefixTree::position(at.node, at.depth - 1);
    TreeNode* node = PrefixTree::position(at.node, at.depth).node;
    while (!node->parent->is_root() && node->parent->num_children == 1) node = node->parent;
    return {node->parent, node->start};
}

bool HitSearch::find_part(PrefixMatch& match, std::int32_t fewest) const noexcept {
    const std::int64_t begin = tokens_in(match.at.depth);
    const auto limit =
        static_cast<std::int32_t>(std::min<std::int64_t>(n_ - begin, page_size_ - 1));
    if (limit < fewest) return false;
    if (!has_ends_inside_ && !columns_.has_windows(match.at, begin + limit)) return false;
    std::array<PartialPage, 64> sources;
    const std::size_t n =
        tree_.find_partials(match.at, tokens_ + begin, limit, sources.data(), sources.size());
    for (std::size_t i = 0; i < n && sources[i].tokens > match.partial_tokens; ++i) {
        const std::int32_t tokens = longest_part(match.at, sources[i], fewest);
        if (tokens <= match.partial_tokens) continue;
        match.partial = sources[i].at;
        match.partial_tokens = tokens;
    }
    return match.partial_tokens > 0;
}

// A shorter part needs at least the same pages, except where a chunk ends.
std::int32_t HitSearch::longest_part(TreePosition at, const PartialPage& source,
                                     std::int32_t fewest) const noexcept {
    const std::int64_t begin = tokens_in(at.depth);
    for (std::int32_t tokens = source.tokens; tokens >= fewest; --tokens) {
        const bool may_be = tokens == source.tokens || ends_chunk(begin + tokens);
        if (may_be && columns_.can_serve_part(at, source.at, begin + tokens)) return tokens;
        if (!has_ends_inside_) break;
    }
    return 0;
}

bool HitSearch::ends_chunk(std::int64_t n) const noexcept {
    for (const Grouping::Window& window : columns_.grouping().windows()) {
        if (window.rule.kind == GroupKind::kChunked && n % window.rule.span == 0) return true;
    }
    return false;
}

}  // namespace kvcore
