// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "explore/explored_world.hpp"

/// The possible next actions in a world: its verbs, where callers may call them. Calls that must be
/// refused are not actions: see explored_checks.hpp.
class ExploredActions {
   public:
    explicit ExploredActions(const ExploredWorld& world) : world_(world) {
        const auto& requests = world.requests();
        const auto n = static_cast<std::uint8_t>(requests.size());
        for (std::uint8_t i = 0; i < n; ++i) {
            const ExploredRequest& request = requests[i];
            if (request.is_claimed) {
                add_verbs(i, request);
            } else if (i == 0 || requests[i - 1u].is_known) {  // in order: requests are alike
                add(Verb::kReserve, i);
                add(Verb::kFetch, i);
            }
        }
        add_pairs();
        const auto num_tickets = static_cast<std::uint8_t>(world.tickets().size());
        for (std::uint8_t i = 0; i < num_tickets; ++i) {
            if (world.tickets()[i].is_moved) {
                add(Verb::kFinish, i);
            } else {
                add(Verb::kMove, i);
                add(Verb::kFail, i);
            }
        }
        if (world.manager().stats(0).cached_pages > 0 || !world.tickets().empty()) {
            add(Verb::kReset);
        }
        if (world.pin()) {
            add(Verb::kUnpin);
        } else if (world.manager().stats(0).cached_pages > 0) {
            add(Verb::kPin);
        }
    }

    [[nodiscard]] const std::vector<Action>& all() const { return actions_; }

   private:
    void add(Verb verb, std::uint8_t first = 0, std::uint8_t second = 0) {
        actions_.push_back({verb, first, second});
    }
    [[nodiscard]] bool is_ready(const ExploredRequest& request) const {
        return request.is_claimed && !request.has_run &&
               world_.sequence_of(request).num_pending == 0;
    }

    void add_verbs(std::uint8_t i, const ExploredRequest& request) {
        add(Verb::kRelease, i);
        if (world_.is_owed(request)) {
            add(Verb::kTakeOwed, i);
            if (!world_.is_under_way(request)) add(Verb::kBeginAgain, i);
        }
        if (world_.sequence_of(request).num_pending > 0) return;
        const bool has_pages = !world_.sequence_of(request).pages.empty();
        if (!request.has_run) {
            add(Verb::kReserve, i);
            add(Verb::kFetch, i);
            if (has_pages && !request.is_sealed) add(Verb::kBeginAgain, i);
        } else if (request.active < request.end() ||
                   request.tokens.size() < world_.scenario().longest) {
            add(Verb::kStep, i);
        }
        if (!has_pages || request.start == 0) return;
        if (request.is_sealed) {
            const auto last = static_cast<std::uint8_t>(request.start - 1);
            if (last > 0) add(Verb::kTruncate, i, last);
            if (last > 0) add(Verb::kRewind, i, last);
            if (last > 1) add(Verb::kTruncate, i, static_cast<std::uint8_t>(last - 1));
        }
        for (std::uint8_t child = 0; child < ExploredWorld::kRequests; ++child) {
            const ExploredRequest& free = world_.requests()[child];
            const bool is_next = child == 0 || world_.requests()[child - 1u].is_known;
            if (!free.is_claimed && is_next) {
                add(Verb::kFork, i, child);
                break;
            }
        }
    }

    void add_pairs() {
        const auto& requests = world_.requests();
        const auto n = static_cast<std::uint8_t>(requests.size());
        for (std::uint8_t i = 0; i < n; ++i) {
            for (std::uint8_t j = static_cast<std::uint8_t>(i + 1); j < n; ++j) {
                if (!is_ready(requests[i]) || !is_ready(requests[j])) continue;
                add(Verb::kFetchPair, i, j);
                add(Verb::kReservePair, i, j);
            }
        }
    }

    const ExploredWorld& world_;
    std::vector<Action> actions_;
};
