// SPDX-License-Identifier: Apache-2.0
// Memory: room that a call makes before it changes anything, and the storage of structures that
// grow to millions of parts, which are visited in no order. In large caches, the page walk costs as
// much as the cache line, and a call must not wait until a structure is copied.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

namespace kvcore {

/// Makes room for `more` items, so that adding them cannot fail. It grows in steps that keep adding
/// cheap. Throws std::bad_alloc and has changed nothing.
template <class T>
void make_room(std::vector<T>& items, std::size_t more) {
    const std::size_t needed = items.size() + more;
    if (needed > items.capacity()) items.reserve(std::max(needed, 2 * items.capacity()));
}

/// Asks for a cache line ahead of its use; any address will do.
inline void prefetch(const void* address) noexcept {
#if defined(__GNUC__)
    __builtin_prefetch(address);
#else
    (void)address;
#endif
}

struct CFree {
    void operator()(void* memory) const noexcept { std::free(memory); }
};

constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// Uninitialised memory for std::free; `bytes` is a multiple of 64. It consists of whole huge pages
/// if the system has them and `bytes` is a multiple of 2 MiB.
[[nodiscard]] inline void* allocate_chunk(std::size_t bytes) {
    const bool is_huge = bytes % kHugePage == 0;
    void* memory = std::aligned_alloc(is_huge ? kHugePage : 64, bytes);
    if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    if (is_huge) madvise(memory, bytes, MADV_HUGEPAGE);  // advice: it may be refused
#endif
    return memory;
}

/// An allocator of vectors that uses `allocate_chunk`: huge pages from 2 MiB on.
template <class T>
struct ChunkAllocator {
    using value_type = T;

    ChunkAllocator() noexcept = default;
    template <class U>
    explicit ChunkAllocator(const ChunkAllocator<U>& /*other*/) noexcept {}

    [[nodiscard]] T* allocate(std::size_t n) {
        const std::size_t bytes = n * sizeof(T);
        const std::size_t unit = bytes < kHugePage ? 64 : kHugePage;
        return static_cast<T*>(allocate_chunk((bytes + unit - 1) / unit * unit));
    }
    void deallocate(T* memory, std::size_t /*n*/) noexcept { std::free(memory); }

    friend bool operator==(const ChunkAllocator&, const ChunkAllocator&) noexcept { return true; }
    friend bool operator!=(const ChunkAllocator&, const ChunkAllocator&) noexcept { return false; }
};

/// Raw slots for objects of one type, numbered from 0, at addresses that never move.
///
/// The first blocks are small. A large cache gets blocks of one huge page, if the system has them:
/// its slots are accessed in random order, and page walks would take most of the access time.
template <class T>
class SlotArena {
   public:
    /// Returns the slot `index`, and allocates its block if needed. All slots below it have been
    /// requested before. Throws std::bad_alloc.
    [[nodiscard]] T* slot(std::size_t index) {
        const Place place = place_of(index);
        if (place.block == blocks_.size()) {
            const std::size_t bytes = place.block < kNumSmall ? kSmallBytes : kHugePage;
            blocks_.push_back(Block(static_cast<T*>(allocate_chunk(bytes))));
        }
        return blocks_[place.block].get() + place.within;
    }
    /// Returns a slot that was requested before.
    [[nodiscard]] T* at(std::size_t index) const noexcept {
        const Place place = place_of(index);
        return blocks_[place.block].get() + place.within;
    }

   private:
    using Block = std::unique_ptr<T, CFree>;  // raw memory, slots filled one by one

    static constexpr std::size_t kSmallBytes = std::size_t{24} << 10;
    static constexpr std::size_t kSmall = kSmallBytes / sizeof(T);
    static constexpr std::size_t kNumSmall = 64;
    static constexpr std::size_t kLarge = kHugePage / sizeof(T);

    struct Place {
        std::size_t block;
        std::size_t within;
    };

    [[nodiscard]] static Place place_of(std::size_t index) noexcept {
        if (index < kSmall * kNumSmall) return {index / kSmall, index % kSmall};
        const std::size_t beyond = index - kSmall * kNumSmall;
        return {kNumSmall + beyond / kLarge, beyond % kLarge};
    }

    std::vector<Block> blocks_;
};

/// Entries by number, from 0, in one contiguous block, so that an access needs no division. An
/// eviction policy keeps the data of each node in it, by node id.
///
/// It grows by realloc: for a large block the system remaps memory pages instead of copying them,
/// so a cache of a million runs does not stall when a run is added.
template <class T>
class GrowingArray {
    static_assert(std::is_trivially_copyable_v<T>, "growing moves bytes");

   public:
    /// Adds the next entry. Throws std::bad_alloc without a change.
    void push_back(const T& entry) {
        if (size_ == capacity_) grow();
        entries_.get()[size_++] = entry;
    }
    /// Adds entry number `last` if it does not exist. A caller that makes room in several arrays
    /// can repeat the call after an allocation has failed.
    void make_room(std::size_t last, const T& entry) {
        if (size_ == last) push_back(entry);
    }
    [[nodiscard]] T& operator[](std::size_t i) noexcept { return entries_.get()[i]; }
    [[nodiscard]] const T& operator[](std::size_t i) const noexcept { return entries_.get()[i]; }

   private:
    void grow() {
        const std::size_t capacity = capacity_ == 0 ? 64 : 2 * capacity_;
        void* memory = std::realloc(entries_.get(), capacity * sizeof(T));
        if (memory == nullptr) throw std::bad_alloc();
        static_cast<void>(entries_.release());
        entries_.reset(static_cast<T*>(memory));
        capacity_ = capacity;
    }

    std::unique_ptr<T, CFree> entries_;
    std::size_t size_ = 0;
    std::size_t capacity_ = 0;
};

/// An array of zeros in address space that is backed on first touch.
template <class T>
class ZeroedArray {
   public:
    /// Throws std::bad_alloc.
    explicit ZeroedArray(std::size_t n) : memory_(static_cast<T*>(std::calloc(n, sizeof(T)))) {
        if (memory_ == nullptr) throw std::bad_alloc();
    }
    [[nodiscard]] T& operator[](std::size_t i) const noexcept { return memory_.get()[i]; }

   private:
    std::unique_ptr<T[], CFree> memory_;
};

}  // namespace kvcore
