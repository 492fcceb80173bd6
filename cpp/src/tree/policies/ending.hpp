// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

#include "tree/policies/ranked.hpp"

namespace kvcore {

/// A ranked policy whose runs have a part of their worth up to a time.
///
/// `Rank` is as for RankedPolicy, and also has:
///     ending(run)               the time when that part ends; kNoEnding if it does not end
///     is_over(time, now)        true if a part that ends at `time` has ended
///     end(run)                  the part has ended
///
/// Owns: the ranks, and the runs with an ending, in the order of their endings.
/// Invariant: a run is in the second heap under ending(its run), unless that is kNoEnding.
/// Cost: O(log runs) per verb, and for each ending.
template <class Rank>
class EndingPolicy : public RankedPolicy<Rank> {
   public:
    using RankedPolicy<Rank>::RankedPolicy;

    void make_room(NodeId last) override {
        RankedPolicy<Rank>::make_room(last);
        endings_.make_room(last);
    }
    void split(NodeId upper, NodeId lower) noexcept override {
        RankedPolicy<Rank>::split(upper, lower);
        changed(upper);
    }
    void erase(NodeId node) noexcept override {
        endings_.erase(node);
        RankedPolicy<Rank>::erase(node);
    }
    void advance(std::int64_t now) noexcept override {
        now_ = now;
        for (NodeId node = endings_.first(); node != kNoNode && is_over(endings_.first_key());
             node = endings_.first()) {
            this->rank_.end(this->runs_[node]);
            changed(node);
        }
    }

   protected:
    /// Moves a run to its new places, after its worth has changed.
    void changed(NodeId node) noexcept {
        const std::int64_t time = this->rank_.ending(this->runs_[node]);
        if (time == Rank::kNoEnding) {
            endings_.erase(node);
        } else {
            endings_.put(node, time);
        }
        this->move(node);
    }
    [[nodiscard]] bool is_over(std::int64_t time) const noexcept {
        return this->rank_.is_over(time, now_);
    }

   private:
    IndexedHeap<std::int64_t> endings_;
    std::int64_t now_ = std::numeric_limits<std::int64_t>::min();
};

}  // namespace kvcore
