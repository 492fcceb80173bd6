// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvcore {

/// The media on which a worker keeps a page, as bits. Cache events name them GPU, CPU and STORAGE.
enum class Medium : std::uint8_t { kDevice = 1, kHost = 2, kStorage = 4 };
inline constexpr std::uint8_t kAnyMedium = 7;

/// Records which workers of a cluster hold which pages, according to their cache events, and finds
/// how much of a prompt each worker has.
///
/// A page is the low 64 bits of its key. Two pages with the same bits count as the same page; n
/// pages have n * n / 2^65 equal pairs on average.
///
/// Owns: a hash table of pages, 16 bytes per entry, at most 3 in 4 in use. If only one worker has a
/// page, the page's entry holds the worker. For more workers, the index has a row of bits by worker
/// and medium, 24 bytes per 64 workers; in an index of more than 64 workers, a list of 64 bytes
/// replaces the row for up to 15 workers.
/// Invariant: each page in the table has a worker. Threads: any number may call any method; calls
/// of `match` run concurrently. Memory: a method that cannot get memory throws std::bad_alloc; the
/// pages before the failed page are stored.
class PrefixIndex {
   public:
    static constexpr std::int32_t kMostWorkers = 4096;

    /// An index of workers 0 .. num_workers - 1. Throws std::invalid_argument unless 1 <=
    /// num_workers <= kMostWorkers.
    explicit PrefixIndex(std::int32_t num_workers);
    ~PrefixIndex();
    PrefixIndex(const PrefixIndex&) = delete;
    PrefixIndex& operator=(const PrefixIndex&) = delete;

    [[nodiscard]] std::int32_t num_workers() const noexcept;
    /// Pages that at least one worker has. O(1).
    [[nodiscard]] std::int64_t num_pages() const;
    /// Pages of a worker, each counted once. Throws std::out_of_range for an unknown worker. O(1).
    [[nodiscard]] std::int64_t num_pages(std::int32_t worker) const;
    /// Bytes that the index has allocated. O(1).
    [[nodiscard]] std::int64_t num_bytes() const;

    /// Adds pages [n] of a worker on a medium; pages that it already has on that medium change
    /// nothing. Throws std::out_of_range for an unknown worker. O(n), amortised.
    void store(std::int32_t worker, const std::uint64_t* pages, std::size_t n, Medium medium);
    /// Removes pages [n] of a worker on a medium; pages that it does not have on that medium change
    /// nothing. Throws as `store`. O(n).
    void remove(std::int32_t worker, const std::uint64_t* pages, std::size_t n, Medium medium);
    /// Removes all pages of a worker. Throws as `store`. O(pages of all workers).
    void clear(std::int32_t worker);

    /// Writes to `held` [num_workers] how many of the pages [n] of a prompt each worker has, up to
    /// the first page that it lacks on all `media`, a set of Medium bits. O(n), and O(num_workers /
    /// 64) for each page that several workers have.
    void match(const std::uint64_t* pages, std::size_t n, std::uint8_t media,
               std::int32_t* held) const;

    /// Throws std::logic_error with the law that is broken. O(size of the index).
    void check_integrity() const;

   private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace kvcore
