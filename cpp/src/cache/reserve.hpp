// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "cache/cache_data.hpp"
#include "cache/plan.hpp"
#include "cache/validate_requests.hpp"
#include "kvcore/errors.hpp"
#include "level/quotas.hpp"
#include "transfer/departures.hpp"

namespace kvcore {

/// The second half of a reservation. `prepare` gets everything except pages; if it runs out of
/// memory, it has changed nothing visible. `evict` makes room for pages. `apply` carries the
/// reservation out and cannot fail.
///
/// Threads: not thread-safe. Cost: O(pages added and replaced).
class Reserver {
   public:
    Reserver(CacheData& state, const Departures& departures) noexcept
        : state_(state), departures_(departures) {}

    /// Throws std::bad_alloc.
    [[nodiscard]] Reservation prepare(const Admission& admission, Sequence& sequence,
                                      const RequestView& request, Transfers* transfers);
    /// Called between both, with write-back: stores the pages that `apply` would evict, if they
    /// must be stored first. Returns true if stores were handed out; then the caller drops the
    /// reservation, and makes it again later.
    [[nodiscard]] bool spill(const Reservation& made, const Sequence& sequence,
                             Transfers& transfers);
    /// Called after `spill`: evicts the pages that `apply` needs beyond free pages. Throws
    /// IntegrityError if these pages or a state slot are missing although the reservation was
    /// admitted, and std::bad_alloc.
    void evict(const Reservation& made, const Sequence& sequence, SequenceHandle handle);
    /// Returns true if the request now continues from another token. `row` is its row in the batch,
    /// for `transfers->moved`. The caller calls `evict` before, and `end_room` of the replica
    /// after.
    bool apply(Reservation& made, Sequence& sequence, RequestView& request, std::int64_t row,
               Transfers* transfers);
    /// Makes room for the copies of `n` more reservations. Throws std::bad_alloc.
    void make_room_for_copies(std::size_t n, Transfers* transfers);

   private:
    CacheData& state_;
    const Departures& departures_;
};

/// Reserves the missing pages of all rows of a batch, or of no row.
///
/// Owns: memory of a call, kept for the next call. Threads: not thread-safe.
/// Cost: rows that only grow cost O(pages added) together; each other row costs as much as its
/// reservation by itself.
class JointReserver {
   public:
    JointReserver(CacheData& state, Departures& departures, const Admitter& admitter,
                  Reserver& reserver) noexcept
        : state_(state), departures_(departures), admitter_(admitter), reserver_(reserver) {}

    /// Returns true if the row has all pages that the next steps write into, and shares none with
    /// others.
    [[nodiscard]] static bool is_reserved(const PageRow& row, const RequestView& request,
                                          std::int64_t num_steps, std::int64_t page_size,
                                          bool reserves_chunks) noexcept {
        const std::int64_t held = row.size() * page_size;
        // Usually the row has pages up to the end, whatever the call needs.
        const bool has_pages =
            request.end + num_steps - 1 <= held ||
            (reserves_chunks ? request.active + num_steps - 1
                             : request.tokens_to_hold(request.active, num_steps)) <= held;
        return has_pages && request.start >= row.read_only_end() * page_size;
    }

    /// Reserves the rows [missing] of a call, which ascend. If their pages are not all available,
    /// sets `result` and returns false. If it throws std::bad_alloc, nothing has changed.
    [[nodiscard]] bool reserve(const BatchRows& rows, const RequestBatch& batch,
                               const std::vector<std::int64_t>& missing, std::int64_t num_steps,
                               Transfers* transfers, FetchResult& result);

   private:
    /// The arguments that the steps of a call share.
    struct Call {
        const BatchRows& rows;
        const RequestBatch& batch;
        const std::vector<std::int64_t>& missing;
        std::int64_t num_steps;
        Transfers* transfers;
    };
    /// A row that needs only more columns at its end.
    struct Growth {
        std::int64_t row;
        std::int64_t columns;
    };
    struct Supply {
        std::int64_t left;           // pages that are still available
        bool has_evictable = false;  // `left` includes evictable pages; free pages are too few
        std::int64_t wanted = 0;     // columns of the rows that only grow
        std::size_t given = 0;       // of taken_, the index of the next page
    };

