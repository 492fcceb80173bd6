// SPDX-License-Identifier: Apache-2.0
// Sequences with a common past: fork and truncate. Who shares what is in shared_prefixes.cpp.
#include <algorithm>
#include <stdexcept>

#include "kvcore/errors.hpp"
#include "manager/admission.hpp"

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

// A copy on the list into a page that forks hold is owed to each of them, should the others go
// first. Next to the original: what comes behind it on the list may read the page, or write over
// the source. There is room.
void CacheManager::inherit_copies(SequenceHandle parent, SequenceHandle child) noexcept {
    const std::vector<BlockId>& pages = sequences_.find(child)->pages;
    for (std::size_t i = 0; i < listed_copies_.size(); ++i) {
        PageCopy copy = listed_copies_[i];
        if (copy.sequence != parent ||
            std::find(pages.begin(), pages.end(), copy.destination) == pages.end()) {
            continue;
        }
        copy.sequence = child;
        listed_copies_.insert(listed_copies_.begin() + static_cast<std::ptrdiff_t>(++i), copy);
    }
}

/// Children that are being made: given back unless all of them are.
class CacheManager::Brood {
   public:
    Brood(CacheManager& manager, const Sequence& parent, std::int64_t written,
          std::int64_t num_children)
        : manager_(manager),
          replica_(manager.replica_at(parent.replica)),
          num_pages_(static_cast<std::int32_t>(ceil_div(written, manager.config_.page_size))) {
        handles_.reserve(static_cast<std::size_t>(num_children));
        if (num_pages_ == 0) return;
        const std::int32_t committed = std::min(parent.committed, num_pages_);
        place_ = TreePin(replica_.tree, replica_.tree.split({parent.node, committed}));
    }
    Brood(const Brood&) = delete;
    Brood& operator=(const Brood&) = delete;
    ~Brood() {
        for (const SequenceHandle handle : handles_) manager_.sequences_.release(handle);
    }

    /// Claims a child with memory for its rows. Sequences may move.
    void add(std::int32_t replica, SequenceHandle parent) {
        handles_.push_back(manager_.sequences_.claim(replica));
        Sequence& child = manager_.sequences_.at(handles_.back());
        const Sequence& source = manager_.sequences_.at(parent);
        child.pages.reserve(static_cast<std::size_t>(num_pages_));
        child.kept.reserve(source.kept.size());
    }
    [[nodiscard]] const std::vector<SequenceHandle>& handles() const noexcept { return handles_; }

    /// The first pages of the parent's row for each child: the tree's are pinned once more, the
    /// others counted.
    void adopt_pages(Sequence& parent) noexcept {
        for (const SequenceHandle handle : handles_) {
            Sequence& child = *manager_.sequences_.find(handle);
            ++replica_.num_sequences;
            if (num_pages_ == 0) continue;
            child.pages.assign(parent.pages.begin(), parent.pages.begin() + num_pages_);
            child.committed = std::min(parent.committed, num_pages_);
            child.node = place_.node();
            replica_.tree.pin(child.node);
            child.kept.assign(
                parent.kept.begin(),
                std::lower_bound(parent.kept.begin(), parent.kept.end(), child.committed));
            for (const std::int32_t column : child.kept) {
                replica_.pool.share(&child.pages[static_cast<std::size_t>(column)], 1);
            }
            replica_.pool.share(child.pages.data() + child.committed, num_pages_ - child.committed);
            child.frozen = num_pages_;
            parent.frozen = std::max(parent.frozen, num_pages_);
            child.reuse = parent.reuse = Reuse::kSealed;
        }
    }
    void keep() noexcept { handles_.clear(); }

   private:
    CacheManager& manager_;
    Replica& replica_;
    std::int32_t num_pages_;
    TreePin place_;  // where the children's committed prefix ends
    std::vector<SequenceHandle> handles_;
};

void CacheManager::fork(const RequestView& parent, const RequestBatch& children) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Sequence& source = sequences_.at(parent.sequence);
    const std::int32_t index = source.replica;
    if (!has_legal_indices(parent)) refuse_indices(parent, -1);  // no row of the children
    if (source.num_pending > 0) refuse_pending(-1);
    const std::int64_t written = std::min(source.written, parent.start);
    check_children(parent, written, children);
    const Replica& replica = replica_at(index);
    if (replica.num_sequences + children.size() > config_.max_sequences) {
        throw CapacityError(detail::concat(
            "replica ", index, " has ", replica.num_sequences, " of ", config_.max_sequences,
            " sequences, ", children.size(), " forks do not fit; release some first"));
    }
    Brood brood(*this, source, written, children.size());
    for (std::int64_t i = 0; i < children.size(); ++i) brood.add(index, parent.sequence);
    prune_copies();
    make_room(listed_copies_, listed_copies_.size() * static_cast<std::size_t>(children.size()));
    // Nothing below can fail.
    brood.adopt_pages(*sequences_.find(parent.sequence));
    for (std::int64_t i = 0; i < children.size(); ++i) {
        const SequenceHandle handle = brood.handles()[static_cast<std::size_t>(i)];
        inherit_copies(parent.sequence, handle);
        Sequence& child = *sequences_.find(handle);
        child.written = child.counted_end = child.counted_from = written;
        child.count_epoch = count_epoch_;
        RequestView& view = children[i];
        view.sequence = handle;
        view.start = written;
        if (view.active <= written) view.active = view.end;
    }
    brood.keep();
}

// A fork that let go of a page of this sequence may still copy it, or have to once more. What it
// reads is not written again in place, should the sequence go back that far.
void CacheManager::freeze_read_pages(Sequence& sequence, std::int64_t start) const noexcept {
    const auto first = static_cast<std::int32_t>(start / config_.page_size);
    for (const Ledger::Copy& copy : ledger_->copies) {
        if (copy.copy.replica != sequence.replica || !copy.source.is_reference()) continue;
        for (std::int32_t c = std::max(first, sequence.frozen); c < sequence.num_pages(); ++c) {
            const bool is_it = sequence.pages[static_cast<std::size_t>(c)] == copy.copy.source;
            const std::int64_t kept = start - std::int64_t{c} * config_.page_size;
            if (is_it && copy.copy.num_tokens > kept) sequence.frozen = c + 1;
        }
    }
}

void CacheManager::truncate(SequenceHandle handle, std::int64_t n) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Sequence& sequence = sequences_.at(handle);
    if (sequence.num_pending > 0) refuse_pending(-1);
    // Several steps of one fetch write behind what it counted.
    const std::int64_t most =
        sequence.is_sealed() ? std::max(sequence.counted_end, sequence.written) : 0;
    if (n < 0 || n > most) {
        throw std::invalid_argument(detail::concat("cannot be truncated to ", n,
                                                   " tokens, must be 0 .. ", most,
                                                   ", the end of what was fetched last"));
    }
    const auto pages = static_cast<std::int32_t>(ceil_div(n, config_.page_size));
    if (pages < sequence.num_pages()) {
        Replica& replica = replica_at(sequence.replica);
        CutPlaces cut = find_cut(replica, sequence, pages);
        forget_copies(handle, sequence, pages);
        drop_columns(replica, sequence, pages);
        move_back(replica, sequence, pages, cut);
        sequence.frozen = std::min(sequence.frozen, pages);
    }
    freeze_read_pages(sequence, n);
    sequence.written = std::min(sequence.written, n);
}

}  // namespace kvcore
