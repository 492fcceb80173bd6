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

/// What a sequence may still take out of the cache.
enum class Reuse : std::uint8_t {
    kOpen,      // a longer prefix
    kDeclined,  // the same, but no page in part behind the present one: it was needed itself
    kSealed,    // nothing: it was fetched or written
};

/// A claimed sequence: its pages, and what is known about it as a whole. Two cache lines, of
/// which a decode step reads the first: that ends with the size of `pages`.
struct alignas(64) Sequence {
    std::uint32_t generation = 1;
    std::uint32_t batch_stamp = 0;  // the last batch it was seen in: finds duplicates
    std::int16_t replica = -1;      // -1: the entry is free
    Reuse reuse = Reuse::kOpen;     // of cached prefixes
    std::uint8_t num_pending = 0;   // transfers into its pages that are owed or under way
    bool counts_prompt = true;      // positions of its prompt are not all in the metrics
    std::int64_t counted_end = 0;   // positions below are in the metrics
    std::int64_t written = 0;       // tokens, as of the last commit
    PageRow pages;
    std::int64_t hit_tokens = 0;  // taken from the cache by this claim

    [[nodiscard]] bool is_sealed() const noexcept { return reuse == Reuse::kSealed; }
    /// Positions below may be filled: by the run that was fetched last, or as a hit. Several steps
    /// of one fetch write behind what it counted.
    [[nodiscard]] std::int64_t filled_end() const noexcept {
        return is_sealed() ? std::max(counted_end, written) : hit_tokens;
    }
};
static_assert(sizeof(void*) != 8 || sizeof(Sequence) == 128, "two cache lines");

/// The claimed sequences, by handle.
///
/// Owns: the entries; page rows keep their memory when an entry is used again.
/// Invariant: a handle finds its sequence until `release`, and never another one's: an entry whose
/// generations are used up serves no more.
/// Threads: none of its own.
/// Cost: O(1) per verb; references stay valid until the next `claim`.
class SequenceTable {
   public:
    /// Takes an entry for a sequence of that replica. May move the entries. Throws std::bad_alloc
    /// and has changed nothing where there is no memory for one.
    [[nodiscard]] SequenceHandle claim(std::int32_t replica);
    /// Frees the entry of a live sequence. The caller has given its pages back.
    void release(SequenceHandle handle) noexcept;

    /// What finding reads, for walks over many handles; void after the next `claim`.
    template <class Entry>
    struct View {
        Entry* data;
        std::size_t size;

        /// All entries, free ones too: those have replica < 0.
        [[nodiscard]] Entry* begin() const noexcept { return data; }
        [[nodiscard]] Entry* end() const noexcept { return data + size; }
        /// nullptr for a stale or foreign handle.
        [[nodiscard]] Entry* find(SequenceHandle handle) const noexcept {
            if (handle.index >= size) return nullptr;
            Entry& sequence = data[handle.index];
            const bool alive = sequence.generation == handle.generation && sequence.replica >= 0;
            return alive ? &sequence : nullptr;
        }
        /// Throws RequestNotFoundError for a stale or foreign handle; `row`: of a batch, where it
        /// is about one.
        [[nodiscard]] Entry& at(SequenceHandle handle, std::int64_t row = -1) const {
            if (Entry* sequence = find(handle)) return *sequence;
            refuse(handle, row);
        }
        /// Asks for what `find` will read.
        void prefetch(SequenceHandle handle) const noexcept {
            kvcore::prefetch(data + handle.index);
        }
    };
    using Live = View<Sequence>;
    /// What the walks of a call find sequences in; `find` and `at` are its verbs for a single one.
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

    /// Claimed sequences.
    [[nodiscard]] std::int64_t size() const noexcept {
        return static_cast<std::int64_t>(entries_.size() - free_.size() - num_retired_);
    }
    /// All entries; those with replica < 0 are free.
    [[nodiscard]] const std::vector<Sequence>& entries() const noexcept { return entries_; }

   private:
    [[noreturn]] static void refuse(SequenceHandle handle, std::int64_t row);

    std::vector<Sequence> entries_;
    std::vector<std::uint32_t> free_;
    std::size_t num_retired_ = 0;
};

}  // namespace kvcore
