// SPDX-License-Identifier: Apache-2.0
// The memory of the host tier, copies between this memory and the devices' pools, and copies within
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

/// The host tier's memory of one replica. All bytes of a page (K, V and scales, of all arrays of
/// the replica's devices) are one run, so all parts of a page arrive and leave together.
///
/// Owns: the memory, in huge pages if the system has them. Does not own the devices' arrays, which
/// must outlive the store. The constructor maps all of the memory. A thread keeps the next 1 GiB
/// after the last used page present, so a write there does not wait for memory.
/// Invariant: the memory has `num_pages` * `page_bytes` bytes and begins at a multiple of 4 KiB.
/// Threads: any number may copy different pages; the caller keeps copies of the same page apart.
/// Cost: the bytes, one copy per run that is contiguous in an array.
class HostStore {
   public:
    /// `caches`: the arrays of the replica's devices, a view for each array or pair of K and V.
    /// Throws std::invalid_argument for sizes below 1, and CapacityError if the system cannot map
    /// the memory.
    HostStore(std::int64_t num_pages, const std::vector<CacheView<std::byte>>& caches);
    HostStore(const HostStore&) = delete;
    HostStore& operator=(const HostStore&) = delete;
    ~HostStore();

    /// Number of pages, and bytes of a page. O(1).
    [[nodiscard]] std::int64_t num_pages() const noexcept { return num_pages_; }
    [[nodiscard]] std::int64_t page_bytes() const noexcept { return page_bytes_; }
    /// The bytes of a page [page_bytes]. O(1).
    [[nodiscard]] std::byte* page(std::int64_t id) const noexcept {
        return memory_ + id * page_bytes_;
    }

    /// Call this before other code writes pages up to `last`: makes these pages present, and lets
    /// the thread continue after them. O(1) if they are present already.
    void expect(std::int64_t last) const noexcept;

    /// Copies page pairs[i].source of the devices to page pairs[i].destination of this store. No
    /// destination occurs twice. Ids are in range.
    void store(const PagePair* pairs, std::int64_t n, int threads = 1) const;
    /// Copies page pairs[i].source of this store to page pairs[i].destination of the devices.
    void load(const PagePair* pairs, std::int64_t n, int threads = 1) const;

   private:
    /// An array of a device, and the place of its part in a page of the store.
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

/// Makes the copies within the pools of a CacheManager's replicas that the manager returns as
/// transfers.
///
/// Owns: views of the pools; the caller owns the memory.
/// Threads: any number may call `run` at a time, but each copy is passed only once.
/// Cost: the bytes. Allocates nothing.
class PageCopier {
   public:
    /// The views of a replica's pool: the arrays and the scales of each device.
    using Pool = std::vector<CacheView<std::byte>>;

    /// `pools` [num_replicas].
    explicit PageCopier(std::vector<Pool> pools) : pools_(std::move(pools)) {}

    /// Copies the first tokens of pages, in any order: in the transfers of a CacheManager, no page
    /// is both a source and a destination, and no page is a destination twice.
    void run(const PageMove* copies, std::int64_t n) const;
    /// The number of bytes that `run` would copy.
    [[nodiscard]] std::int64_t bytes_of(const PageMove* copies, std::int64_t n) const noexcept;

   private:
    std::vector<Pool> pools_;
};

}  // namespace kvcore
