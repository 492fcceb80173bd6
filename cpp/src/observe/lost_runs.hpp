// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kvcore/misses.hpp"
#include "kvcore/types.hpp"
#include "support/memory.hpp"
#include "tree/token_hash.hpp"

namespace kvcore {

/// The runs of pages that left a replica's trees. Pages are compared by hashes, so two different
/// pages are taken for equal once in 2^32 comparisons.
///
/// A run of n pages is a record and n tags, the hashes of its pages:
///
///     tags     ... | t0 t1 t2 t3 | t4 t5 | ...       a ring, 4 bytes per page
///     records  {key, begin, pages, next_part, ...}    a ring, 32 bytes per run
///     heads    key -> the newest record of a chain    4 bytes, for each record four heads
///
/// The key is the hash of the prefix up to the end of the run's first page. `next_part` is the run
/// that continued this run and left the tree before it.
///
/// Owns: the tags of the last `most_pages` pages, and the records of their runs.
/// Invariant: a record is live while the ring has all tags of its run. A chain has the records with
/// keys of one hash, the newest first, and ends at a record that is not in the ring any more. Each
/// live record with a key is in a chain, unless the pages of its run left again later.
/// Memory: `add` and `take` throw std::bad_alloc and have not recorded the run.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: `add` O(pages). A run enters its chain some calls after `index`, when the head is in the
/// CPU cache. `take` reads a chain, of 1/4 of a record on average, and hashes the pages that it
/// finds.
class LostRuns {
   public:
    /// The number of a run; 0 stands for no run.
    using Number = std::uint32_t;

    struct Loss {
        Misses::Reason cause = Misses::kEvicted;
        std::int64_t time = 0;  // ns
    };
    struct Found {
        std::int32_t num_pages = 0;  // equal pages; 0: no run is found
        Loss loss;
    };

    LostRuns(std::int32_t page_size, std::int64_t most_pages)
        : page_size_(page_size), most_pages_(static_cast<std::uint32_t>(most_pages)) {}

    // ---- hashes of prefixes: the hash of a name, extended page by page -------------------------

    [[nodiscard]] static std::uint32_t tag_of(std::uint64_t hash) noexcept {
        return static_cast<std::uint32_t>(hash >> 32);
    }
    [[nodiscard]] std::uint32_t tag_of(const TokenId* page) const noexcept {
        return tag_of(hash_tokens(0, page, page_size_));
    }
    [[nodiscard]] static std::uint64_t hash_of_name(std::string_view name) noexcept;
    [[nodiscard]] static std::uint64_t extended(std::uint64_t before, std::uint32_t tag) noexcept {
        constexpr std::uint64_t kMul = 0x9e3779b97f4a7c15U;
        return folded_product(before ^ tag, kMul);
    }
    [[nodiscard]] std::uint64_t extended(std::uint64_t before, const TokenId* tokens,
                                         std::int32_t n) const noexcept;

    // ---- runs ----------------------------------------------------------------------------------

    /// Adds a run of n pages with the tags tag_at(i), i = 0 .. n - 1. `take` finds it after
    /// `index`, or by its number.
    template <class TagAt>
    [[nodiscard]] Number add(std::int32_t n, Loss loss, Number next_part, const TagAt& tag_at) {
        const Record run = begin_run(n, loss, next_part);
        std::uint32_t* const tags = tags_.data();
        const std::size_t last = tags_.size() - 1;
        for (std::uint32_t i = 0; i < run.num_pages; ++i) {
            tags[(run.begin + i) & last] = tag_at(static_cast<std::int32_t>(i));
        }
        return push_added(run);
    }
    /// Lets `take` find a run after the prefix with this hash. Does nothing for runs that are not
    /// remembered any more. Throws std::bad_alloc, except for the run that was added last.
    void index(Number number, std::uint64_t before);
    /// Finds the run that left last, of the runs that begin with the page `tokens`, of this tag,
    /// after the prefix with the hash `path`, and of the runs `ends`. Extends `path` by its pages
    /// that are equal to `tokens` [n], and cuts the runs that begin like it, so that a later call
    /// finds their other pages.
    [[nodiscard]] Found take(std::uint64_t& path, std::uint32_t first_tag, const TokenId* tokens,
                             std::int32_t n, Number first_end, Number second_end);
    /// Prefetches the memory that `take` reads first.
    void prefetch(std::uint64_t path, std::uint32_t first_tag) noexcept {
        kvcore::prefetch(&head_of(extended(path, first_tag)));
    }
    [[nodiscard]] bool is_empty() const noexcept { return oldest_ == next_; }
    /// Throws IntegrityError if a record has no pages, or a chain is not in order. O(records).
    void check_integrity() const;
    [[nodiscard]] std::int64_t num_pages() const noexcept {
        return num_added_ < most_pages_ ? static_cast<std::int64_t>(num_added_) : most_pages_;
    }

   private:
    struct Record {
        std::uint64_t key = 0;    // 0: not in the index
        std::int64_t loss = 0;    // 16 * time + cause
        std::uint32_t begin = 0;  // of its tags
        std::uint32_t num_pages = 0;
        Number next_part = 0;
        Number next = 0;  // in the chain
    };
    static_assert(sizeof(Record) == 32, "a cache line has two records");

    // Pages that are hashed at once.
    static constexpr std::int32_t kBlock = 32;
    // Runs that begin alike and are compared.
    static constexpr std::size_t kMostCompared = 16;

    [[nodiscard]] std::uint32_t head() const noexcept {
        return static_cast<std::uint32_t>(num_added_);
    }
    [[nodiscard]] std::uint32_t& tag(std::uint32_t at) noexcept {
        return tags_[at & (tags_.size() - 1)];
    }
    [[nodiscard]] Record& record(Number number) noexcept {
        return records_[number & (records_.size() - 1)];
    }
    [[nodiscard]] Number& head_of(std::uint64_t key) noexcept {
        return heads_[key & (heads_.size() - 1)];
    }
    [[nodiscard]] bool has_record(Number number) const noexcept {
        return number != 0 && number - oldest_ < next_ - oldest_;
    }
    [[nodiscard]] bool is_live(Number number) noexcept {
        return has_record(number) && head() - record(number).begin <= most_pages_;
    }
    void link(Number number) noexcept;
    void wait(Number number) noexcept;
    void link_first_waiting() noexcept;
    void link_waiting(std::uint64_t key) noexcept;
    void make_room(std::uint32_t pages);
    void grow_records();
    [[nodiscard]] Record begin_run(std::int32_t n, Loss loss, Number next_part);
    [[nodiscard]] Number push_added(const Record& run) noexcept;
    Number push(const Record& record) noexcept;
    [[nodiscard]] std::int32_t num_equal(std::uint64_t& path, const TokenId* tokens, std::int32_t n,
                                         std::uint32_t begin) noexcept;
    void cut(Number number, Number like, std::int32_t most, std::uint64_t key);
    void supersede(std::uint64_t key, Number newest) noexcept;

    const std::int32_t page_size_;
    const std::uint32_t most_pages_;
    std::vector<std::uint32_t> tags_;  // the sizes of all three are powers of two
    std::vector<Record, ChunkAllocator<Record>> records_;
    std::vector<Number, ChunkAllocator<Number>> heads_;
    std::uint64_t num_added_ = 0;  // pages
    Number oldest_ = 1;
    Number next_ = 1;
    std::array<Number, 4> waiting_{};  // a ring of runs that enter their chains next
    std::uint32_t first_waiting_ = 0;
    std::uint32_t num_waiting_ = 0;
};

}  // namespace kvcore
