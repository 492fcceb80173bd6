// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvcore {

/// Where a worker keeps a page, as bits: the names that events give these media are GPU, CPU and
/// STORAGE.
enum class Medium : std::uint8_t { kDevice = 1, kHost = 2, kStorage = 4 };
inline constexpr std::uint8_t kAnyMedium = 7;

/// Which workers of a cluster hold which pages, as their cache events say; and so how much of a
/// prompt each of them has.
///
/// A page is the low 64 bits of its key: two pages with the same ones are taken for one, which
/// happens to one pair in n * n / 2^65 of n pages.
///
/// Owns: a hash table of pages, 16 bytes an entry, at most 3 in 4 in use. The workers of a page
/// that one worker has are in its entry. Those of others are a row of bits by worker and medium, of
/// 24 bytes per 64 workers; with more than 64 workers, up to 15 are a list of 64 bytes instead.
/// Invariant: a page that nobody has is not in the table. Threads: any number may call any method;
/// matches run together. Memory: a verb that cannot get it throws std::bad_alloc; the pages in
/// front of the one that it failed at are stored.
class PrefixIndex {
   public:
    static constexpr std::int32_t kMostWorkers = 4096;

    /// Of workers 0 .. num_workers - 1. Throws std::invalid_argument unless 1 <= num_workers <=
    /// kMostWorkers.
    explicit PrefixIndex(std::int32_t num_workers);
    ~PrefixIndex();
    PrefixIndex(const PrefixIndex&) = delete;
    PrefixIndex& operator=(const PrefixIndex&) = delete;

    [[nodiscard]] std::int32_t num_workers() const noexcept;
    /// Pages that some worker has. O(1).
    [[nodiscard]] std::int64_t num_pages() const;
    /// Pages of a worker, each once. Throws std::out_of_range for another worker. O(1).
    [[nodiscard]] std::int64_t num_pages(std::int32_t worker) const;
    /// Bytes that the index has taken. O(1).
    [[nodiscard]] std::int64_t num_bytes() const;

    /// The worker has pages [n] on a medium; those that it has there already change nothing. Throws
    /// std::out_of_range for another worker. O(n), amortised.
    void store(std::int32_t worker, const std::uint64_t* pages, std::size_t n, Medium medium);
    /// It has them there no more; those that it has not change nothing. Throws as `store`. O(n).
    void remove(std::int32_t worker, const std::uint64_t* pages, std::size_t n, Medium medium);
    /// It has nothing. Throws as `store`. O(pages of all workers).
    void clear(std::int32_t worker);

    /// held [num_workers]: of the pages [n] of a prompt, how many each worker has up to the first
    /// that it has on none of `media`, Medium as bits. O(n), and O(num_workers / 64) for each page
    /// that several workers have.
    void match(const std::uint64_t* pages, std::size_t n, std::uint8_t media,
               std::int32_t* held) const;

    /// Throws std::logic_error, with the law that is broken. O(everything).
    void check_integrity() const;

   private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace kvcore
