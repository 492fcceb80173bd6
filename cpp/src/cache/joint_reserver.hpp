// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/admitter.hpp"
#include "cache/reserver.hpp"
#include "cache/validate_requests.hpp"

namespace kvcore {

/// Reserves what rows of a batch miss, all or none of them.
///
/// Owns: memory of a call, kept for the next one. Threads: none of its own.
/// Cost: rows that only grow cost O(pages added) together; each other row what its reservation
/// costs by itself.
class JointReserver {
   public:
    JointReserver(ManagerState& state, Departures& departures, const Admitter& admitter,
                  Reserver& reserver) noexcept
        : state_(state), departures_(departures), admitter_(admitter), reserver_(reserver) {}

    /// It has all pages that the next steps write into, none of them shared.
    [[nodiscard]] static bool is_reserved(const PageRow& row, const RequestView& request,
                                          std::int64_t num_steps, std::int64_t page_size,
                                          bool reserves_chunks) noexcept {
        const std::int64_t held = row.size() * page_size;
        // Mostly up to the end, whatever was asked for.
        const bool has_pages =
            request.end + num_steps - 1 <= held ||
            (reserves_chunks ? request.active + num_steps - 1
                             : request.tokens_to_hold(request.active, num_steps)) <= held;
        return has_pages && request.start >= row.frozen() * page_size;
    }

    /// A call's rows [missing] that are not reserved, ascending. Where they cannot all be had, says
    /// so in `result` and returns false. Throws std::bad_alloc; nothing has changed then.
    [[nodiscard]] bool reserve(const BatchRows& rows, const RequestBatch& batch,
                               const std::vector<std::int64_t>& missing, std::int64_t num_steps,
                               Transfers* transfers, FetchResult& result);

   private:
    /// What the verbs of a call have in common.
    struct Call {
        const BatchRows& rows;
        const RequestBatch& batch;
        const std::vector<std::int64_t>& missing;
        std::int64_t num_steps;
        Transfers* transfers;
    };
    /// A row that needs nothing but more columns behind those that it has.
    struct Growth {
        std::int64_t row;
        std::int64_t columns;
    };
    struct Supply {
        std::int64_t left;           // pages that can still be had
        bool has_evictable = false;  // counted in, which is worth it only when free ones do not do
        std::int64_t wanted = 0;     // columns of the rows that only grow
        std::size_t given = 0;       // of taken_, where the next ones are
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
        return growth.columns * state_.grouping.pages_per_column();
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

    ManagerState& state_;
    Departures& departures_;
    const Admitter& admitter_;
    Reserver& reserver_;
    std::vector<Growth> growing_;
    std::vector<std::int64_t> joining_;  // the other rows
    std::vector<Supply> supply_;         // of each replica
    std::vector<BlockId> taken_;         // pages on the way to their rows
};

}  // namespace kvcore