    void sort(const Call& call);
    [[nodiscard]] bool try_reserve(const Call& call, FetchResult& result);
    [[nodiscard]] PageNeed need_of(std::int32_t replica, const Call& call,
                                   const std::vector<Reservation>& made) const noexcept;
    [[nodiscard]] bool spill(const Call& call, const std::vector<Reservation>& made,
                             FetchResult& result);
    void prepare_room(const Call& call, const std::vector<Reservation>& made);
    void evict_for_growth();
    [[nodiscard]] bool reserve_one(const Call& call, FetchResult& result);
    [[nodiscard]] bool grows_evenly(const Call& call, Growth growth) const;
    [[nodiscard]] std::int64_t missing_columns(const Call& call, std::int64_t row) const;
    [[nodiscard]] std::int64_t pages_of(Growth growth) const noexcept {
        return growth.columns * state_.grouping.num_lanes();
    }
    [[nodiscard]] bool find_supply(const Call& call, FetchResult& result);
    void prepare_growth(const Call& call);
    void grow(const Call& call);
    void grow_columns(const Call& call);
    [[nodiscard]] bool reserve_together(const Call& call, FetchResult& result);
    [[nodiscard]] std::vector<Admission> admit_together(const Call& call, bool allow_partial);
    [[nodiscard]] bool has_columns(const Call& call, const std::vector<Admission>& admissions,
                                   FetchResult& result) const;
    [[nodiscard]] bool heed_quotas(const Call& call, std::vector<Reservation>& made,
                                   FetchResult& result);
    [[nodiscard]] bool lacks_columns(const Call& call,
                                     const std::vector<Admission>& admissions) const noexcept;
    void count_refusal(const Call& call, std::int64_t row) noexcept;
    [[nodiscard]] bool has_slots(const Call& call, const std::vector<Reservation>& made,
                                 FetchResult& result) const;
    [[nodiscard]] FetchResult share_out(std::vector<std::int64_t> left, const Call& call,
                                        const std::vector<Admission>& admissions) const;
    [[nodiscard]] std::vector<Reservation> prepare(const Call& call,
                                                   const std::vector<Admission>& admissions);

    CacheData& state_;
    Departures& departures_;
    const Admitter& admitter_;
    Reserver& reserver_;
    std::vector<Growth> growing_;
    std::vector<std::int64_t> joining_;  // the other rows
    std::vector<Supply> supply_;         // of each replica
    std::vector<BlockId> taken_;         // pages on the way to their rows
};

/// A hit that was found and will be allocated later; its pages are pinned. Its run is cut when the
/// hit is allocated, and with quotas when it is found.
///
/// Owns: at most one pin each on the run where its pages end, on the page to copy from, and in the
/// host tier; with groups, holds on the pages that windows read on the device and in the host tier;
/// with states, a hold on the checkpoint where it ends. Invariant: holds on windows and states end
/// before the pins that keep their runs. The members end in reverse order, so a hit is destroyed or
/// moved from, but never assigned. Threads: not thread-safe; CacheManager locks around it. Cost:
/// O(1), with groups O(columns that windows read).
class HeldHit {
   public:
    /// Throws std::bad_alloc, only with groups or quotas.
    HeldHit(const CacheData& state, const FoundHit& found, const Sequence& sequence,
            const RequestView& request)
        : found_(found), asked_(standing(sequence, request)) {
        Replica& home = state.home_of(sequence);
        quotas::shorten(home, found_, sequence.hit_tokens);
        if (found_.shares()) {
            windows_ = WindowHold(home, found_.match.at, found_.tokens);
            if (!found_.ends_below()) checkpoint_ = home.hold_state(found_.match.at);
            if (found_.is_partial()) {
                const std::int32_t column = found_.match.at.depth;
                source_ = WindowHold(home, found_.match.partial, found_.tokens, column);
            }
        }
        if (found_.below.node != nullptr) {
            records_ = WindowHold(*home.host, found_.below, found_.tokens);
        }
        if (!checkpoint_) checkpoint_ = home.hold_stored_state(found_.below);
        hold(home);
    }
    HeldHit(HeldHit&&) noexcept = default;
    HeldHit& operator=(HeldHit&&) = delete;
    ~HeldHit() = default;  // pins end last

    [[nodiscard]] const FoundHit& found() const noexcept { return found_; }
    /// Throws std::invalid_argument if the request or its claim has changed since the match.
    void require_unmoved(const Sequence& sequence, const RequestView& request) const {
        if (asked_ == standing(sequence, request)) return;
        throw std::invalid_argument(
            "the request was reserved, fetched or changed since it was matched; match it again");
    }

    /// Throws std::invalid_argument if pages of the hit were forgotten since the match.
    void require_cached() const {
        for (const TreePosition& at : {found_.match.at, found_.match.partial, found_.below}) {
            if (at.node == nullptr) continue;
            if (!PrefixTree::is_forgotten(PrefixTree::position(at.node, at.depth).node)) continue;
            throw std::invalid_argument(
                "pages of the hit were forgotten since the request was matched; match it again");
        }
    }

