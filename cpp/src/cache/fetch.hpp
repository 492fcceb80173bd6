// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cache/reserve.hpp"
#include "cache/validate_requests.hpp"
#include "request/undo_log.hpp"

namespace kvcore {

/// The decode step. Its cost depends on how often it walks the batch and how much memory it touches
/// for each row.
///
/// Owns: memory of a call, kept for the next call. Threads: not thread-safe.
/// Cost: O(rows), and O(pages changed) for changed rows.
class Fetcher {
   public:
    Fetcher(CacheData& state, BatchRows& rows, JointReserver& reserver) noexcept
        : state_(state), rows_(rows), reserver_(reserver) {}

    /// The verb of CacheManager.
    [[nodiscard]] FetchResult fetch(const RequestBatch& batch, std::int64_t num_steps,
                                    FetchTarget* targets, Transfers* transfers);

   private:
    using CountedEnds = UndoLog<&Sequence::counted_end>;
    struct LateRow {
        std::int64_t batch_row;
        std::int64_t row;  // row in its replica's table
    };
    struct Room {
        std::int64_t rows = 0;
        std::int64_t columns = 0;
    };
    struct Part;

    [[nodiscard]] Room room_of(const FetchTarget& target) const;
    [[nodiscard]] bool have_room(const FetchTarget* targets) const noexcept;
    void begin(FetchTarget* targets, const FetchTarget* end);
    template <bool kHasGroups, bool kHasStates>
    void write_ready_rows(const RequestBatch& given, std::int64_t num_steps, FetchTarget* targets,
                          CountedEnds& counted, FetchResult& result);
    void note_late_row(const RequestView& request, Sequence& sequence, LateRow late, bool has_pages,
                       FetchResult& result);
    void write_late_rows(const RequestBatch& batch, FetchTarget* targets) const;
    void count(const RequestBatch& batch) noexcept;

    CacheData& state_;
    BatchRows& rows_;
    JointReserver& reserver_;
    std::vector<std::int64_t> missing_;  // rows that need pages
    std::vector<LateRow> late_;          // rows that are written after all rows are reserved
    std::vector<Undo> undo_;             // changes to undo if the batch is refused
    std::vector<std::int64_t> prompts_;  // written rows that are still in their prompts
    std::vector<Room> rooms_;            // of the tables of each replica
};

}  // namespace kvcore
