// SPDX-License-Identifier: Apache-2.0
// Sequences with a common past: fork and truncate. Who shares what is in shared_prefixes.cpp.
#include <algorithm>
#include <stdexcept>

#include "kvcore/cache_manager.hpp"
#include "kvcore/errors.hpp"

namespace kvcore {

void CacheManager::check_children(const RequestView& parent, std::int64_t written,
                                  const RequestBatch& children) {
    const TokenId* end = parent.tokens + written;
    for (std::int64_t i = 0; i < children.size(); ++i) {
        const RequestView& child = children[i];
        if (child.end <= written) {
            throw InRow<std::invalid_argument>(
                i, detail::concat("a fork with ", child.end, " tokens, must have more than the ",
                                  written, " that its parent has written"));
        }
        const TokenId* differs = std::mismatch(parent.tokens, end, child.tokens).first;
        if (differs != end) {
            throw InRow<std::invalid_argument>(
                i, detail::concat("token ", differs - parent.tokens,
                                  " of a fork is not its parent's; it must begin with the ",
                                  written, " tokens that its parent has written"));
        }
        if (child.name_space != parent.name_space) {
            throw InRow<std::invalid_argument>(i,
                                               "a fork is of another namespace than its parent; "
                                               "give it the same extra_key and cache_salt");
        }
    }
}

// The first pages of a row for another one: the tree's are pinned once more, the others counted.
void CacheManager::adopt_pages(Replica& replica, Sequence& parent, Sequence& child,
                               std::int32_t num_pages) {
    if (num_pages == 0) return;
    child.pages.assign(parent.pages.begin(), parent.pages.begin() + num_pages);
    child.committed = std::min(parent.committed, num_pages);
    child.node = replica.tree.split({parent.node, child.committed});
    replica.tree.pin(child.node);
    child.kept.assign(parent.kept.begin(),
                      std::lower_bound(parent.kept.begin(), parent.kept.end(), child.committed));
    for (const std::int32_t column : child.kept) {
        replica.pool.share(&child.pages[static_cast<std::size_t>(column)], 1);
    }
    replica.pool.share(child.pages.data() + child.committed, num_pages - child.committed);
    child.frozen = num_pages;
    parent.frozen = std::max(parent.frozen, num_pages);
    child.is_sealed = parent.is_sealed = true;
}

// A copy still owed to a page that forks hold is owed to each of them, should the others go first.
// Next to the original: what comes behind it on the list may read the page, or write over the
// source.
void CacheManager::inherit_copies(SequenceHandle parent, SequenceHandle child) {
    prune_copies();
    const std::vector<BlockId>& pages = sequences_.at(child).pages;
    for (std::size_t i = 0; i < owed_copies_.size(); ++i) {
        PageCopy copy = owed_copies_[i];
        if (copy.sequence != parent ||
            std::find(pages.begin(), pages.end(), copy.destination) == pages.end()) {
            continue;
        }
        copy.sequence = child;
        owed_copies_.insert(owed_copies_.begin() + static_cast<std::ptrdiff_t>(++i), copy);
    }
}

void CacheManager::fork(const RequestView& parent, const RequestBatch& children) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Sequence& source = sequences_.at(parent.sequence);
    const std::int32_t index = source.replica;
    if (!has_legal_indices(parent)) refuse_indices(parent, -1);  // no row of the children
    const std::int64_t written = std::min(source.written, parent.start);
    check_children(parent, written, children);
    Replica& replica = replica_at(index);
    if (replica.num_sequences + children.size() > config_.max_sequences) {
        throw CapacityError(detail::concat(
            "replica ", index, " has ", replica.num_sequences, " of ", config_.max_sequences,
            " sequences, ", children.size(), " forks do not fit; release some first"));
    }
    const auto num_pages = static_cast<std::int32_t>(ceil_div(written, config_.page_size));
    for (std::int64_t i = 0; i < children.size(); ++i) {
        const SequenceHandle handle = sequences_.claim(index);
        ++replica.num_sequences;
        Sequence& child = sequences_.at(handle);
        adopt_pages(replica, sequences_.at(parent.sequence), child, num_pages);
        inherit_copies(parent.sequence, handle);
        child.written = child.counted_end = child.counted_from = written;
        child.count_epoch = count_epoch_;
        RequestView& view = children[i];
        view.sequence = handle;
        view.start = written;
        if (view.active <= written) view.active = view.end;
    }
}

// A page that forks have begun was filled and committed by one of them. It is the tree's now, which
// would evict it: so the others, and copies under way, hold it there, as a committed page of which
// they have a part. O(sequences), once for such a page.
void CacheManager::entrust_to_tree(const Sequence& sequence, std::int32_t column) {
    Replica& replica = replica_at(sequence.replica);
    const BlockId page = sequence.pages[static_cast<std::size_t>(column)];
    TreeNode* end = replica.tree.split({sequence.node, column + 1});
    const SequenceTable::Slots live = sequences_.live();
    for (Sequence* other = live.data; other != live.data + live.size; ++other) {
        const bool holds = other->replica == sequence.replica && other->committed == column &&
                           other->num_pages() > column &&
                           other->pages[static_cast<std::size_t>(column)] == page;
        if (!holds) continue;
        replica.pool.free(&page, 1);
        replica.tree.pin(end);
        replica.tree.unpin(other->node, false);
        other->node = end;
        other->committed = column + 1;
    }
    for (PageCopy& copy : held_sources_) {
        if (copy.replica != sequence.replica || copy.source != page) continue;
        replica.pool.free(&page, 1);
        replica.tree.pin(end);
        copy.held = end;
    }
}

// Copies into pages that are given up; whoever gets those next must not find them written.
void CacheManager::forget_copies(SequenceHandle handle, const Sequence& sequence,
                                 std::int32_t from) {
    const auto is_dropped = [&](const PageCopy& copy) {
        return copy.sequence == handle &&
               std::find(sequence.pages.begin() + from, sequence.pages.end(), copy.destination) !=
                   sequence.pages.end();
    };
    owed_copies_.erase(std::remove_if(owed_copies_.begin(), owed_copies_.end(), is_dropped),
                       owed_copies_.end());
}

void CacheManager::truncate(SequenceHandle handle, std::int64_t n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Sequence& sequence = sequences_.at(handle);
    // Several steps of one fetch write behind what it counted.
    const std::int64_t most =
        sequence.is_sealed ? std::max(sequence.counted_end, sequence.written) : 0;
    if (n < 0 || n > most) {
        throw std::invalid_argument(detail::concat("cannot be truncated to ", n,
                                                   " tokens, must be 0 .. ", most,
                                                   ", the end of what was fetched last"));
    }
    const auto pages = static_cast<std::int32_t>(ceil_div(n, config_.page_size));
    if (pages < sequence.num_pages()) {
        Replica& replica = replica_at(sequence.replica);
        forget_copies(handle, sequence, pages);
        drop_columns(replica, sequence, pages);
        move_back(replica, sequence, pages);
        sequence.frozen = std::min(sequence.frozen, pages);
    }
    sequence.written = std::min(sequence.written, n);
}

}  // namespace kvcore
