// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvcore/eviction.hpp"
#include "kvcore/prefix_tree.hpp"
#include "layers/run_marks.hpp"
#include "support/memory.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

/// The runs of a tree that may end where no hit can end. Their last pages are evicted before all
/// pages that can serve a hit. If layers keep a state, this class also stores the checkpoints of
/// runs.
///
///     run     [ . . . c . . c . . . . ]      c: a page with a checkpoint at its end
///                           |<----->|        no hit ends in these pages: they are useless if no
///                                            holder and no later run needs the run
///
/// If a lower tier also keeps checkpoints, it may still have a checkpoint that the device dropped,
/// and a hit may end at that checkpoint. So the last place in a run that had a checkpoint counts as
/// if the checkpoint still existed.
///
/// A run is suspected after an event that may have made it useless: its last user released it, the
/// last run after it was evicted, or a checkpoint of it was dropped. It is judged when its turn
/// comes.
///
/// Owns: the order in which runs were suspected, and their checkpoints. Invariant: if layers keep a
/// state, that order has every useless run that can be evicted; otherwise it has every useless run
/// that lost the window at its end.
/// Threads: no locks of its own. Cost: O(1) per method, plus the cost of judging a run once each
/// time that it was condemned; only the methods that make room allocate.
class UnreachableTails {
   public:
    /// Makes room for one more run id. Throws std::bad_alloc.
    void make_room_for_run() {
        make_room(nodes_, 1);
        checkpoints_.make_room_for_run();
        nodes_.emplace_back();
    }
    [[nodiscard]] std::size_t num_runs() const noexcept { return nodes_.size(); }
    /// Makes room for `n` checkpoints in all. Throws std::bad_alloc.
    void make_room_for_checkpoints(std::size_t n) {
        while (checkpoints_.num_marks() <= n) checkpoints_.make_room_for_mark();
    }

    /// The run may be useless from now on: it must be judged, even if it was judged before.
    void suspect(NodeId run) noexcept {
        pardon(run);
        condemn(run, 0, kUnjudged);
    }
    /// The pages of the run after `legal`, the last depth at which a hit can end, serve no hit.
    /// `judged`: a number of the caller, 0 or higher, for the time of this result.
    void condemn(NodeId run, std::int32_t legal, std::int64_t judged) noexcept {
        Node& node = nodes_[run];
        node.legal = legal;
        node.judged = judged;
        if (node.is_condemned) return;
        node.is_condemned = true;
        node.before = last_;
        node.behind = kNoNode;
        (last_ != kNoNode ? nodes_[last_].behind : first_) = run;
        last_ = run;
    }
    void pardon(NodeId run) noexcept {
        Node& node = nodes_[run];
        if (!node.is_condemned) return;
        node.is_condemned = false;
        (node.before != kNoNode ? nodes_[node.before].behind : first_) = node.behind;
        (node.behind != kNoNode ? nodes_[node.behind].before : last_) = node.before;
    }

    /// True if a run is suspected or condemned; otherwise no run is useless.
    [[nodiscard]] bool has_condemned() const noexcept { return first_ != kNoNode; }

    /// Pages at the end of a run.
    struct Part {
        TreeNode* run = nullptr;  // nullptr: no pages
        std::int64_t pages = 0;
    };
    /// The pages of `tree` to evict first: in the first run that has useless pages and can be
    /// evicted, all pages after the last depth at which a hit can end. `judge(run)` returns that
    /// depth. A result of another time than `now` is judged again.
    template <class Judge>
    [[nodiscard]] Part next(const PrefixTree& tree, const TreeNode* guarded, std::int64_t now,
                            const Judge& judge) noexcept {
        while (first_ != kNoNode) {
            TreeNode* run = tree.run(first_);
            Node& node = nodes_[first_];
            const bool can_go = run->num_children == 0 && run->pins == 0 && run != guarded;
            if (!can_go || useless_pages(run) <= 0) {
                pardon(run->id);
            } else if (node.judged != now) {
                node.legal = judge(run);
                node.judged = now;
            } else {
                return {run, useless_pages(run)};
            }
        }
        return {};
    }

