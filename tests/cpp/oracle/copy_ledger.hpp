// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

#include "fakes/simulated_memory.hpp"

/// The page copies that a manager owes: the expected copies, the reported copies, and their
/// execution.
class CopyLedger {
   public:
    /// `at_once`: a call returns its own copies; otherwise take_copies returns them.
    CopyLedger(kvcore::CacheManager& manager, SimulatedMemory& memory, bool at_once)
        : manager_(manager), memory_(memory), at_once_(at_once) {}

    [[nodiscard]] bool at_once() const { return at_once_; }

    /// A call begins: pass the result as its `transfers` argument.
    kvcore::Transfers* begin() {
        drawn_.clear();
        transfers_.clear();
        has_drawn_ = false;
        return at_once_ ? &transfers_ : nullptr;
    }
    /// Return true if the current call must make a copy at once.
    [[nodiscard]] bool waits() const { return at_once_ && !expected_.empty(); }
    /// The last copy that the current call owes to `sequence`; nullptr: no copy.
    const kvcore::PageMove* find(kvcore::SequenceHandle sequence) {
        draw();
        const kvcore::PageMove* last = nullptr;
        for (const kvcore::PageMove& copy : drawn_) {
            if (copy.sequence == sequence) last = &copy;
        }
        return last;
    }
    /// Expect this copy from the call.
    void expect(const kvcore::PageMove& copy) { expected_.push_back(copy); }
    /// The call has ended: compare its copies with the expected copies. Immediate copies are made
    /// now.
    void end() {
        if (at_once_) draw();
        if (!has_drawn_) return;
        check_drawn();
        if (at_once_) {
            CHECK_EQ(transfers_.empty(), drawn_.empty());
            for (const kvcore::PageMove& copy : drawn_) memory_.copy(copy);
            if (!transfers_.empty()) manager_.finish(transfers_.ticket);
        } else {
            taken_.insert(taken_.end(), drawn_.begin(), drawn_.end());
        }
        expected_.clear();
        has_drawn_ = false;
    }

    /// Before a release: the manager owes no copy to the sequence any more.
    void forget(kvcore::SequenceHandle sequence) {
        forget_if([&](const kvcore::PageMove& copy) { return copy.sequence == sequence; });
    }
    /// After a truncation that dropped the pages `gone`: no copy to these pages is owed any more.
    void forget(kvcore::SequenceHandle sequence, const std::vector<BlockId>& gone) {
        forget_if([&](const kvcore::PageMove& copy) {
            return copy.sequence == sequence && has(gone, copy.destination);
        });
    }
    /// A fork has these pages: copies that are owed to its parent are also owed to the fork.
    void inherit(kvcore::SequenceHandle parent, kvcore::SequenceHandle child,
                 const std::vector<BlockId>& pages) {
        for (std::int64_t i = 0; i < count(expected_); ++i) {
            kvcore::PageMove copy = item(expected_, i);
            if (!(copy.sequence == parent) || !has(pages, copy.destination)) continue;
            copy.sequence = child;
            expected_.insert(expected_.begin() + static_cast<std::ptrdiff_t>(++i), copy);
        }
    }
    /// Take the owed copies without making them.
    void take() {
        if (at_once_) return;
        begin();
        draw();
        end();
    }
    /// Make all owed copies in their order, as an engine must do before the next kernels run.
    void do_copies() {
        take();
        for (const kvcore::PageMove& copy : taken_) memory_.copy(copy);
        taken_.clear();
    }

   private:
    using Copies = std::vector<kvcore::PageMove>;

    void draw() {
        if (!has_drawn_) drawn_ = at_once_ ? transfers_.copies : manager_.take_copies();
        has_drawn_ = true;
    }
    static bool has(const std::vector<BlockId>& pages, BlockId page) {
        return std::find(pages.begin(), pages.end(), page) != pages.end();
    }
    template <class Predicate>
    void forget_if(Predicate is_gone) {
        expected_.erase(std::remove_if(expected_.begin(), expected_.end(), is_gone),
                        expected_.end());
    }
    // A copy to a page that several sequences hold is reported once.
    void check_drawn() {
        expected_.erase(std::unique(expected_.begin(), expected_.end()), expected_.end());
        CHECK_EQ(drawn_.size(), expected_.size());
        for (std::size_t i = 0; i < drawn_.size(); ++i) {
            CHECK(drawn_[i].sequence == expected_[i].sequence);
            CHECK_EQ(drawn_[i].replica, expected_[i].replica);
            CHECK_EQ(drawn_[i].source, expected_[i].source);
            CHECK_EQ(drawn_[i].destination, expected_[i].destination);
            CHECK_EQ(drawn_[i].num_tokens, expected_[i].num_tokens);
        }
    }

    kvcore::CacheManager& manager_;
    SimulatedMemory& memory_;
    bool at_once_;
    bool has_drawn_ = false;
    kvcore::Transfers transfers_;  // of the current call
    Copies drawn_;                 // reported by the manager since the last draw
    Copies expected_;              // expected from the manager
    Copies taken_;                 // not made yet
};
