// SPDX-License-Identifier: Apache-2.0
#include "groups/window_policy.hpp"

#include "kvcore/errors.hpp"
#include "support/make_room.hpp"

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
    // What was made before it failed serves the next time.
    if (ends_.num_runs() == last) ends_.make_room_for_run();
    if (useless_.num_runs() == last) useless_.make_room_for_run();
    runs_.push_back({take_id({last, true}), false});
}

void WindowPolicy::make_room_for_departures(std::size_t n) {
    while (departures_.size() <= n) {  // the first is none
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

WindowPolicy::Departure WindowPolicy::begin(TreePosition end, std::uint32_t moment) noexcept {
    TreeNode* run = PrefixTree::position(end.node, end.depth).node;
    Departure known = ends_.last(run->id);
    for (; known != 0 && departures_[known].moment == moment; known = ends_.before(known)) {
        if (ends_.at(known).depth == end.depth) return known;
    }
    if (free_ == 0) return 0;
    detail::require_law(!run->is_root(), "columns: what is kept ends in a run");
    const Departure departure = free_;
    Left& left = departures_[departure];
    free_ = left.next_free;
    --num_free_;
    left.moment = moment;
    ends_.put(departure, {run, end.depth});
    policy_->split(left.id, id(run->id));
    policy_->release(left.id, ++clock_);
    return departure;
}

// Withdrawn, not erased: nothing was evicted that could come back.
void WindowPolicy::end(Departure departure) noexcept {
    ends_.take_out(departure);
    if (departures_[departure].is_aside) {
        take_back(departure);
    } else {
        policy_->withdraw(departures_[departure].id);
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

void WindowPolicy::set_aside(Departure departure) noexcept {
    Left& left = departures_[departure];
    policy_->withdraw(left.id);
    left.is_aside = true;
    left.below = top_;
    left.above = 0;
    (top_ != 0 ? departures_[top_].above : bottom_) = departure;
    top_ = departure;
}

void WindowPolicy::take_back(Departure departure) noexcept {
    Left& left = departures_[departure];
    left.is_aside = false;
    (left.above != 0 ? departures_[left.above].below : top_) = left.below;
    (left.below != 0 ? departures_[left.below].above : bottom_) = left.above;
}

// The last one first: where a policy puts what is offered in front of all others, they stand as
// they did.
void WindowPolicy::put_back() noexcept {
    while (top_ != 0) {
        const Departure departure = top_;
        take_back(departure);
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
        set_aside(owner.number);
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

// ---- what happens to runs

// Windows stay in front of what they are used with.
void WindowPolicy::hit(NodeId node) noexcept {
    useless_.pardon(node);
    if (!interest_.hits) return;
    for (Departure d = ends_.first(node); d != 0; d = ends_.behind(d)) {
        policy_->hit(departures_[d].id);
    }
    policy_->hit(id(node));
}

void WindowPolicy::retain(NodeId node, const Retention& retention) noexcept {
    policy_->retain(id(node), retention);
    for (Departure d = ends_.first(node); d != 0; d = ends_.behind(d)) {
        policy_->retain(departures_[d].id, retention);
    }
}

// Behind `split`, the upper half is told of first: what ended in it goes with it.
void WindowPolicy::resize(NodeId node, std::int32_t depth, std::int32_t pages) noexcept {
    if (cut_ != kNoNode) {
        const NodeId lower = std::exchange(cut_, kNoNode);
        ends_.cut(lower, depth);
        useless_.cut(node, lower, depth);
    }
    if (interest_.sizes) policy_->resize(id(node), depth, pages);
}

// What ended in it ends from now on where that leaves off.
void WindowPolicy::erase(NodeId node) noexcept {
    useless_.erase(node);
    while (ends_.first(node) != 0) ends_.move_up(ends_.first(node));
    policy_->erase(id(node));
}

}  // namespace kvcore
