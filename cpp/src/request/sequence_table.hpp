// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/types.hpp"
#include "request/page_row.hpp"
#include "support/memory.hpp"

namespace kvcore {

/// The cached pages that a sequence may still take.
enum class Reuse : std::uint8_t {
    kOpen,      // a longer prefix
    kDeclined,  // the same, but no partial page after the hit: reserve needed it
    kSealed,    // no page: it was fetched or written
};

/// A claimed sequence: its pages and its state. It takes two cache lines. A decode step reads only
/// the first line, which ends with the size of `pages`.
struct alignas(64) Sequence {
    std::uint32_t generation = 1;
    std::uint32_t batch_stamp = 0;  // the last batch it was seen in: finds duplicates
    std::int16_t replica = -1;      // -1: the entry is free
    Reuse reuse = Reuse::kOpen;     // of cached prefixes
    std::uint8_t num_pending = 0;   // transfers into its pages, waiting or in flight
    bool counts_prompt = true;      // the metrics lack positions of its prompt
    std::int64_t counted_end = 0;   // positions below it are in the metrics
    std::int64_t written = 0;       // tokens, as of the last commit
    PageRow pages;
    std::int64_t hit_tokens = 0;  // taken from the cache by this claim

    [[nodiscard]] bool is_sealed() const noexcept { return reuse == Reuse::kSealed; }
    /// Returns the end of the positions that may be filled, by the last fetched run or by a hit.
    /// With several steps per fetch, a sequence writes beyond `counted_end`.
    [[nodiscard]] std::int64_t filled_end() const noexcept {
        return is_sealed() ? std::max(counted_end, written) : hit_tokens;
    }
};
static_assert(sizeof(void*) != 8 || sizeof(Sequence) == 128, "two cache lines");

/// The claimed sequences, by handle.
///
/// Owns: the entries; page rows keep their memory when an entry is used again.
/// Invariant: a handle finds its sequence until `release`, and never another sequence: an entry at
/// its last generation is not used again.
/// Threads: no locks of its own.
/// Cost: O(1) per verb; references stay valid until the next `claim`.
class SequenceTable {
   public:
    /// Takes an entry for a sequence of a replica. May move the entries. Throws std::bad_alloc
    /// without a change.
    [[nodiscard]] SequenceHandle claim(std::int32_t replica);
    /// Frees the entry of a live sequence. The caller has given its pages back.
    void release(SequenceHandle handle) noexcept;

    /// A view for lookups of many handles; invalid after the next `claim`.
    template <class Entry>
    struct View {
        Entry* data;
        std::size_t size;

        /// All entries; free entries have replica < 0.
        [[nodiscard]] Entry* begin() const noexcept { return data; }
        [[nodiscard]] Entry* end() const noexcept { return data + size; }
        /// Returns nullptr for a stale or foreign handle.
        [[nodiscard]] Entry* find(SequenceHandle handle) const noexcept {
            if (handle.index >= size) return nullptr;
            Entry& sequence = data[handle.index];
            const bool alive = sequence.generation == handle.generation && sequence.replica >= 0;
            return alive ? &sequence : nullptr;
        }
        /// Throws RequestNotFoundError for a stale or foreign handle. `row`: the row of the batch,
        /// for the error; -1: no batch.
        [[nodiscard]] Entry& at(SequenceHandle handle, std::int64_t row = -1) const {
            if (Entry* sequence = find(handle)) return *sequence;
            refuse(handle, row);
        }
        /// Prefetches the entry that `find` reads.
        void prefetch(SequenceHandle handle) const noexcept {
            kvcore::prefetch(data + handle.index);
        }
    };
    using Live = View<Sequence>;
    /// The view for walks over sequences; `find` and `at` look up a single sequence.
    [[nodiscard]] Live live() noexcept { return {entries_.data(), entries_.size()}; }
    [[nodiscard]] View<const Sequence> live() const noexcept {
        return {entries_.data(), entries_.size()};
    }
    [[nodiscard]] Sequence* find(SequenceHandle handle) noexcept { return live().find(handle); }
    [[nodiscard]] Sequence& at(SequenceHandle handle) { return live().at(handle); }
    [[nodiscard]] const Sequence* find(SequenceHandle handle) const noexcept {
        return live().find(handle);
    }
    [[nodiscard]] const Sequence& at(SequenceHandle handle) const { return live().at(handle); }

    /// The entries by index; free entries have replica < 0.
    [[nodiscard]] const std::vector<Sequence>& entries() const noexcept { return entries_; }

   private:
    [[noreturn]] static void refuse(SequenceHandle handle, std::int64_t row);

    std::vector<Sequence> entries_;
    std::vector<std::uint32_t> free_;
};

}  // namespace kvcore
