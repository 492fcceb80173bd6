// SPDX-License-Identifier: Apache-2.0
// Memory of structures whose parts are visited in no order: in large caches, the page walk costs as
// much as the cache line.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdlib>
#include <new>

namespace kvcore {

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

/// The condition, with the side of the branch that walks over hundreds of rows seldom take.
[[nodiscard]] inline bool unlikely(bool condition) noexcept {
#if defined(__GNUC__)
    return __builtin_expect(static_cast<long>(condition), 0) != 0;
#else
    return condition;
#endif
}

}  // namespace kvcore
