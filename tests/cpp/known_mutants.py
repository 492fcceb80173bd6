# SPDX-License-Identifier: Apache-2.0
"""The known ways to break the cache manager."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """A way to break the manager: the replaced text, and the scenario that can detect it."""

    name: str
    path: str
    old: str
    new: str
    scenario: str


HELD_COPY = "copies_.push_back({copy, std::move(source), std::move(destination), 0, {}});"

MUTANTS = (
    Mutant(
        "destination not held",
        "cpp/src/transfer/owed_copies.hpp",
        HELD_COPY,
        HELD_COPY + " copies_.back().destination = PageRef();",
        "plain",
    ),
    Mutant(
        "source not held",
        "cpp/src/transfer/owed_copies.hpp",
        HELD_COPY,
        HELD_COPY + " copies_.back().source = PageRef();",
        "plain",
    ),
    Mutant(
        "heirs only right behind what they committed",
        "cpp/src/request/page_row.hpp",
        "return committed_ <= column && has(column, page);",
        "return committed_ == column && has(column, page);",
        "heirs",
    ),
    Mutant(
        "a failed copy counts as done",
        "cpp/src/transfer/owed_copies.cpp",
        "if (sequence != nullptr && !done) {",
        "if (sequence != nullptr && !done && ticket == 0) {",
        "plain",
    ),
    Mutant(
        "a failed load counts as done",
        "cpp/src/transfer/tier_flights.hpp",
        "            if (!done) begin_again(*sequence, flight.sequence);\n",
        "            static_cast<void>(begin_again);\n",
        "loads",
    ),
    Mutant(
        "a failed store counts as done",
        "cpp/src/transfer/tier_flights.cpp",
        "    if (done && flight.place) {",
        "    if (flight.place) {",
        "host",
    ),
    Mutant(
        "fetch forgets what is owed",
        "cpp/src/cache/fetch.cpp",
        "        result.status = FetchStatus::kPending;\n        result.row = i;\n",
        "        result.status = FetchStatus::kPending;\n        result.row = i;\n"
        "        cache.ledger.copies.drop_owed(request.sequence);\n"
        "        sequence.num_pending = 0;\n",
        "plain",
    ),
    Mutant(
        "a reset leaves pages that are held to be found",
        "cpp/src/cache/reset.cpp",
        "            level.tree.forget_all(*branches++);\n",
        "            ++branches;\n",
        "plain",
    ),
    Mutant(
        "truncate does not wait",
        "cpp/src/cache/truncate.cpp",
        "    Sequence& sequence = cache.sequences.at(handle);\n"
        "    if (sequence.num_pending > 0) rules::refuse_pending(-1);\n",
        "    Sequence& sequence = cache.sequences.at(handle);\n",
        "forks",
    ),
    Mutant(
        "a fork writes what another still copies",
        "cpp/src/transfer/owed_copies.cpp",
        "if (is_it && copy.copy.num_tokens > kept) row.make_read_only(c + 1);",
        "static_cast<void>(is_it && kept > 0);",
        "forks",
    ),
    Mutant(
        "a fork behind writes what others of its batch copy",
        "cpp/src/transfer/departures.hpp",
        "return holders == 1 && std::max(going.reach, gone.reach) <= "
        "std::max<std::int64_t>(0, kept);",
        "return holders == 1 && kept < 1000;",
        "forks",
    ),
    Mutant(
        "a copy does not keep the windows of its pages",
        "cpp/src/level/page_ref.hpp",
        "        home.enter(column);\n",
        "",
        "groups",
    ),
    Mutant(
        "a hit's last page may lose its window before it is copied",
        "cpp/src/cache/reserve.cpp",
        "reservation.source = WindowHold(home, hit.match.partial, hit.tokens, source);",
        "static_cast<void>(source);",
        "groups",
    ),
    Mutant(
        "windows leave a token early",
        "cpp/src/request/window_rows.cpp",
        "tokens - kept_tokens_);",
        "tokens + 1 - kept_tokens_);",
        "groups",
    ),
    Mutant(
        "a hit is taken whatever windows have",
        "cpp/src/cache/reserve.cpp",
        "            match = search.longest(match, wants_part && !has_declined ? fewest : 0);\n",
        "",
        "groups",
    ),
    Mutant(
        "a checkpoint is that of the column in front",
        "cpp/src/cache/commit.cpp",
        "Replica::last_column(home.tree, end);",
        "Replica::last_column(home.tree, {end.node, std::max(1, end.depth - 1)});",
        "states",
    ),
    Mutant(
        "a request that ends keeps its slot",
        "cpp/src/cache/claim.cpp",
        "        if (slot != RecurrentSlots::kNone) home.states->give_back(slot);\n",
        "        static_cast<void>(slot), static_cast<void>(home);\n",
        "states",
    ),
    Mutant(
        "the checkpoint of a hit is not copied",
        "cpp/src/cache/reserve.cpp",
        "        if (!takes_over) {\n            states.renew(checkpoint);\n",
        "        if (takes_over) {\n            states.renew(checkpoint);\n",
        "states",
    ),
    Mutant(
        "a chunk runs past a checkpoint that is due",
        "cpp/src/cache/reserve.cpp",
        "    if (plan.is_cut) plan.active = due;\n",
        "",
        "states",
    ),
    Mutant(
        "a checkpoint is found before its copy is done",
        "cpp/src/layers/recurrent_slots.hpp",
        "return slot != kNone && at(slot).is_ready;",
        "return slot != kNone;",
        "states",
    ),
    Mutant(
        "a checkpoint goes while somebody reads it",
        "cpp/src/layers/recurrent_slots.cpp",
        "        while (victim != kNone && at(victim).holds > 0) victim = at(victim).next;\n",
        "",
        "states",
    ),
    Mutant(
        "what no checkpoint follows waits for its turn",
        "cpp/src/tree/prefix_tree.cpp",
        "    if (interest_.exposure) policy_->expose(node->id);\n",
        "",
        "states",
    ),
    Mutant(
        "what useless pages followed is the next to go",
        "cpp/src/layers/window_policy.hpp",
        "if (!interest_.recency) return release(node, time);",
        "static_cast<void>(time);\n        if (!interest_.recency) return;",
        "states",
    ),
    Mutant(
        "a reservation may lack a page",
        "cpp/src/pages/page_owners.hpp",
        "return num_over_ == 0 && available >= unfilled_;",
        "return num_over_ == 0 && available + 1 >= unfilled_;",
        "tenants",
    ),
    Mutant(
        "one tenant may be above its ceiling",
        "cpp/src/pages/page_owners.hpp",
        "return num_over_ == 0 && available >= unfilled_;",
        "return num_over_ <= 1 && available >= unfilled_;",
        "tenants",
    ),
    Mutant(
        "a page that is taken over keeps its owner",
        "cpp/src/level/quotas.cpp",
        "    for (const BlockId page : pages) home.owners->share_out(page, taker, available);\n",
        "    static_cast<void>(available + taker + static_cast<std::int64_t>(pages.size()));\n",
        "tenants",
    ),
    Mutant(
        "a page that step swaps keeps its owner",
        "cpp/src/cache/commit.cpp",
        "        home.owners->share_out(memory.adopted[i], memory.takers[i], available);\n",
        "        static_cast<void>(available);\n",
        "tenants",
    ),
    Mutant(
        "what is let go of still counts",
        "cpp/src/pages/page_owners.cpp",
        "        counts_.add(state, -1);\n",
        "",
        "tenants",
    ),
    Mutant(
        "a page counts for nobody",
        "cpp/src/pages/page_owners.hpp",
        "    void set_taker(Owner taker) noexcept { taker_ = taker; }",
        "    void set_taker(Owner) noexcept { taker_ = 0; }",
        "tenants",
    ),
)
