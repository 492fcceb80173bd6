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
    if (last < nodes_.size()) return;
    kvcore::make_room(nodes_, 1);
    Node node;
    node.id = take_id({last, true});
    nodes_.push_back(node);
}

void WindowPolicy::make_room_for_departures(std::size_t n) {
    while (departures_.size() <= n) {  // the first is none
        kvcore::make_room(departures_, 1);
        const auto departure = static_cast<Departure>(departures_.size());
        Left left;
        left.id = take_id({departure, false});
        departures_.push_back(left);
        recycle(departure);
    }
}

// ---- departures

WindowPolicy::Departure WindowPolicy::begin(TreePosition end, std::uint32_t moment) noexcept {
    TreeNode* run = PrefixTree::position(end.node, end.depth).node;
    Departure known = nodes_[run->id].last;
    for (; known != 0 && departures_[known].moment == moment; known = departures_[known].before) {
        if (departures_[known].depth == end.depth) return known;
    }
    if (free_ == 0) return 0;
    detail::require_law(!run->is_root(), "columns: what is kept ends in a run");
    const Departure departure = free_;
    Left& left = departures_[departure];
    free_ = left.behind;
    --num_free_;
    left.depth = end.depth;
    left.moment = moment;
    link(departure, run);
    policy_->split(left.id, id(run->id));
    policy_->release(left.id, ++clock_);
    return departure;
}

// Withdrawn, not erased: nothing was evicted that could come back.
void WindowPolicy::end(Departure departure) noexcept {
    unlink(departure);
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
    left.behind = free_;
    free_ = departure;
    ++num_free_;
}

void WindowPolicy::link(Departure departure, TreeNode* run) noexcept {
    Node& node = nodes_[run->id];
    Left& left = departures_[departure];
    left.run = run;
    left.before = node.last;
    left.behind = 0;
    (node.last != 0 ? departures_[node.last].behind : node.first) = departure;
    node.last = departure;
}

void WindowPolicy::unlink(Departure departure) noexcept {
    Left& left = departures_[departure];
    if (left.run == nullptr) return;
    Node& node = nodes_[left.run->id];
    (left.before != 0 ? departures_[left.before].behind : node.first) = left.behind;
    (left.behind != 0 ? departures_[left.behind].before : node.last) = left.before;
    left.run = nullptr;
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
    if (!stops_ && first_ != kNoNode) return first_;
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

// ---- condemned runs

void WindowPolicy::condemn(TreeNode* run, std::int32_t legal, std::int64_t judged) noexcept {
    Node& node = nodes_[run->id];
    const bool is_new = node.condemned.run == nullptr;
    node.condemned = {run, legal, judged};
    if (!is_new) return;
    node.before = last_;
    node.behind = kNoNode;
    (last_ != kNoNode ? nodes_[last_].behind : first_) = run->id;
    last_ = run->id;
}

void WindowPolicy::pardon(NodeId run) noexcept {
    Node& node = nodes_[run];
    if (node.condemned.run == nullptr) return;
    node.condemned = {};
    (node.before != kNoNode ? nodes_[node.before].behind : first_) = node.behind;
    (node.behind != kNoNode ? nodes_[node.behind].before : last_) = node.before;
}

// ---- what happens to runs

// Windows stay in front of what they are used with.
void WindowPolicy::hit(NodeId node) noexcept {
    pardon(node);
    if (!interest_.hits) return;
    for (Departure d = nodes_[node].first; d != 0; d = departures_[d].behind) {
        policy_->hit(departures_[d].id);
    }
    policy_->hit(id(node));
}

void WindowPolicy::retain(NodeId node, const Retention& retention) noexcept {
    policy_->retain(id(node), retention);
    for (Departure d = nodes_[node].first; d != 0; d = departures_[d].behind) {
        policy_->retain(departures_[d].id, retention);
    }
}

// Behind `split`, the upper half is told of first: what ended in it goes with it.
void WindowPolicy::resize(NodeId node, std::int32_t depth, std::int32_t pages) noexcept {
    if (cut_ != kNoNode) {
        Departure next = nodes_[std::exchange(cut_, kNoNode)].first;
        while (next != 0) {
            const Departure departure = next;
            next = departures_[departure].behind;
            if (departures_[departure].depth > depth) continue;
            TreeNode* upper = departures_[departure].run->parent;
            unlink(departure);
            link(departure, upper);
        }
    }
    if (interest_.sizes) policy_->resize(id(node), depth, pages);
}

// What ended in it ends from now on where that leaves off.
void WindowPolicy::erase(NodeId node) noexcept {
    pardon(node);
    while (nodes_[node].first != 0) {
        const Departure departure = nodes_[node].first;
        TreeNode* parent = departures_[departure].run->parent;
        unlink(departure);
        if (!parent->is_root()) link(departure, parent);
    }
    policy_->erase(id(node));
}

}  // namespace kvcore
