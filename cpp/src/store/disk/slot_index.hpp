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

/// Where a slot lies: a directory, and the slot's number in it.
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

/// Which slot has which page, and which slot the next page gets.
///
/// Owns: a record for each slot; no files.
/// Invariant: a slot is free, busy (its bytes change; nobody finds it), stored (found by its key,
/// in the order of use), doomed (stored before, still being read, found no more) or broken (a write
/// or the last read of it failed; nobody gets it).
/// Threads: none of its own; the store locks around it.
/// Cost: O(1), `take` O(pages being read).
class SlotIndex {
   public:
    explicit SlotIndex(std::size_t num_directories);

    /// Room for so many more slots of a directory: `add` and `free` need no memory then.
    void make_room(std::size_t directory, std::int64_t slots);
    /// A slot that its directory has from now on, busy.
    SlotId add(SlotPlace place) noexcept;
    [[nodiscard]] SlotPlace place_of(SlotId slot) const noexcept { return at(slot).place; }

    [[nodiscard]] SlotId find(const StoreKey& key) const noexcept;
    [[nodiscard]] std::uint64_t parts_of(SlotId slot) const noexcept { return at(slot).parts; }
    [[nodiscard]] std::int64_t payload_of(SlotId slot) const noexcept { return at(slot).payload; }

    /// A use of a stored page.
    void touch(SlotId slot) noexcept;
    /// A use, and the page stays until `unpin`.
    void pin(SlotId slot) noexcept;
    /// Ends it. True: the slot was doomed and this was its last reader; it is busy now.
    [[nodiscard]] bool unpin(SlotId slot) noexcept;

    /// Keys that are being written, which nobody else writes meanwhile. False: it is one already.
    [[nodiscard]] bool begin_write(const StoreKey& key) { return writing_.insert(key).second; }
    void end_write(const StoreKey& key) noexcept { writing_.erase(key); }

    /// A free slot of a directory, now busy; kNoSlot if there is none.
    [[nodiscard]] SlotId take_free(std::size_t directory) noexcept;
    /// The slot of the page used least recently that nobody reads, now busy; kNoSlot if all are.
    [[nodiscard]] SlotId evict() noexcept;
    /// A busy slot can be found. Returns the slot that had the key before, now without it and busy
    /// or doomed, or kNoSlot; `is_busy` says which. Throws std::bad_alloc and has changed nothing.
    SlotId publish(SlotId slot, const StoreKey& key, std::uint64_t parts, std::int64_t payload,
                   bool& is_busy);
    /// A stored page is found no more. True: the slot is busy; otherwise doomed.
    [[nodiscard]] bool drop(SlotId slot) noexcept;
    /// No page is found any more; slots that nobody reads are free. Returns how many pages there
    /// were. O(pages).
    std::int64_t clear() noexcept;
    /// A busy slot is free, or broken if it is suspect.
    void free(SlotId slot) noexcept;
    /// Whether the last read or write of a slot failed.
    void set_suspect(SlotId slot, bool is_suspect) noexcept { at(slot).is_suspect = is_suspect; }
    [[nodiscard]] bool is_suspect(SlotId slot) const noexcept { return at(slot).is_suspect; }
    /// Broken slots are free again. O(slots).
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
