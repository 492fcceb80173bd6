// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "cache/validate_requests.hpp"
#include "cache/verbs.hpp"
#include "kvcore/errors.hpp"

namespace kvcore::verbs {
namespace {

void check_children(const RequestView& parent, std::int64_t written, const RequestBatch& children) {
    const TokenId* end = parent.tokens + written;
    for (std::int64_t i = 0; i < children.size(); ++i) {
        const RequestView& child = children[i];
        if (child.end <= written) {
            throw InRow<std::invalid_argument>(
                i, detail::concat("a fork has ", child.end, " tokens, must have more than the ",
                                  written, " tokens that its parent has written"));
        }
        const TokenId* differs = std::mismatch(parent.tokens, end, child.tokens).first;
        if (differs != end) {
            throw InRow<std::invalid_argument>(
                i, detail::concat(
                       "token ", differs - parent.tokens,
                       " of a fork, or an extra key that starts at it, differs from its parent's; "
                       "a fork must begin with the ",
                       written, " tokens that its parent has written"));
        }
        if (child.name_space != parent.name_space) {
            throw InRow<std::invalid_argument>(i,
                                               "a fork has another namespace than its parent; "
                                               "give it the same extra_key and cache_salt");
        }
    }
}

/// Children that are being made; they are released unless all of them are made.
class Children {
   public:
    Children(CacheData& state, const Sequence& parent, std::int64_t written,
             std::int64_t num_children)
        : cache_(state),
          home_(state.home_of(parent)),
          num_pages_(static_cast<std::int32_t>(ceil_div(written, state.config.page_size))) {
        handles_.reserve(static_cast<std::size_t>(num_children));
        if (num_pages_ == 0) return;
        const std::int32_t committed = std::min(parent.pages.committed(), num_pages_);
        place_ = TreePin(home_.tree, home_.tree.split({parent.pages.node(), committed}));
    }
    Children(const Children&) = delete;
    Children& operator=(const Children&) = delete;
    ~Children() {
        for (const SequenceHandle handle : handles_) cache_.sequences.release(handle);
    }

    /// Claims a child with memory for its rows. Sequences may move.
    void add(std::int32_t replica, SequenceHandle parent) {
        handles_.push_back(cache_.sequences.claim(replica));
        cache_.counts.begin(handles_.back());
        if (cache_.misses != nullptr) cache_.misses->begin(handles_.back());
        if (cache_.advice != nullptr) cache_.advice->begin(handles_.back());
        cache_.windows.make_room(handles_.back());
        if (!cache_.config.quotas.empty()) cache_.tenants.make_room(handles_.back());
        cache_.states.begin(handles_.back());
        Sequence& child = cache_.sequences.at(handles_.back());
        child.pages.make_room_to_share(cache_.sequences.at(parent).pages, num_pages_);
    }
    [[nodiscard]] const std::vector<SequenceHandle>& handles() noexcept { return handles_; }

    /// Gives each child the first pages of the parent's row.
    void adopt_pages(Sequence& parent, SequenceHandle parent_handle) noexcept {
        for (const SequenceHandle handle : handles_) {
            ++home_.num_sequences;
            if (num_pages_ == 0) continue;
            Sequence& child = *cache_.sequences.find(handle);
            child.pages.share(home_.pool, parent.pages, num_pages_,
                              TreePin(home_.tree, place_.node()));
            child.reuse = parent.reuse = Reuse::kSealed;
            if (cache_.advice != nullptr) {
                cache_.advice->share(child, parent_handle, handle, num_pages_);
            }
            cache_.windows.share(home_, parent_handle, handle, child.pages);
        }
    }
    void keep() noexcept { handles_.clear(); }

