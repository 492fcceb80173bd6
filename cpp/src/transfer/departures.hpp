// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "transfer/owed_copies.hpp"

namespace kvcore {

/// Who may write a page in place: nobody else holds it, but for forks that let go of it in the same
/// call.
///
/// Owns: what rows of the present call, asked before, will let go of; known to that call alone.
/// Threads: none of its own; CacheManager locks around it.
/// Cost: O(1) for a page with one holder, else O(copies of the call + log forked pages of it).
class Departures {
   public:
    /// A row that is to be written from token `start` on.
    struct Writer {
        const PageRow& row;
        const BlockPool& pool;
        std::int32_t replica;
        std::int32_t page_size;
        std::int64_t start;

        [[nodiscard]] std::int32_t first_column() const noexcept {
            return static_cast<std::int32_t>(start / page_size);
        }
        /// Tokens of that column that stay.
        [[nodiscard]] std::int32_t kept_tokens() const noexcept {
            return static_cast<std::int32_t>(start % page_size);
        }
    };

    explicit Departures(const OwedCopies& copies) noexcept : copies_(copies) {}

    /// Neither the tree nor a fork nor a copy holds the page. The copies that forks left behind may
    /// read it for longer, so that what they read must not be what is written.
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
    /// Columns below `end` that are written in place.
    [[nodiscard]] std::int64_t count_sole(const Writer& writer, std::int64_t end) const {
        std::int64_t count = 0;
        for (std::int32_t column = writer.first_column(); column < end; ++column) {
            count += is_sole_holder(writer, column) ? 1 : 0;
        }
        return count;
    }

    /// That row will let go of what it cannot write in place. So of the forks in a batch that go on
    /// writing the same page, the last one need not copy it, nor need the only one that goes on.
    /// Copies on the list are made before any of them writes.
    void note(const Writer& writer, bool copies_at_once) {
        const std::int32_t first = writer.first_column();
        for (std::int32_t column = first; column < writer.row.frozen(); ++column) {
            if (!writer.row.is_own(column) || is_sole_holder(writer, column)) continue;
            leaving_[{writer.replica, writer.row[column]}].add(
                copies_at_once && column == first ? writer.kept_tokens() : 0);
        }
    }
    /// However the call ends: whoever is asked later would take a page that others hold for its
    /// own.
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
    std::map<std::pair<std::int32_t, BlockId>, Leavers> leaving_;  // of each page of a replica
};

}  // namespace kvcore
