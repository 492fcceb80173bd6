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
#include "support/make_room.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

/// Runs of a tree that may end where no hit can: of those the last pages go before all that can
/// serve one. Where layers keep a state, also where the checkpoints are.
///
///     run     [ . . . c . . c . . . . ]      c: a page with a checkpoint at its end
///                           |<----->|        nobody hits here: useless, once nobody holds the run
///                                            and nothing follows it
///
/// Where a tier below keeps checkpoints too, one that was in a run may be there still, and a hit
/// end there without the device's. So the last place of a run that had one counts as if it had it
/// yet.
///
/// A run is suspected when something happened that may have made it useless: the last of its users
/// let go, the last run behind it went, or a checkpoint of it. It is judged when it is its turn.
///
/// Owns: the order in which that happened to runs, their checkpoints. Invariant: where layers keep
/// a state, a useless run that can go is among those; else one that lost the window at its end.
/// Threads: none of its own. Cost: O(1) per verb, and that of judging a run once each time that it
/// was condemned; the verbs that make room alone ask for memory.
class UselessRuns {
   public:
    /// One run more, by its id. Throws std::bad_alloc.
    void make_room_for_run() {
        make_room(nodes_, 1);
        checkpoints_.make_room_for_run();
        nodes_.emplace_back();
    }
    [[nodiscard]] std::size_t num_runs() const noexcept { return nodes_.size(); }
    /// In all. Throws std::bad_alloc.
    void make_room_for_checkpoints(std::size_t n) {
        while (checkpoints_.num_marks() <= n) checkpoints_.make_room_for_mark();
    }

    /// The run may be useless, as from now on, whatever was known of it: it is to be judged.
    void suspect(NodeId run) noexcept {
        pardon(run);
        condemn(run, 0, kUnjudged);
    }
    /// Its pages behind `legal`, the last place where a hit can end, serve none; `judged`: a number
    /// of the caller's, from 0 on, for when that was found.
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

    /// There are some to judge, or judged: else nothing is useless.
    [[nodiscard]] bool has_condemned() const noexcept { return first_ != kNoNode; }

    /// Pages at the end of a run.
    struct Part {
        TreeNode* run = nullptr;  // none
        std::int64_t pages = 0;
    };
    /// What goes first of `tree`: of the first run that ends where no hit can, and can go itself,
    /// all behind where one can. `judge(run)` says where that is; what was found at another time
    /// than `now` is not so any more.
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

    /// A tier below keeps checkpoints, too.
    void assume_tier() noexcept { has_tier_ = true; }
    /// With such a tier: a hit ended there.
    void note_hit(TreePosition at) noexcept {
        if (!has_tier_) return;
        Node& run = nodes_[PrefixTree::position(at.node, at.depth).node->id];
        run.below = std::max(run.below, at.depth);
    }
    /// A checkpoint in a run, by its number from 0 on.
    void mark(std::size_t checkpoint, TreePosition at) noexcept {
        checkpoints_.put_by_depth(static_cast<RunMarks::Mark>(checkpoint + 1), at);
    }
    /// It is gone: perhaps the run ends where no hit can from now on.
    void unmark(std::size_t checkpoint) noexcept {
        const auto mark = static_cast<RunMarks::Mark>(checkpoint + 1);
        const auto [run, depth] = checkpoints_.at(mark);
        if (run == nullptr) return;
        checkpoints_.take_out(mark);
        if (depth <= run->end()) note_hit({run, depth});
        if (run->num_children == 0 && run->pins == 0) suspect(run->id);
    }
    /// The last place of a run with a checkpoint that `is_legal(depth)`; 0: there is none.
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
    /// Where the first checkpoint is behind a column on the way to `end`; 0: there is none. O(runs
    /// and checkpoints behind it).
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
    /// The run is gone. Its checkpoints go with its pages.
    void erase(NodeId run) noexcept {
        pardon(run);
        nodes_[run].below = 0;
        while (checkpoints_.first(run) != 0) checkpoints_.take_out(checkpoints_.first(run));
    }

   private:
    static constexpr std::int64_t kUnjudged = -1;

    struct Node {
        NodeId before = kNoNode;  // of those condemned
        NodeId behind = kNoNode;
        std::int32_t legal = 0;  // the last place in front of its end where a hit can end
        std::int32_t below = 0;  // where a tier may have a checkpoint; 0: nowhere
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
    RunMarks checkpoints_;  // those of a run: further on the later they were put there
};

}  // namespace kvcore
