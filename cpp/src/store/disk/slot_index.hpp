// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "kvcore/disk_store.hpp"

namespace kvcore {

using SlotId = std::int64_t;
constexpr SlotId kNoSlot = -1;

/// The place of a slot: a directory, and the number of the slot in it.
struct SlotPlace {
    std::int32_t directory;
    std::int64_t slot;
};

struct StoreKeyHash {
    [[nodiscard]] std::size_t operator()(const StoreKey& key) const noexcept {
        std::uint64_t words[4];
        std::memcpy(words, key.bytes.data(), sizeof words);
        std::uint64_t hash = 0;
        for (const std::uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
        return hash ^ (hash >> 32);
    }
};

/// The map from pages to slots, which also selects the slot for the next page.
///
/// Owns: a record for each slot; no files.
/// Invariant: a slot is free, busy (its bytes change; no lookup finds it), stored (found by its
/// key, in the order of use), doomed (stored before, still being read, no longer found) or broken
/// (a write or the last read of it failed; it is not given out).
/// Threads: no locks of its own; the store locks around it.
/// Cost: O(1), `evict` O(pages being read).
class SlotIndex {
   public:
    explicit SlotIndex(std::size_t num_directories);

    /// Reserves memory for `slots` more slots of a directory, so that `add` and `free` need no
    /// memory.
    void make_room(std::size_t directory, std::int64_t slots);
    /// Adds a new slot of a directory; the slot is busy.
    SlotId add(SlotPlace place) noexcept;
    [[nodiscard]] SlotPlace place_of(SlotId slot) const noexcept { return at(slot).place; }

    [[nodiscard]] SlotId find(const StoreKey& key) const noexcept;
    [[nodiscard]] std::uint64_t parts_of(SlotId slot) const noexcept { return at(slot).parts; }
    [[nodiscard]] std::int64_t payload_of(SlotId slot) const noexcept { return at(slot).payload; }

    /// Marks a stored page as used.
    void touch(SlotId slot) noexcept;
    /// Marks a stored page as used, and keeps it until `unpin`.
    void pin(SlotId slot) noexcept;
    /// Ends a pin. Returns true if this was the last reader of a doomed slot, which is busy now.
    [[nodiscard]] bool unpin(SlotId slot) noexcept;

    /// Marks a key as being written, which no other thread writes meanwhile. Returns false if the
    /// key is already marked.
    [[nodiscard]] bool begin_write(const StoreKey& key) { return writing_.insert(key).second; }
    void end_write(const StoreKey& key) noexcept { writing_.erase(key); }

    /// Takes a free slot of a directory, which is busy now; kNoSlot if no slot is free.
    [[nodiscard]] SlotId take_free(std::size_t directory) noexcept;
    /// Evicts the least recently used page that is not being read. Returns its slot, which is busy
    /// now; kNoSlot if all pages are being read.
    [[nodiscard]] SlotId evict() noexcept;
    /// Makes a busy slot findable by `key`. Returns the slot that had the key before, or kNoSlot;
    /// that slot is busy now if `is_busy`, otherwise doomed. Changes nothing if it throws
    /// std::bad_alloc.
    SlotId publish(SlotId slot, const StoreKey& key, std::uint64_t parts, std::int64_t payload,
                   bool& is_busy);
    /// Removes a stored page from the lookup. Returns true if its slot is busy now, false if it is
    /// doomed.
    [[nodiscard]] bool drop(SlotId slot) noexcept;
    /// Removes all pages from the lookup, and frees the slots that are not being read. Returns the
    /// number of removed pages. O(pages).
    std::int64_t clear() noexcept;
    /// Frees a busy slot; a suspect slot becomes broken.
    void free(SlotId slot) noexcept;
    /// Records whether the last read or write of a slot failed.
    void set_suspect(SlotId slot, bool is_suspect) noexcept { at(slot).is_suspect = is_suspect; }
    [[nodiscard]] bool is_suspect(SlotId slot) const noexcept { return at(slot).is_suspect; }
    /// Frees the broken slots. O(slots).
    void free_broken() noexcept;

    [[nodiscard]] std::int64_t num_slots() const noexcept {
        return static_cast<std::int64_t>(records_.size());
    }
    [[nodiscard]] std::int64_t num_stored() const noexcept {
        return static_cast<std::int64_t>(by_key_.size());
    }
    [[nodiscard]] std::int64_t num_broken() const noexcept { return num_broken_; }
    void check_integrity() const;

   private:
    enum class State : std::uint8_t { kFree, kBusy, kStored, kDoomed, kBroken };
    struct Record {
        SlotPlace place;
        StoreKey key;
        std::uint64_t parts;
        std::int64_t payload;
        SlotId newer;
        SlotId older;
        std::int32_t pins;
        State state;
        bool is_suspect;
    };

    [[nodiscard]] Record& at(SlotId slot) noexcept {
        return records_[static_cast<std::size_t>(slot)];
    }
    [[nodiscard]] const Record& at(SlotId slot) const noexcept {
        return records_[static_cast<std::size_t>(slot)];
    }
    [[nodiscard]] bool retire(SlotId slot) noexcept;
    void link(SlotId slot) noexcept;
    void unlink(SlotId slot) noexcept;

    std::vector<Record> records_;
    std::unordered_map<StoreKey, SlotId, StoreKeyHash> by_key_;
    std::unordered_set<StoreKey, StoreKeyHash> writing_;
    std::vector<std::vector<SlotId>> free_;  // by directory, with room for every slot
    std::vector<std::size_t> num_of_;        // slots of each directory
    std::int64_t num_broken_ = 0;
    SlotId newest_ = kNoSlot;
    SlotId oldest_ = kNoSlot;
};

}  // namespace kvcore