    /// Nothing may be evicted between `let_go` and `hold`. Without its own pins, a hit does not
    /// block its allocation.
    void hold(Replica& home) noexcept {
        if (!found_.is_taken()) return;
        const auto pin = [](PrefixTree& tree, const TreePosition& at) {
            return at.node == nullptr ? TreePin() : TreePin(tree, at.node);
        };
        windows_.enter();
        source_.enter();
        records_.enter();
        checkpoint_.enter();
        place_ = pin(home.tree, found_.match.at);
        partial_ = pin(home.tree, found_.match.partial);
        if (found_.below.node != nullptr) below_ = pin(home.host->tree, found_.below);
    }
    /// Cuts the runs at the end of the hit, so that a later `hold` needs no page after the hit:
    /// with write-back, those pages may be evicted while the hit is not held. Throws
    /// std::bad_alloc.
    void cut(Replica& home) {
        if (found_.shares()) {
            found_.match.at.node = home.tree.split(found_.match.at);
            windows_.move_to(found_.match.at);
        }
        if (found_.below.node == nullptr) return;
        found_.below.node = home.host->tree.split(found_.below);
        records_.move_to(found_.below);
    }
    /// The hit was released and its pages may be evicted: it cannot be allocated any more.
    void give_up() noexcept {
        place_.reset();
        found_ = {};
        asked_ = {};
    }
    void let_go() noexcept {
        settle(found_.match.at);
        settle(found_.match.partial);
        settle(found_.below);
        checkpoint_.leave();
        records_.leave();
        source_.leave();
        windows_.leave();
        below_.reset();
        partial_.reset();
        if (found_.match.at.depth > 0) place_.reset();  // keeps a namespace without pages
    }

   private:
    /// The values that a hit depends on.
    struct Standing {
        SequenceHandle sequence;
        std::int64_t start = 0;
        std::int64_t active = 0;
        std::int64_t end = 0;
        std::int64_t hit_tokens = 0;
        std::int32_t committed = 0;
        bool is_sealed = false;

        friend bool operator==(const Standing& a, const Standing& b) noexcept {
            return a.sequence == b.sequence && a.start == b.start && a.active == b.active &&
                   a.end == b.end && a.hit_tokens == b.hit_tokens && a.committed == b.committed &&
                   a.is_sealed == b.is_sealed;
        }
    };
    [[nodiscard]] static Standing standing(const Sequence& sequence,
                                           const RequestView& request) noexcept {
        return {request.sequence,    request.start,       request.active,
                request.end,         sequence.hit_tokens, sequence.pages.committed(),
                sequence.is_sealed()};
    }
    // Runs may have been cut since the match.
    static void settle(TreePosition& at) noexcept {
        if (at.node != nullptr) at = PrefixTree::position(at.node, at.depth);
    }

    FoundHit found_;
    Standing asked_;
    TreePin place_;
    TreePin partial_;
    TreePin below_;
    WindowHold windows_;
    WindowHold source_;
    WindowHold records_;
    StateHold checkpoint_;
};

/// Reserves one request after the other: finds its hit in the cache, then allocates the rest.
///
/// Owns: nothing. Threads: not thread-safe. Cost: the cost of both halves.
class OrderedReserver {
   public:
    OrderedReserver(CacheData& state, BatchRows& rows, const Admitter& admitter,
                    Reserver& reserver) noexcept
        : state_(state), rows_(rows), admitter_(admitter), reserver_(reserver) {}

    /// The verbs of CacheManager.
    [[nodiscard]] BatchReserve reserve(const RequestBatch& batch, std::int64_t num_steps,
                                       Transfers* transfers, const ReserveOptions& options = {});
    [[nodiscard]] ReserveStatus begin_at(RequestView& request, std::int64_t n,
                                         Transfers* transfers);
    [[nodiscard]] ReservePlan plan(const RequestView& request, const Asked& asked) const;
    [[nodiscard]] ReservePlan plan(std::int32_t replica, const RequestView& request,
                                   const Asked& asked) const;
    [[nodiscard]] HeldHit match(const RequestView& request) const;
    [[nodiscard]] ReserveStatus allocate(HeldHit& hit, RequestView& request, std::int64_t n,
                                         Transfers* transfers);

   private:
    [[nodiscard]] ReserveStatus take(const Admission& admission, Sequence& sequence,
                                     RequestView& request, std::int64_t row, Transfers* transfers);
    [[nodiscard]] ReserveStatus reserve_row(RequestView& request, const Asked& asked,
                                            std::int64_t row, Transfers* transfers);
    [[nodiscard]] bool can_ever_fit(const Sequence& sequence, const RequestView& request,
                                    const Asked& asked) const;
    [[nodiscard]] ReservePlan plan(const Sequence& sequence, const RequestView& request,
                                   const Asked& asked) const;

    void require_one_step(const RequestBatch& batch, std::int64_t num_steps) const;

    CacheData& state_;
    BatchRows& rows_;
    const Admitter& admitter_;
    Reserver& reserver_;
};

}  // namespace kvcore
