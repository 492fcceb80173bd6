// SPDX-License-Identifier: Apache-2.0
#include "layers/window_policy.hpp"

#include "support/memory.hpp"

namespace kvcore {

NodeId WindowPolicy::take_id(Owner owner) {
    const auto id = static_cast<NodeId>(owners_.size());
    kvcore::make_room(owners_, 1);
    policy_->make_room(id);
    owners_.push_back(owner);
    return id;
}

void WindowPolicy::make_room(NodeId last) {
    if (last < runs_.size()) return;
    kvcore::make_room(runs_, 1);
    // After a failure, the next call uses the room that was made before.
    if (ends_.num_runs() == last) ends_.make_room_for_run();
    if (unreachable_.num_runs() == last) unreachable_.make_room_for_run();
    runs_.push_back({take_id({last, true}), false});
}

void WindowPolicy::make_room_for_departures(std::size_t n) {
    while (departures_.size() <= n) {  // number 0 is no departure
        kvcore::make_room(departures_, 1);
        const auto departure = static_cast<Departure>(departures_.size());
        if (ends_.num_marks() == departure) ends_.make_room_for_mark();
        Left left;
        left.id = take_id({departure, false});
        departures_.push_back(left);
        recycle(departure);
    }
}

// ---- departures

WindowPolicy::Departure WindowPolicy::begin(TreePosition end, std::uint32_t moment,
                                            bool is_spare) noexcept {
    TreeNode* run = PrefixTree::position(end.node, end.depth).node;
    Departure known = ends_.last(run->id);
    for (; known != 0 && departures_[known].moment == moment; known = ends_.before(known)) {
        const bool is_same = (departures_[known].place == Place::kSpare) == is_spare;
        if (is_same && ends_.at(known).depth == end.depth) return known;
    }
    if (free_ == 0 || run->is_root()) return 0;
    const Departure departure = free_;
    Left& left = departures_[departure];
    free_ = left.next_free;
    --num_free_;
    left.moment = moment;
    ends_.put(departure, {run, end.depth});
    if (is_spare) {
        put_on(spare_, departure, Place::kSpare);
        return departure;
    }
    policy_->split(left.id, id(run->id));
    policy_->release(left.id, ++clock_);
    return departure;
}

// Calls `withdraw`, not `erase`: a departure is not a run that may come back, so the wrapped policy
// must not remember it as evicted.
void WindowPolicy::end(Departure departure) noexcept {
    ends_.take_out(departure);
    switch (departures_[departure].place) {
        case Place::kOrdered:
            policy_->withdraw(departures_[departure].id);
            break;
        case Place::kAside:
            take_off(aside_, departure);
            break;
        case Place::kSpare:
            take_off(spare_, departure);
            break;
    }
    recycle(departure);
}

void WindowPolicy::recycle(Departure departure) noexcept {
    Left& left = departures_[departure];
    const NodeId id = left.id;
    left = {};
    left.id = id;
    left.next_free = free_;
    free_ = departure;
    ++num_free_;
}

void WindowPolicy::put_on(Pile& pile, Departure departure, Place place) noexcept {
    Left& left = departures_[departure];
    left.place = place;
    left.below = pile.top;
    left.above = 0;
    (pile.top != 0 ? departures_[pile.top].above : pile.bottom) = departure;
    pile.top = departure;
}

void WindowPolicy::take_off(Pile& pile, Departure departure) noexcept {
    Left& left = departures_[departure];
    left.place = Place::kOrdered;
    (left.below != 0 ? departures_[left.below].above : pile.bottom) = left.above;
    (left.above != 0 ? departures_[left.above].below : pile.top) = left.below;
}

// Offers the last departure first: a policy that puts offered runs before all others restores the
// order of the departures.
void WindowPolicy::put_back() noexcept {
    while (aside_.top != 0) {
        const Departure departure = aside_.top;
        take_off(aside_, departure);
        policy_->offer(departures_[departure].id);
    }
}

WindowPolicy::Departure WindowPolicy::next(PrefixTree& tree) noexcept {
    put_back();
    stops_ = true;
    const NodeId run = tree.victim();
    stops_ = false;
    if (run != kNoNode) return 0;
    const NodeId first = policy_->victim();
    return first == kNoNode ? 0 : owners_[first].number;
}

NodeId WindowPolicy::victim() noexcept {
    if (aim_ != kNoNode) return aim_;
    for (;;) {
        const NodeId victim = policy_->victim();
        if (victim == kNoNode) return kNoNode;
        const Owner owner = owners_[victim];
        if (owner.is_run) return owner.number;
        if (stops_) return kNoNode;
        policy_->withdraw(victim);
        put_on(aside_, owner.number, Place::kAside);
    }
}

std::size_t WindowPolicy::upcoming(NodeId* out, std::size_t n) const noexcept {
    const std::size_t found = policy_->upcoming(out, n);
    std::size_t runs = 0;
    for (std::size_t i = 0; i < found; ++i) {
        const Owner owner = owners_[out[i]];
        if (owner.is_run) out[runs++] = owner.number;
    }
    return runs;
}

// ---- events of runs

// Hits windows before their run, so windows stay before the run in the order.
void WindowPolicy::hit(NodeId node) noexcept {
    unreachable_.pardon(node);
    if (!interest_.hits) return;
    for (Departure d = ends_.first(node); d != 0; d = ends_.behind(d)) {
        if (departures_[d].place != Place::kSpare) policy_->hit(departures_[d].id);
    }
    policy_->hit(id(node));
}

void WindowPolicy::retain(NodeId node, const Retention& retention) noexcept {
    policy_->retain(id(node), retention);
    for (Departure d = ends_.first(node); d != 0; d = ends_.behind(d)) {
        if (departures_[d].place == Place::kSpare) continue;
        policy_->retain(departures_[d].id, retention);
    }
}

void WindowPolicy::expect(NodeId node, std::int64_t returns, bool is_shared) noexcept {
    policy_->expect(id(node), returns, is_shared);
    for (Departure d = ends_.first(node); d != 0; d = ends_.behind(d)) {
        if (departures_[d].place == Place::kSpare) continue;
        policy_->expect(departures_[d].id, returns, is_shared);
    }
}

// After `split`, the tree calls this first for the upper half: the marks that end in it move to it.
void WindowPolicy::resize(NodeId node, std::int32_t depth, std::int32_t pages) noexcept {
    if (cut_ != kNoNode) {
        const NodeId lower = std::exchange(cut_, kNoNode);
        ends_.cut(lower, depth);
        unreachable_.cut(node, lower, depth);
    }
    if (interest_.sizes) policy_->resize(id(node), depth, pages);
}

// Departures that ended in the run end at its parent from now on.
void WindowPolicy::erase(NodeId node) noexcept {
    unreachable_.erase(node);
    while (ends_.first(node) != 0) ends_.move_up(ends_.first(node));
    policy_->erase(id(node));
}

}  // namespace kvcore