    /// Call this if a lower tier also keeps checkpoints.
    void assume_tier() noexcept { has_tier_ = true; }
    /// With a lower tier: records that a hit ended at `at`.
    void note_hit(TreePosition at) noexcept {
        if (!has_tier_) return;
        Node& run = nodes_[PrefixTree::position(at.node, at.depth).node->id];
        run.below = std::max(run.below, at.depth);
    }
    /// Adds a checkpoint to a run. `checkpoint`: its number, 0 or higher.
    void mark(std::size_t checkpoint, TreePosition at) noexcept {
        checkpoints_.put_by_depth(static_cast<RunMarks::Mark>(checkpoint + 1), at);
    }
    /// Removes a checkpoint: its run may end where no hit can end from now on.
    void unmark(std::size_t checkpoint) noexcept {
        const auto mark = static_cast<RunMarks::Mark>(checkpoint + 1);
        const auto [run, depth] = checkpoints_.at(mark);
        if (run == nullptr) return;
        checkpoints_.take_out(mark);
        if (depth <= run->end()) note_hit({run, depth});
        if (run->num_children == 0 && run->pins == 0) suspect(run->id);
    }
    /// Depth of the last checkpoint of a run for which `is_legal(depth)` is true; 0 if there is no
    /// legal checkpoint.
    template <class IsLegal>
    [[nodiscard]] std::int32_t last_checkpoint(const TreeNode* run,
                                               const IsLegal& is_legal) const noexcept {
        RunMarks::Mark mark = checkpoints_.last(run->id);
        while (mark != 0 && !is_legal(checkpoints_.at(mark).depth)) {
            mark = checkpoints_.before(mark);
        }
        const std::int32_t here = mark == 0 ? 0 : checkpoints_.at(mark).depth;
        const std::int32_t below = nodes_[run->id].below;
        return below > here && below <= run->end() && is_legal(below) ? below : here;
    }
    /// Depth of the first checkpoint after a column on the path to `end`; 0 if there is no
    /// checkpoint. O(runs and checkpoints after the column).
    [[nodiscard]] std::int32_t first_checkpoint(TreePosition end,
                                                std::int32_t column) const noexcept {
        std::int32_t first = 0;
        const TreeNode* run = PrefixTree::position(end.node, end.depth).node;
        const auto consider = [&](std::int32_t depth) {
            const bool is_nearer = first == 0 || depth < first;
            if (depth > column && depth <= end.depth && is_nearer) first = depth;
        };
        for (; run->end() > column; run = run->parent) {
            RunMarks::Mark mark = checkpoints_.last(run->id);
            for (; mark != 0 && checkpoints_.at(mark).depth > column;
                 mark = checkpoints_.before(mark)) {
                consider(checkpoints_.at(mark).depth);
            }
            consider(nodes_[run->id].below);
        }
        return first;
    }

    /// The run was cut, `depth` pages below the root.
    void cut(NodeId upper, NodeId lower, std::int32_t depth) noexcept {
        checkpoints_.cut(lower, depth);
        nodes_[upper].below = 0;
        if (nodes_[lower].below <= depth) std::swap(nodes_[upper].below, nodes_[lower].below);
    }
    /// The run was evicted. Its checkpoints leave with its pages.
    void erase(NodeId run) noexcept {
        pardon(run);
        nodes_[run].below = 0;
        while (checkpoints_.first(run) != 0) checkpoints_.take_out(checkpoints_.first(run));
    }

   private:
    static constexpr std::int64_t kUnjudged = -1;

    struct Node {
        NodeId before = kNoNode;  // in the order of condemned runs
        NodeId behind = kNoNode;
        std::int32_t legal = 0;  // the last depth at which a hit can end
        std::int32_t below = 0;  // depth of a checkpoint that a tier may have; 0: no checkpoint
        bool is_condemned = false;
        std::int64_t judged = kUnjudged;
    };

    [[nodiscard]] std::int64_t useless_pages(const TreeNode* run) const noexcept {
        return run->end() - std::max(nodes_[run->id].legal, run->start);
    }

    std::vector<Node> nodes_;
    NodeId first_ = kNoNode;
    NodeId last_ = kNoNode;
    bool has_tier_ = false;
    RunMarks checkpoints_;  // by depth in each run
};

}  // namespace kvcore
