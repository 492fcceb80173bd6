// SPDX-License-Identifier: Apache-2.0
#include "request/page_row.hpp"

#include "kvcore/errors.hpp"

namespace kvcore {

std::int32_t PageRow::find_shared(const BlockPool& pool, std::int32_t end) const {
    for (std::int32_t column = committed_; column < end; ++column) {
        if (pool.ref_count((*this)[column]) > 1) return column;
    }
    return end;
}

void PageRow::take_hit(Replica& home, TreePin place, std::int32_t columns) noexcept {
    place_ = std::move(place);
    const std::int32_t first = committed_;
    if (columns <= first) return;
    home.pool.free(pages_.data() + first, std::min(size(), columns) - first);
    if (!pages_.empty()) note_change(first);
    if (size() < columns) pages_.resize(static_cast<std::size_t>(columns));
    home.tree.copy_pages({place_.node(), columns}, first, pages_.data() + first);
    committed_ = read_only_end_ = columns;
}

TreePin PageRow::find_cut(PrefixTree& tree, std::int32_t columns) const {
    if (committed_ <= columns) return {};
    return {tree, tree.split({node(), columns})};
}

void PageRow::free_own_pages(BlockPool& pool, std::int32_t from) const noexcept {
    const auto first_duplicate =
        std::lower_bound(own_duplicates_.begin(), own_duplicates_.end(), from);
    for (auto column = first_duplicate; column != own_duplicates_.end(); ++column) {
        pool.free(&pages_[static_cast<std::size_t>(*column)], 1);
    }
    const std::int32_t first = std::max(from, committed_);
    if (first < size()) pool.free(pages_.data() + first, size() - first);
}

void PageRow::drop_own_duplicates(std::int32_t from) noexcept {
    own_duplicates_.erase(std::lower_bound(own_duplicates_.begin(), own_duplicates_.end(), from),
                          own_duplicates_.end());
}

void PageRow::drop(BlockPool& pool, std::int32_t from) noexcept {
    if (from >= size()) return;
    free_own_pages(pool, from);
    pages_.resize(static_cast<std::size_t>(from));
    drop_own_duplicates(from);
    note_change(from);
}

void PageRow::move_back(std::int32_t columns, TreePin cut) noexcept {
    committed_ = columns;
    std::swap(place_, cut);
    cut.end_use();
}

void PageRow::clear(BlockPool& pool) noexcept {
    if (!pages_.empty()) note_change(0);
    free_own_pages(pool, 0);
    pages_.clear();
    own_duplicates_.clear();
    place_.end_use();
    committed_ = read_only_end_ = 0;
    commit_limit_ = kNoLimit;
}

void PageRow::commit(PrefixTree& tree, const TokenId* tokens, std::int32_t end,
                     std::vector<DuplicatePage>& duplicates, const Retention& retention) {
    const std::int32_t first = committed_;
    TreeNode* last = tree.insert(node(), tokens + std::ptrdiff_t{first} * tree.page_size(),
                                 pages_.data() + first, end - first, duplicates, retention);
    if (last != node()) place_ = TreePin(tree, last);
    committed_ = end;
    make_read_only(end);
}

void PageRow::swap_duplicates(BlockPool& pool, std::int32_t first,
                              const std::vector<DuplicatePage>& duplicates) noexcept {
    if (duplicates.empty()) return;
    std::int32_t changed = size();
    for (const DuplicatePage& duplicate : duplicates) {
        const std::int32_t column = first + duplicate.index;
        changed = std::min(changed, column);
        BlockId& page = pages_[static_cast<std::size_t>(column)];
        pool.free(&page, 1);
        page = duplicate.cached;
    }
    note_change(changed);
}

void PageRow::entrust(BlockPool& pool, std::int32_t column, TreePin end) noexcept {
    pool.free(&pages_[static_cast<std::size_t>(column)], 1);
    place_ = std::move(end);
    for (std::int32_t c = committed_; c < column; ++c) own_duplicates_.push_back(c);
    committed_ = column + 1;
    make_read_only(committed_);
}

void PageRow::make_room_to_share(const PageRow& from, std::int32_t columns) {
    pages_.reserve(static_cast<std::size_t>(columns));
    own_duplicates_.reserve(from.own_duplicates_.size());
}

void PageRow::share(BlockPool& pool, PageRow& from, std::int32_t columns, TreePin place) noexcept {
    pages_.assign(from.pages_.begin(), from.pages_.begin() + columns);
    committed_ = std::min(from.committed_, columns);
    place_ = std::move(place);
    own_duplicates_.assign(
        from.own_duplicates_.begin(),
        std::lower_bound(from.own_duplicates_.begin(), from.own_duplicates_.end(), committed_));
    for (const std::int32_t column : own_duplicates_) {
        pool.share(&pages_[static_cast<std::size_t>(column)], 1);
    }
    pool.share(pages_.data() + committed_, columns - committed_);
    read_only_end_ = columns;
    commit_limit_ = from.commit_limit_;
    from.make_read_only(columns);
}

void PageRow::check_integrity(const PrefixTree& tree) const {
    using detail::require_law;
    require_law(committed_ <= size(), "sequence: commits pages it holds");
    require_law(read_only_end_ >= committed_ && read_only_end_ <= std::max(committed_, size()),
                "sequence: committed and shared columns are read-only");
    require_law(node() != nullptr || pages_.empty(),
                "sequence: has a place in the tree once it holds pages");
    if (node() == nullptr) return;
    require_law(
        !PrefixTree::is_forgotten(node()) || commit_limit_ <= PrefixTree::findable_depth(node()),
        "sequence: forgotten columns are beyond the commit limit");
    const std::int32_t depth = PrefixTree::depth_of(node());
    require_law(depth == committed_, "sequence: its place is the end of its columns in the tree");
    std::vector<BlockId> cached(static_cast<std::size_t>(depth));
    tree.copy_pages({node(), depth}, 0, cached.data());
    for (std::int32_t column = 0; column < depth; ++column) {
        const bool is_own_duplicate =
            std::binary_search(own_duplicates_.begin(), own_duplicates_.end(), column);
        require_law(
            (cached[static_cast<std::size_t>(column)] != (*this)[column]) == is_own_duplicate,
            "sequence: only own duplicates differ from the pages of the tree");
    }
}

}  // namespace kvcore