   private:
    CacheData& cache_;
    Replica& home_;
    std::int32_t num_pages_;
    TreePin place_;  // where the children's committed prefix ends
    std::vector<SequenceHandle> handles_;
};

void require_room(const CacheData& cache, std::int32_t replica, std::int64_t num_children) {
    const std::int64_t claimed = cache.replica_at(replica).num_sequences;
    if (claimed + num_children <= cache.config.max_sequences) return;
    throw CapacityError(detail::concat("replica ", replica, " has ", claimed, " of ",
                                       cache.config.max_sequences, " sequences, ", num_children,
                                       " forks do not fit; release some first"));
}

// Finds the state that the children begin with: the parent's state, or a checkpoint at the same
// token. Checks that all children get a slot.
StateHold find_parent_state(const CacheData& cache, const RequestView& parent,
                            const Sequence& source, std::int64_t written,
                            std::int64_t num_children) {
    if (!cache.has_states || written == 0) return {};
    Replica& home = cache.home_of(source);
    const RecurrentState& row = cache.states.of(parent.sequence);
    StateHold found;
    if (row.at == written && row.run == written) {
        found = StateHold(*home.states, row.slot);
    } else if (row.kept_at == written && cache.states.has_kept(row)) {
        found = StateHold(*home.states, row.kept);
    } else {
        found = home.hold_state({source.pages.node(), source.pages.committed()}, written);
    }
    if (!found) {
        throw InRow<std::invalid_argument>(
            -1,  // no child's row
            detail::concat("a fork begins with ", written, " written tokens, but the parent's ",
                           "state is that of token ", row.run, "; fork it between step and fetch"));
    }
    const std::int64_t available = home.states->num_available();
    if (available >= num_children) return found;
    throw CapacityError(detail::concat("replica ", source.replica, " has ", available, " of ",
                                       cache.config.num_state_slots, " state slots left, ",
                                       num_children, " forks do not fit; release some first"));
}

void copy_state(CacheData& cache, const StateHold& source, SequenceHandle parent,
                RequestView& child, Transfers* transfers) {
    const Sequence& sequence = *cache.sequences.find(child.sequence);
    RecurrentSlots& states = *cache.home_of(sequence).states;
    RecurrentState& row = cache.states.of(child.sequence);
    row.slot = states.take();
    row.prompt_end = cache.states.prompt_end(child.end);
    cache.states.set_back(child.sequence, child.start);
    const SequenceHandle from = states.is_checkpoint(source.slot()) ? SequenceHandle() : parent;
    cache.ledger.state_copies.add({sequence.replica, source.slot(), row.slot}, from, child.sequence,
                                  transfers);
}

}  // namespace

void fork(CacheData& cache, const RequestView& parent, const RequestBatch& children,
          Transfers* transfers) {
    if (transfers != nullptr) rules::require_transfers(cache, transfers);
    const Sequence& source = cache.sequences.at(parent.sequence);
    const std::int32_t replica = source.replica;
    if (!rules::has_legal_indices(parent)) rules::refuse_indices(parent, -1);  // no child's row
    if (source.num_pending > 0) rules::refuse_pending(-1);
    const std::int64_t written = std::min(source.written, parent.start);
    rules::require_windows(cache, source, written, parent.sequence, -1);
    check_children(parent, written, children);
    require_room(cache, replica, children.size());
    const StateHold state = find_parent_state(cache, parent, source, written, children.size());
    const auto num_copies = static_cast<std::size_t>(state ? children.size() : 0);
    if (num_copies > 0) cache.ledger.state_copies.make_room(num_copies, transfers);
    Children made(cache, source, written, children.size());
    for (std::int64_t i = 0; i < children.size(); ++i) made.add(replica, parent.sequence);
    cache.ledger.copy_list.make_room_for_heirs(static_cast<std::size_t>(children.size()));
    // Nothing below can fail.
    made.adopt_pages(*cache.sequences.find(parent.sequence), parent.sequence);
    for (std::int64_t i = 0; i < children.size(); ++i) {
        const SequenceHandle handle = made.handles()[static_cast<std::size_t>(i)];
        Sequence& child = *cache.sequences.find(handle);
        cache.ledger.copy_list.inherit(parent.sequence, handle, child.pages);
        child.written = written;
        cache.tenants.set(handle, cache.tenants.of(parent.sequence));
        RequestView& view = children[i];
        cache.counts.begin_fork(handle, child, written, view.end);
        view.sequence = handle;
        view.start = written;
        // With more than the next token, a child has a prompt of its own; the next turn begins at
        // its end.
        if (view.end > written + 1) {
            cache.windows.set_prompt(handle, view.end);
        }
        if (view.active <= written) view.active = view.end;
        if (state) copy_state(cache, state, parent.sequence, view, transfers);
    }
    made.keep();
}

}  // namespace kvcore::verbs
