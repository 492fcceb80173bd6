// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "transfer/owed_copies.hpp"

namespace kvcore {

/// Decides whether a row may write a page in place: only if the row is the sole holder of the page,
/// not counting forks that give the page up in the same call.
///
/// Owns: the pages that earlier rows of the present call will give up, until the call ends.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(1) for a page with one holder, else O(copies of the call + log forked pages of the
/// call).
class Departures {
   public:
    /// A row that the call will write from token `start` on.
    struct Writer {
        const PageRow& row;
        const BlockPool& pool;
        std::int32_t replica;
        std::int32_t page_size;
        std::int64_t start;

        [[nodiscard]] std::int32_t first_column() const noexcept {
            return static_cast<std::int32_t>(start / page_size);
        }
        /// Tokens of the first column before `start`, which stay unchanged.
        [[nodiscard]] std::int32_t kept_tokens() const noexcept {
            return static_cast<std::int32_t>(start % page_size);
        }
    };

    explicit Departures(const OwedCopies& copies) noexcept : copies_(copies) {}

    /// Returns true if neither the tree nor another fork nor a copy holds the page. A copy for a
    /// fork that gave the page up may still read it: this copy must end before the first token that
    /// the row writes.
    [[nodiscard]] bool is_sole_holder(const Writer& writer, std::int32_t column) const {
        if (!writer.row.is_own(column)) return false;
        const BlockId page = writer.row[column];
        std::uint32_t holders = writer.pool.ref_count(page);
        if (holders == 1) return true;
        const auto left = leaving_.find({writer.replica, page});
        const Leavers going = left != leaving_.end() ? left->second : Leavers{};
        const Leavers gone = copies_.leavers_of_call(writer.replica, page);
        holders -= going.count + gone.count;
        const std::int64_t kept = writer.start - std::int64_t{column} * writer.page_size;
        return holders == 1 && std::max(going.reach, gone.reach) <= std::max<std::int64_t>(0, kept);
    }
    /// The number of columns before `end` that the row writes in place.
    [[nodiscard]] std::int64_t count_sole(const Writer& writer, std::int64_t end) const {
        std::int64_t count = 0;
        for (std::int32_t column = writer.first_column(); column < end; ++column) {
            count += is_sole_holder(writer, column) ? 1 : 0;
        }
        return count;
    }

    /// Records that the row will give up the pages that it cannot write in place. If several forks
    /// of a batch continue to write the same page, the last fork needs no copy. If only one fork
    /// continues, it needs no copy. Copies on the list are made before any of the rows writes.
    void note(const Writer& writer, bool copies_at_once) {
        const std::int32_t first = writer.first_column();
        for (std::int32_t column = first; column < writer.row.read_only_end(); ++column) {
            if (!writer.row.is_own(column) || is_sole_holder(writer, column)) continue;
            leaving_[{writer.replica, writer.row[column]}].add(
                copies_at_once && column == first ? writer.kept_tokens() : 0);
        }
    }
    /// Clears the records at the end of the call, however it ends: with stale records, a later call
    /// would treat a shared page as the own page of a row.
    class Call {
       public:
        explicit Call(Departures& departures) noexcept : departures_(departures) {}
        Call(const Call&) = delete;
        Call& operator=(const Call&) = delete;
        ~Call() { departures_.leaving_.clear(); }

       private:
        Departures& departures_;
    };

   private:
    const OwedCopies& copies_;
    std::map<std::pair<std::int32_t, BlockId>, Leavers> leaving_;  // by replica and page
};

}  // namespace kvcore
