// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace kvcore {

/// The order in which LRU would evict sampled pages, for pages that the cache has and for pages
/// that only a larger cache would have.
///
///     held pages | pages without a holder, the last released page first
///     <---------------- at most `most_pages` pages ------------------->
///
/// The distance of a page is the number of pages before it in this order: a cache that has room
/// for more pages than the distance has the page (Mattson et al., IBM Systems Journal 1970; for
/// samples: Waldspurger et al., FAST 2015). A held page has the distance 0.
///
/// Owns: an entry for each page, found by the hash of its prefix. If an entry is needed and no
/// entry is free, the last page leaves.
/// Threads: no locks of its own.
/// Cost: O(log most_pages) per verb; all memory is allocated by the constructor.
class ShadowIndex {
   public:
    using Entry = std::uint32_t;
    static constexpr Entry kNone = ~Entry{0};
    static constexpr std::int32_t kNew = -1;  // instead of a distance

    /// Throws std::bad_alloc.
    explicit ShadowIndex(std::int64_t most_pages);

    /// The entry of a page; kNone if the index does not have the page.
    [[nodiscard]] Entry find(std::uint64_t hash) const noexcept;
    [[nodiscard]] std::int64_t distance(Entry entry) const noexcept;
    [[nodiscard]] bool is_held(Entry entry) const noexcept { return entries_[entry].holders > 0; }
    [[nodiscard]] std::uint64_t hash(Entry entry) const noexcept { return entries_[entry].hash; }

    /// The distance that `note_distance` stored; kNew if the page was not in the index.
    [[nodiscard]] std::int64_t distance_before(Entry entry) const noexcept {
        return entries_[entry].distance_before;
    }

    /// Stores the distance of a page, if the index has it, before the page enters the tree. The
    /// page is the first page without a holder, unless it is held.
    void note_distance(std::uint64_t hash) noexcept;
    /// A page enters the tree: it is the first page without a holder, unless it is held. The index
    /// adds the page if it does not have it. Returns kNone if all entries are held.
    Entry enter(std::uint64_t hash) noexcept;
    /// Adds a page that the index does not have, as the first page without a holder. Returns kNone
    /// if all entries are held.
    [[nodiscard]] Entry add(std::uint64_t hash) noexcept;
    /// Makes a page without a holder the first of them.
    void touch(Entry entry) noexcept;
    /// Adds a holder.
    void hold(Entry entry) noexcept;
    /// Removes a holder. Returns true if the page has no other holder: it is now the first page
    /// without a holder.
    bool release(Entry entry) noexcept;
    /// Takes a page out. Its holders may still release it.
    void remove(Entry entry) noexcept;
    /// Takes all pages out.
    void clear() noexcept;

    /// Held pages that the index finds.
    [[nodiscard]] std::int64_t num_held() const noexcept { return num_held_; }
    [[nodiscard]] std::int64_t num_pages() const noexcept { return num_held_ + num_idle_; }
    /// Holders of all pages. O(most_pages).
    [[nodiscard]] std::int64_t count_holders() const noexcept;
    /// Throws IntegrityError. O(most_pages).
    void check_integrity() const;

   private:
    struct Page {
        std::uint64_t hash = 0;
        std::uint32_t holders = 0;
        std::uint32_t slot = 0;  // its place in the order; 0: held, or out of the index
        bool is_found = false;   // `find` finds it
        std::int32_t distance_before = kNew;
    };

    [[nodiscard]] std::size_t home_of(std::uint64_t hash) const noexcept {
        return static_cast<std::size_t>(hash >> 32) & (table_.size() - 1);
    }
    void link(Entry entry) noexcept;
    void unlink(Entry entry) noexcept;
    void place_first(Entry entry) noexcept;
    void take_place(Entry entry) noexcept;
    void add_to_sums(std::uint32_t slot, std::int32_t by) noexcept;
    [[nodiscard]] std::int64_t count_up_to(std::uint32_t slot) const noexcept;
    [[nodiscard]] std::uint32_t oldest_slot() const noexcept;
    void close_gaps() noexcept;

    std::vector<Page> entries_;
    std::vector<Entry> free_;
    std::vector<Entry> table_;        // open addressing; at most half full
    std::vector<Entry> slots_;        // [1 ..]: pages without a holder, the oldest first, with gaps
    std::vector<std::int32_t> sums_;  // a Fenwick tree that counts the pages in `slots_`
    std::uint32_t next_slot_ = 1;
    std::int64_t num_idle_ = 0;
    std::int64_t num_held_ = 0;
};

}  // namespace kvcore
