// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/eviction.hpp"
#include "kvcore/prefix_tree.hpp"
#include "support/memory.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

/// Marks at places in the runs of a tree; the owner numbers the marks. Stores the run and depth of
/// each mark, and the marks of each run in the order in which they were added. The owner reports
/// here when a run is cut or evicted.
///
/// Owns: two numbers per run, a record per mark. Invariant: a mark is in at most one run.
/// Threads: no locks of its own. Cost: O(1), or O(marks of the run) when a run is cut or evicted;
/// only the methods that make room allocate.
class RunMarks {
   public:
    /// The number of a mark; 0: no mark.
    using Mark = std::uint32_t;

    /// Makes room for one more run id. Throws std::bad_alloc.
    void make_room_for_run() {
        make_room(runs_, 1);
        runs_.emplace_back();
    }
    /// Makes room for one more mark. Throws std::bad_alloc.
    void make_room_for_mark() {
        make_room(marks_, 1);
        marks_.emplace_back();
    }
    [[nodiscard]] std::size_t num_runs() const noexcept { return runs_.size(); }
    [[nodiscard]] std::size_t num_marks() const noexcept { return marks_.size(); }
    /// The first and the last mark of a run; 0: no mark.
    [[nodiscard]] Mark first(NodeId run) const noexcept { return runs_[run].first; }
    [[nodiscard]] Mark last(NodeId run) const noexcept { return runs_[run].last; }
    [[nodiscard]] Mark before(Mark mark) const noexcept { return marks_[mark].before; }
    [[nodiscard]] Mark behind(Mark mark) const noexcept { return marks_[mark].behind; }
    /// The run of a mark and its depth in pages; no node if the mark is in no run.
    [[nodiscard]] TreePosition at(Mark mark) const noexcept {
        return {marks_[mark].run, marks_[mark].depth};
    }

    /// Adds a mark that is in no run.
    void put(Mark mark, TreePosition at) noexcept {
        Ends& run = runs_[at.node->id];
        marks_[mark] = {at.node, at.depth, run.last, 0};
        (run.last != 0 ? marks_[run.last].behind : run.first) = mark;
        run.last = mark;
    }
    /// As `put`, for a run whose marks are ordered by depth. O(marks after it).
    void put_by_depth(Mark mark, TreePosition at) noexcept {
        Ends& run = runs_[at.node->id];
        Mark front = run.last;
        while (front != 0 && marks_[front].depth > at.depth) front = marks_[front].before;
        const Mark next = front != 0 ? marks_[front].behind : run.first;
        marks_[mark] = {at.node, at.depth, front, next};
        (front != 0 ? marks_[front].behind : run.first) = mark;
        (next != 0 ? marks_[next].before : run.last) = mark;
    }
    void take_out(Mark mark) noexcept {
        Place& place = marks_[mark];
        if (place.run == nullptr) return;
        Ends& run = runs_[place.run->id];
        (place.before != 0 ? marks_[place.before].behind : run.first) = place.behind;
        (place.behind != 0 ? marks_[place.behind].before : run.last) = place.before;
        place.run = nullptr;
    }
    /// The run was cut `depth` pages below the root: marks up to that depth move to the upper half,
    /// which is now the parent.
    void cut(NodeId lower, std::int32_t depth) noexcept {
        for (Mark mark = first(lower), next = 0; mark != 0; mark = next) {
            next = behind(mark);
            if (marks_[mark].depth <= depth) move_up(mark);
        }
    }
    /// Moves a mark to the parent of its run; removes it if the parent is a root.
    void move_up(Mark mark) noexcept {
        const TreePosition place = at(mark);
        take_out(mark);
        if (!place.node->parent->is_root()) put(mark, {place.node->parent, place.depth});
    }

   private:
    struct Ends {
        Mark first = 0;
        Mark last = 0;
    };
    struct Place {
        TreeNode* run = nullptr;
        std::int32_t depth = 0;
        Mark before = 0;  // in the same run
        Mark behind = 0;
    };

    std::vector<Ends> runs_;
    std::vector<Place> marks_ = std::vector<Place>(1);
};

}  // namespace kvcore
