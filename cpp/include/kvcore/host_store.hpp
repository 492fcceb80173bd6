// SPDX-License-Identifier: Apache-2.0
// The memory of the host tier, copies between this memory and the device's pools, and copies within
// a pool.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kvcore/page_bytes.hpp"
#include "kvcore/page_moves.hpp"

namespace kvcore {

class PresentAhead;

/// Pages of one replica in host memory. Each page is one run of bytes: its K, V and scales from all
/// arrays of the replica's devices, so the parts of a page are stored and evicted together.
///
/// Owns: the memory, in huge pages if the system has them; not the arrays, which must outlive the
/// store. The constructor maps all of the memory, but makes only the first 1 GiB present. A thread
/// keeps about 1 GiB present ahead of the highest page in use, so that a write need not wait for
/// the system.
/// Invariant: `num_pages` * `page_bytes` bytes, no more, the first at a multiple of 4 KiB.
/// Threads: any number may copy at a time, but different pages; the caller divides the pages among
/// them.
/// Cost: the bytes, one copy per run that is contiguous in an array.
class HostStore {
   public:
    /// `caches`: the arrays of the replica's devices, one view for each array or pair of K and V.
    /// Throws std::invalid_argument for sizes below 1, and CapacityError if the memory cannot be
    /// mapped.
    HostStore(std::int64_t num_pages, const std::vector<CacheView<std::byte>>& caches);
    HostStore(const HostStore&) = delete;
    HostStore& operator=(const HostStore&) = delete;
    ~HostStore();

    /// The number of pages, and the bytes of a page. O(1).
    [[nodiscard]] std::int64_t num_pages() const noexcept { return num_pages_; }
    [[nodiscard]] std::int64_t page_bytes() const noexcept { return page_bytes_; }
    /// The bytes of a page [page_bytes]. O(1).
    [[nodiscard]] std::byte* page(std::int64_t id) const noexcept {
        return memory_ + id * page_bytes_;
    }

    /// Makes pages up to `last` present, which a caller will write directly, and lets the thread
    /// continue with the pages after them. Does nothing if `last` is more than 1 GiB past the
    /// present memory. O(1) if the pages are already present.
    void expect(std::int64_t last) const noexcept;

    /// Copies page pairs[i].source of the devices to page pairs[i].destination of this store. No
    /// page is a destination twice. Ids are in range.
    void store(const PagePair* pairs, std::int64_t n, int threads = 1) const;
    /// Copies page pairs[i].source of this store to page pairs[i].destination of the devices.
    void load(const PagePair* pairs, std::int64_t n, int threads = 1) const;

   private:
    /// An array of a device, and the place of its part of a page in this store.
    struct Part {
        CacheView<std::byte> device;
        CacheView<std::byte> host;
    };

    std::int64_t num_pages_;
    std::int64_t page_bytes_ = 0;
    std::byte* memory_ = nullptr;
    std::unique_ptr<PresentAhead> ahead_;
    std::vector<Part> parts_;
};

/// Makes the page copies that a CacheManager gives out, in the pools of its replicas.
///
/// Owns: views of the pools; their memory is the caller's.
/// Threads: any number may call `run` at a time, each for its own copies.
/// Cost: the bytes. Allocates nothing.
class PageCopier {
   public:
    /// The caches that are the pool of a replica: the arrays of each of its devices, and their
    /// scales.
    using Pool = std::vector<CacheView<std::byte>>;

    /// `pools` [num_replicas].
    explicit PageCopier(std::vector<Pool> pools) : pools_(std::move(pools)) {}

    /// Copies the first tokens of pages, in any order: no page is both a source and a destination,
    /// and no page is a destination twice, as in the transfers of a CacheManager.
    void run(const PageMove* copies, std::int64_t n) const;
    /// The number of bytes that `run` would copy.
    [[nodiscard]] std::int64_t bytes_of(const PageMove* copies, std::int64_t n) const noexcept;

   private:
    std::vector<Pool> pools_;
};

}  // namespace kvcore
