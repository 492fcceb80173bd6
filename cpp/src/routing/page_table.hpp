// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "support/memory.hpp"

namespace kvcore {

/// A hash table from pages to words, 0 for absent pages. It probes linearly and keeps no trace of
/// removed pages. The pages are already hashes. Not thread-safe.
class PageTable {
   public:
    struct Entry {
        std::uint64_t page = 0;
        std::uint64_t value = 0;  // 0: the entry is free
    };

    PageTable() : entries_(kFewest) {}

    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] std::size_t num_bytes() const noexcept { return entries_.size() * sizeof(Entry); }

    void prefetch(std::uint64_t page) const noexcept { kvcore::prefetch(&entries_[home(page)]); }
    [[nodiscard]] std::uint64_t find(std::uint64_t page) const noexcept {
        return entries_[place(page)].value;
    }
    /// The value of a page, which is added if it is absent. The caller sets a value that is not 0,
    /// or erases the page. Invalid after the next call. Throws std::bad_alloc.
    std::uint64_t& at(std::uint64_t page) {
        if ((size_ + 1) * 4 > entries_.size() * 3) grow();
        Entry& entry = entries_[place(page)];
        size_ += entry.value == 0 ? 1 : 0;
        entry.page = page;
        return entry.value;
    }
    /// The value of a page; nullptr if the page is absent.
    [[nodiscard]] std::uint64_t* known(std::uint64_t page) noexcept {
        Entry& entry = entries_[place(page)];
        return entry.value == 0 ? nullptr : &entry.value;
    }
    /// Erases a page. `value` was returned by `at` or `known`; it may be changed since.
    void erase(const std::uint64_t* value) noexcept {
        const auto* entry = reinterpret_cast<const Entry*>(reinterpret_cast<const char*>(value) -
                                                           offsetof(Entry, value));
        erase_at(static_cast<std::size_t>(entry - entries_.data()));
    }

    template <class Visit>
    void for_each(const Visit& visit) const {
        for (const Entry& entry : entries_) {
            if (entry.value != 0) visit(entry.page, entry.value);
        }
    }
    /// Calls update(value) for each page; a page is erased if the call sets its value to 0.
    template <class Update>
    void update_all(const Update& update) noexcept {
        // Goes all the way round from a free entry, so that entries moved by an erasure are visited
        // later.
        std::size_t start = 0;
        while (entries_[start].value != 0) ++start;
        for (std::size_t n = 0; n < entries_.size(); ++n) {
            const std::size_t i = (start + n) & mask();
            while (entries_[i].value != 0) {
                update(entries_[i].value);
                if (entries_[i].value != 0) break;
                erase_at(i);
            }
        }
    }

    /// Gives memory back if most of it is free; changes nothing if it cannot get smaller memory.
    void shrink() noexcept {
        std::size_t wanted = kFewest;
        while (size_ * 8 > wanted * 3) wanted *= 2;
        if (wanted * 2 >= entries_.size()) return;
        try {
            move_to(wanted);
        } catch (const std::bad_alloc&) {
            return;
        }
    }

   private:
    using Entries = std::vector<Entry, ChunkAllocator<Entry>>;

    static constexpr std::size_t kFewest = 64;

    [[nodiscard]] std::size_t mask() const noexcept { return entries_.size() - 1; }
    // Hashes from other programs may be poor in their low bits.
    [[nodiscard]] std::size_t home(std::uint64_t page) const noexcept {
        const std::uint64_t mixed = page * 0x9E3779B97F4A7C15U;
        return static_cast<std::size_t>(mixed ^ (mixed >> 32U)) & mask();
    }
    [[nodiscard]] std::size_t place(std::uint64_t page) const noexcept {
        std::size_t i = home(page);
        while (entries_[i].value != 0 && entries_[i].page != page) i = (i + 1) & mask();
        return i;
    }
    // Moves later entries up, so that every entry is still reached without passing a free entry.
    void erase_at(std::size_t hole) noexcept {
        --size_;
        for (std::size_t i = (hole + 1) & mask(); entries_[i].value != 0; i = (i + 1) & mask()) {
            const std::size_t passed = (i - home(entries_[i].page)) & mask();
            if (passed < ((i - hole) & mask())) continue;
            entries_[hole] = entries_[i];
            hole = i;
        }
        entries_[hole].value = 0;
    }
    void grow() { move_to(2 * entries_.size()); }
    void move_to(std::size_t num_entries) {
        Entries old(num_entries);
        old.swap(entries_);
        for (const Entry& entry : old) {
            if (entry.value != 0) entries_[place(entry.page)] = entry;
        }
    }

    Entries entries_;
    std::size_t size_ = 0;
};

}  // namespace kvcore
