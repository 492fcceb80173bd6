// SPDX-License-Identifier: Apache-2.0
#include "cache/pin.hpp"

#include <utility>

#include "kvcore/errors.hpp"
#include "level/quotas.hpp"

namespace kvcore {

PinHandle Pins::pin(Replica& home, std::string_view name_space, const TokenId* tokens,
                    std::int64_t n) {
    PrefixTree& tree = home.tree;
    TreeNode* root = tree.find_namespace(name_space);
    if (free_.empty()) {
        free_.reserve(seats_.size() + 1);  // unpin must not allocate
        seats_.emplace_back();
        free_.push_back(static_cast<std::uint32_t>(seats_.size() - 1));
    }
    TreePin place;
    WindowHold windows;
    StateHold checkpoint;
    if (root != nullptr) {
        TreePosition at = tree.match(root, tokens, n).at;
        if (home.narrows_hits()) {
            at = PrefixTree::position(at.node, home.longest_hit(at));
        }
        at = PrefixTree::position(at.node, quotas::longest_held(home, at));
        checkpoint = home.hold_state(at);
        place = TreePin(tree, tree.split(at));
        windows =
            WindowHold(home, {place.node(), at.depth}, std::int64_t{at.depth} * tree.page_size());
    }
    const std::uint32_t index = free_.back();
    free_.pop_back();
    Seat& seat = seats_[index];
    seat.place = std::move(place);
    seat.windows = std::move(windows);
    if (checkpoint) seat.checkpoint = std::move(checkpoint);
    PinHandle handle{index, seat.generation, 0};
    if (seat.place) {
        const std::int64_t depth = PrefixTree::depth_of(seat.place.node());
        handle.num_tokens = depth * tree.page_size();
        home.note_peak();
    }
    return handle;
}

void Pins::unpin(PinHandle pin) {
    if (pin.index >= seats_.size() || seats_[pin.index].generation != pin.generation) {
        throw InvalidHandleError(
            detail::concat("pin ", pin.index, " (generation ", pin.generation,
                           ") is not held: it was released before; release each pin once"));
    }
    Seat& seat = seats_[pin.index];
    ++seat.generation;
    seat.windows.reset();
    if (seat.checkpoint) {
        seat.checkpoint.end_use();
        seat.checkpoint = StateHold();
    }
    seat.place.end_use();
    if (seat.generation != 0) free_.push_back(pin.index);  // 0: used up, never taken again
}

}  // namespace kvcore
