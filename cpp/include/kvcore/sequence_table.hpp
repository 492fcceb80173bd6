// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/types.hpp"

namespace kvcore {

struct TreeNode;

/// What a sequence may still take out of the cache.
enum class Reuse : std::uint8_t {
    kOpen,      // a longer prefix
    kDeclined,  // the same, but no page in part behind the present one: it was needed itself
    kSealed,    // nothing: it was fetched or written
};

/// A claimed sequence: its page row and what is known about each part of it.
///
/// Columns of `pages`: [0, committed) are in the prefix tree, pinned at `node`; [committed, end)
/// are the sequence's own. A page in `kept` lies among the committed columns and is its own all the
/// same (deduplication off: the tree has a twin). Own pages below `frozen` may also be those of
/// forks, as their reference counts tell; those from there on are nobody else's.
struct alignas(64) Sequence {
    // What a decode step reads, in one cache line:
    std::uint32_t generation = 1;
    std::int16_t replica = -1;      // -1: the slot is free
    Reuse reuse = Reuse::kOpen;     // of cached prefixes
    std::uint8_t num_pending = 0;   // transfers into its pages that are owed or under way
    std::uint32_t batch_stamp = 0;  // the last batch it was seen in: finds duplicates
    std::uint32_t row_version = 0;  // changes when a page is replaced or dropped, not when added
    std::int32_t committed = 0;
    std::int32_t frozen = 0;  // >= committed: columns below are not written in place
    std::vector<BlockId> pages;
    std::int64_t counted_end = 0;  // positions below are in the metrics
    std::int64_t written = 0;      // tokens, as of the last commit
    // The rest:
    TreeNode* node = nullptr;     // where the committed prefix ends; nullptr before a reservation
    std::int64_t hit_tokens = 0;  // taken from the cache by this claim
    std::vector<std::int32_t> kept;  // ascending columns
    std::int64_t counted_from = 0;   // of those positions, what the last metrics reset left out
    std::uint32_t count_epoch = 0;   // the last metrics reset it knows of
    std::uint32_t storing = 0;       // number of its flight to the host tier; 0: none
    TreeNode* host_node = nullptr;   // where its prefix in the host tier ends; nullptr: unknown

    [[nodiscard]] std::int32_t num_pages() const noexcept {
        return static_cast<std::int32_t>(pages.size());
    }
    [[nodiscard]] bool is_sealed() const noexcept { return reuse == Reuse::kSealed; }
};

/// The claimed sequences, by handle.
///
/// Owns: the slots; page rows keep their memory when a slot is used again.
/// Invariant: a handle finds its sequence until `release`, and never another one's: a slot whose
/// generations are used up serves no more.
/// Threads: none of its own.
/// Cost: O(1) per verb; references stay valid until the next `claim`.
class SequenceTable {
   public:
    /// Takes a slot for a sequence of that replica. May move the slots. Throws std::bad_alloc and
    /// has changed nothing where there is no memory for one.
    [[nodiscard]] SequenceHandle claim(std::int32_t replica);
    /// Frees the slot of a live sequence. The caller has given its pages back.
    void release(SequenceHandle handle) noexcept;

    /// What finding reads, for walks over many handles; void after the next `claim`.
    struct Slots {
        Sequence* data;
        std::size_t size;

        /// nullptr for a stale or foreign handle.
        [[nodiscard]] Sequence* find(SequenceHandle handle) const noexcept {
            if (handle.index >= size) return nullptr;
            Sequence& sequence = data[handle.index];
            const bool alive = sequence.generation == handle.generation && sequence.replica >= 0;
            return alive ? &sequence : nullptr;
        }
        /// Throws RequestNotFoundError for a stale or foreign handle; `row`: of a batch, where it
        /// is about one.
        [[nodiscard]] Sequence& at(SequenceHandle handle, std::int64_t row = -1) const {
            if (Sequence* sequence = find(handle)) return *sequence;
            refuse(handle, row);
        }
        /// Asks for what `find` will read.
        void prefetch(SequenceHandle handle) const noexcept {
#if defined(__GNUC__)
            __builtin_prefetch(data + handle.index);
#else
            (void)handle;
#endif
        }
    };
    /// What the walks of a call find sequences in; `find` and `at` are its verbs for a single one.
    [[nodiscard]] Slots live() noexcept { return {slots_.data(), slots_.size()}; }
    [[nodiscard]] Sequence* find(SequenceHandle handle) noexcept { return live().find(handle); }
    [[nodiscard]] Sequence& at(SequenceHandle handle) { return live().at(handle); }

    /// Claimed sequences.
    [[nodiscard]] std::int64_t size() const noexcept {
        return static_cast<std::int64_t>(slots_.size() - free_.size() - num_retired_);
    }
    /// All slots; those with replica < 0 are free.
    [[nodiscard]] const std::vector<Sequence>& slots() const noexcept { return slots_; }

   private:
    [[noreturn]] static void refuse(SequenceHandle handle, std::int64_t row);

    std::vector<Sequence> slots_;
    std::vector<std::uint32_t> free_;
    std::size_t num_retired_ = 0;
};

}  // namespace kvcore
