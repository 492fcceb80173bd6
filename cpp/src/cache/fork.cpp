// SPDX-License-Identifier: Apache-2.0
#include "cache/fork.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "cache/validate_requests.hpp"
#include "kvcore/errors.hpp"

namespace kvcore {
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

}  // namespace

/// Children that are being made; they are released unless all of them are made.
class Forker::Brood {
   public:
    Brood(CacheData& state, const Sequence& parent, std::int64_t written, std::int64_t num_children)
        : state_(state),
          home_(state.home_of(parent)),
          num_pages_(static_cast<std::int32_t>(ceil_div(written, state.config.page_size))) {
        handles_.reserve(static_cast<std::size_t>(num_children));
        if (num_pages_ == 0) return;
        const std::int32_t committed = std::min(parent.pages.committed(), num_pages_);
        place_ = TreePin(home_.tree, home_.tree.split({parent.pages.node(), committed}));
    }
    Brood(const Brood&) = delete;
    Brood& operator=(const Brood&) = delete;
    ~Brood() {
        for (const SequenceHandle handle : handles_) state_.sequences.release(handle);
    }

    /// Claims a child with memory for its rows. Sequences may move.
    void add(std::int32_t replica, SequenceHandle parent) {
        handles_.push_back(state_.sequences.claim(replica));
        state_.counts.begin(handles_.back());
        state_.windows.make_room(handles_.back());
        if (!state_.config.quotas.empty()) state_.tenants.make_room(handles_.back());
        state_.states.begin(handles_.back());
        Sequence& child = state_.sequences.at(handles_.back());
        child.pages.make_room_to_share(state_.sequences.at(parent).pages, num_pages_);
    }
    [[nodiscard]] const std::vector<SequenceHandle>& handles() const noexcept { return handles_; }

    /// Gives each child the first pages of the parent's row.
    void adopt_pages(Sequence& parent, SequenceHandle parent_handle) noexcept {
        for (const SequenceHandle handle : handles_) {
            ++home_.num_sequences;
            if (num_pages_ == 0) continue;
            Sequence& child = *state_.sequences.find(handle);
            child.pages.share(home_.pool, parent.pages, num_pages_,
                              TreePin(home_.tree, place_.node()));
            child.reuse = parent.reuse = Reuse::kSealed;
            state_.windows.share(home_, parent_handle, handle, child.pages);
        }
    }
    void keep() noexcept { handles_.clear(); }

   private:
    CacheData& state_;
    Replica& home_;
    std::int32_t num_pages_;
    TreePin place_;  // where the children's committed prefix ends
    std::vector<SequenceHandle> handles_;
};

void Forker::require_room(std::int32_t replica, std::int64_t num_children) const {
    const std::int64_t claimed = state_.replica_at(replica).num_sequences;
    if (claimed + num_children <= state_.config.max_sequences) return;
    throw CapacityError(detail::concat("replica ", replica, " has ", claimed, " of ",
                                       state_.config.max_sequences, " sequences, ", num_children,
                                       " forks do not fit; release some first"));
}

// Finds the state that the children begin with: the parent's state, or a checkpoint at the same
// token. Checks that all children get a slot.
StateHold Forker::find_state(const RequestView& parent, const Sequence& source,
                             std::int64_t written, std::int64_t num_children) const {
    if (!state_.states.exist() || written == 0) return {};
    Replica& home = state_.home_of(source);
    const RecurrentState& row = state_.states.of(parent.sequence);
    StateHold found;
    if (row.at == written && row.run == written) {
        found = StateHold(*home.states, row.slot);
    } else if (row.kept_at == written && state_.states.has_kept(row)) {
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
                                       state_.config.num_state_slots, " state slots left, ",
                                       num_children, " forks do not fit; release some first"));
}

void Forker::copy_state(const StateHold& source, SequenceHandle parent, RequestView& child,
                        Transfers* transfers) {
    const Sequence& sequence = *state_.sequences.find(child.sequence);
    RecurrentSlots& states = *state_.home_of(sequence).states;
    RecurrentState& row = state_.states.of(child.sequence);
    row.slot = states.take();
    row.prompt_end = state_.states.prompt_end(child.end);
    state_.states.set_back(child.sequence, child.start);
    const SequenceHandle from = states.is_checkpoint(source.slot()) ? SequenceHandle() : parent;
    state_.state_copies.add({sequence.replica, source.slot(), row.slot}, from, child.sequence,
                            transfers);
}

void Forker::fork(const RequestView& parent, const RequestBatch& children, Transfers* transfers) {
    if (transfers != nullptr) rules::require_transfers(state_, transfers);
    const Sequence& source = state_.sequences.at(parent.sequence);
    const std::int32_t replica = source.replica;
    if (!rules::has_legal_indices(parent)) rules::refuse_indices(parent, -1);  // no child's row
    if (source.num_pending > 0) rules::refuse_pending(-1);
    const std::int64_t written = std::min(source.written, parent.start);
    rules::require_windows(state_, source, written, parent.sequence, -1);
    check_children(parent, written, children);
    require_room(replica, children.size());
    const StateHold state = find_state(parent, source, written, children.size());
    const auto num_copies = static_cast<std::size_t>(state ? children.size() : 0);
    if (num_copies > 0) state_.state_copies.make_room(num_copies, transfers);
    Brood brood(state_, source, written, children.size());
    for (std::int64_t i = 0; i < children.size(); ++i) brood.add(replica, parent.sequence);
    state_.copy_list.make_room_for_heirs(static_cast<std::size_t>(children.size()));
    // Nothing below can fail.
    brood.adopt_pages(*state_.sequences.find(parent.sequence), parent.sequence);
    for (std::int64_t i = 0; i < children.size(); ++i) {
        const SequenceHandle handle = brood.handles()[static_cast<std::size_t>(i)];
        Sequence& child = *state_.sequences.find(handle);
        state_.copy_list.inherit(parent.sequence, handle, child.pages);
        child.written = written;
        state_.tenants.set(handle, state_.tenants.of(parent.sequence));
        RequestView& view = children[i];
        state_.counts.begin_fork(handle, child, written, view.end);
        view.sequence = handle;
        view.start = written;
        // With more than the next token, a child has a prompt of its own; the next turn begins at
        // its end.
        if (view.end > written + 1) state_.windows.set_prompt(handle, view.end);
        if (view.active <= written) view.active = view.end;
        if (state) copy_state(state, parent.sequence, view, transfers);
    }
    brood.keep();
}

}  // namespace kvcore
