// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <optional>
#include <string>
#include <vector>

#include "explore/explored_actions.hpp"
#include "explore/explored_checks.hpp"
#include "explore/explored_digest.hpp"

/// The words seen before: an open-addressing table, because there are millions.
class SeenWords {
   public:
    SeenWords() : slots_(1U << 16U, 0) {}

    /// Return false if the word is already in the table.
    [[nodiscard]] bool insert(std::uint64_t word) {
        if (2 * (size_ + 1) > slots_.size()) grow();
        if (!put(word | 1U)) return false;
        ++size_;
        return true;
    }

   private:
    [[nodiscard]] bool put(std::uint64_t word) {
        std::size_t at = (word >> 8U) & (slots_.size() - 1);
        while (slots_[at] != 0 && slots_[at] != word) at = (at + 1) & (slots_.size() - 1);
        const bool is_new = slots_[at] == 0;
        slots_[at] = word;
        return is_new;
    }
    void grow() {
        std::vector<std::uint64_t> before(slots_.size() * 2, 0);
        before.swap(slots_);
        for (const std::uint64_t word : before) {
            if (word != 0) static_cast<void>(put(word));
        }
    }

    std::vector<std::uint64_t> slots_;
    std::size_t size_ = 0;
};

/// Runs every order of actions from a scenario's start, shortest first. The search does not
/// continue from a state that it has seen before. A manager cannot be copied, so the search replays
/// the actions that lead to a state.
class ExploredSearch {
   public:
    explicit ExploredSearch(const Scenario& scenario) : scenario_(scenario) {}

    /// Run the scenario's prologue.
    void begin() {
        ExploredWorld world(scenario_);
        for (const Action& action : scenario_.prologue) {
            trail_.push_back(action);
            world.apply(action);
            ExploredChecks(world).run();
        }
        add(world, ExploredDigest(world).word(), 0, {});
        level_end_ = states_.size();
    }

    /// Continue until all states at this depth are known, or no new state exists. Prints each
    /// depth.
    void run(int depth) {
        for (int level = 1; level <= depth && level_begin_ < level_end_; ++level) {
            for (std::size_t at = level_begin_; at < level_end_; ++at) expand(at);
            level_begin_ = level_end_;
            level_end_ = states_.size();
            const double seconds = static_cast<double>(std::clock() - begin_) / CLOCKS_PER_SEC;
            std::printf("%-8s depth %2d: %9zu states, %10zu transitions, %7.1f s of CPU\n",
                        scenario_.name.c_str(), level, states_.size(), num_transitions_, seconds);
            std::fflush(stdout);
        }
    }

    /// Return the actions that lead to the current state.
    [[nodiscard]] const std::vector<Action>& trail() const { return trail_; }

   private:
    struct State {
        std::uint64_t word;
        std::uint32_t parent;
        Action action;
    };

    // Check the state if it is new.
    void add(ExploredWorld& world, std::uint64_t word, std::size_t parent, Action action) {
        if (!seen_.insert(word)) return;
        states_.push_back({word, static_cast<std::uint32_t>(parent), action});
        ExploredChecks(world).run();
    }

    void set_trail(std::size_t at) {
        trail_ = scenario_.prologue;
        const auto first = static_cast<std::ptrdiff_t>(trail_.size());
        for (; at != 0; at = states_[at].parent) trail_.push_back(states_[at].action);
        std::reverse(trail_.begin() + first, trail_.end());
    }

    void expand(std::size_t at) {
        set_trail(at);
        std::optional<ExploredWorld> world;
        world.emplace(scenario_);
        for (const Action& action : trail_) world->apply(action);
        const std::vector<Action> actions = ExploredActions(*world).all();
        for (const Action& action : actions) {
            if (!world) {
                world.emplace(scenario_);
                for (const Action& before : trail_) world->apply(before);
            }
            trail_.push_back(action);
            world->apply(action);
            ++num_transitions_;
            if (action.verb == Verb::kReset) ExploredChecks(*world).check_reset();
            const std::uint64_t word = ExploredDigest(*world).word();
            if (word != states_[at].word) {
                add(*world, word, at, action);
                world.reset();
            }
            trail_.pop_back();
        }
    }

    const Scenario& scenario_;
    std::vector<State> states_;
    SeenWords seen_;
    std::vector<Action> trail_;
    std::size_t level_begin_ = 0;
    std::size_t level_end_ = 0;
    std::size_t num_transitions_ = 0;
    std::clock_t begin_ = std::clock();
};
