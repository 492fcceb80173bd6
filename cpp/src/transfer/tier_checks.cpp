// SPDX-License-Identifier: Apache-2.0
// The laws of what is on its way to or from the host tiers.
#include <algorithm>
#include <unordered_set>
#include <vector>

#include "kvcore/errors.hpp"
#include "transfer/tier_flights.hpp"

namespace kvcore {

// What a sequence has in the host tier are the first tokens of what it has in the tree.
void TierFlights::check_sequence(const Sequence& sequence, const Standing& standing) const {
    using detail::require_law;
    if (standing.storing != 0) {
        const auto is_its = [&](const TierFlight& flight) {
            return flight.number == standing.storing && !flight.is_load &&
                   sequences_.find(flight.sequence) == &sequence;
        };
        require_law(!standing.place && std::any_of(flights_.begin(), flights_.end(), is_its),
                    "host tier: a sequence whose pages are stored waits for them");
    }
    if (!standing.place) return;
    const Replica& home = home_of(sequence.replica);
    const std::int32_t depth = standing.place.depth();
    TreeNode* node = sequence.pages.node();
    require_law(depth <= sequence.pages.committed(),
                "host tier: a sequence stores what it committed");
    require_law(home.tree.tokens_of({node, depth}, 0) ==
                        home.host->tokens_of({standing.place.node(), depth}, 0) &&
                    PrefixTree::name_of(node) == PrefixTree::name_of(standing.place.node()),
                "host tier: a sequence's prefix is the same there and here");
}

void TierFlights::check_tier(std::int32_t index) const {
    using detail::require_law;
    std::int64_t on_their_way = 0;
    std::unordered_set<BlockId> referenced;  // by one load or several
    const std::vector<bool>& known = storing_[static_cast<std::size_t>(index)];
    std::vector<bool> storing(known.size());
    for (const TierFlight& flight : flights_) {
        if (flight.replica != index) continue;
        if (flight.is_load) {
            const PathHold::Pages held = flight.source.references();
            referenced.insert(held.ids, held.ids + held.n);
            continue;
        }
        for (std::size_t i = 0; i < flight.device_pages.size(); ++i) {
            if (flight.host_pages[i] < 0) continue;
            ++on_their_way;
            const auto page = static_cast<std::size_t>(flight.device_pages[i]);
            require_law(!storing[page], "host tier: a page is on its way once");
            storing[page] = true;
        }
    }
    require_law(storing == known, "host tier: pages on their way are known");
    const auto add = [&](BlockId record) { referenced.insert(record); };
    queue_.for_each_reference(index, add);
    for (const StoreFill& fill : fills_) {
        if (fill.flight.replica != index) continue;
        const std::vector<BlockId>& pages = fill.flight.host_pages;
        on_their_way +=
            std::count_if(pages.begin(), pages.end(), [](BlockId id) { return id >= 0; });
    }
    TierIndex& host = *home_of(index).host;
    // Those that were forgotten may have a place there as well.
    host.tree().for_each_forgotten_run([&](const BlockId* ids, std::int32_t n) {
        for (std::int32_t i = 0; i < n; ++i) referenced.erase(ids[i]);
    });
    host.check_integrity(on_their_way + static_cast<std::int64_t>(referenced.size()));
}

void TierFlights::check_integrity() const {
    if (storing_.empty()) return;
    for (std::size_t i = 0; i < standings_.size(); ++i) {
        const Sequence& sequence = sequences_.entries()[i];
        const Standing& standing = standings_[i];
        detail::require_law(sequence.replica >= 0 || (!standing.place && standing.storing == 0),
                            "host tier: a sequence that is gone has no place there");
        if (sequence.replica >= 0) check_sequence(sequence, standing);
    }
    for (std::size_t r = 0; r < storing_.size(); ++r) {
        check_tier(static_cast<std::int32_t>(r));
        if (!grouping_.is_plain()) check_records(static_cast<std::int32_t>(r));
        if (replicas_[r]->host_states != nullptr) check_states(static_cast<std::int32_t>(r));
    }
}

}  // namespace kvcore
