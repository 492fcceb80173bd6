// SPDX-License-Identifier: Apache-2.0
// The memory of the host tier, copies between it and the pools above, and copies within a pool.
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

/// Pages of one replica in host memory: all that its devices' arrays hold of a page (K, V, scales)
/// is one run of bytes, so that the parts of a page live and die together.
///
/// Owns: the memory, in huge pages where the system has them; not the arrays, which have to live as
/// long. All of it is mapped when it is built, but 1 GiB at most is present: a thread keeps so much
/// present behind the furthest page used, so that who writes there need not wait for it.
/// Invariant: `num_pages` * `page_bytes` bytes, no more, the first at a multiple of 4 KiB.
/// Threads: any number may copy, different pages; who copies which is the caller's business.
/// Cost: the bytes, one copy per run that is contiguous in an array.
class HostStore {
   public:
    /// `caches`: what the devices of the replica have, one view for each array or pair of K and V.
    /// Throws std::invalid_argument for sizes below 1 and CapacityError when so much memory cannot
    /// be mapped.
    HostStore(std::int64_t num_pages, const std::vector<CacheView<std::byte>>& caches);
    HostStore(const HostStore&) = delete;
    HostStore& operator=(const HostStore&) = delete;
    ~HostStore();

    /// Pages, and the bytes of one. O(1).
    [[nodiscard]] std::int64_t num_pages() const noexcept { return num_pages_; }
    [[nodiscard]] std::int64_t page_bytes() const noexcept { return page_bytes_; }
    /// The bytes of a page [page_bytes]. O(1).
    [[nodiscard]] std::byte* page(std::int64_t id) const noexcept {
        return memory_ + id * page_bytes_;
    }

    /// Pages up to `last` are about to be written by somebody else: makes them present, and has the
    /// thread go on behind them. O(1) where it is far enough already.
    void expect(std::int64_t last) const noexcept;

    /// Copies page pairs[i].source of the devices to page pairs[i].destination here, none of which
    /// is named twice. Ids are in range.
    void store(const PagePair* pairs, std::int64_t n, int threads = 1) const;
    /// Copies page pairs[i].source here to page pairs[i].destination of the devices.
    void load(const PagePair* pairs, std::int64_t n, int threads = 1) const;

   private:
    /// An array of a device and where its part of a page lies.
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

/// Does the page copies that a CacheManager gives out, in the pools of its replicas.
///
/// Owns: views of the pools; their memory is the caller's.
/// Threads: `run` may be called by any number at a time, for copies that are given out once each.
/// Cost: the bytes. Allocates nothing.
class PageCopier {
   public:
    /// The caches that make up the pool of a replica: of each of its devices, and scales.
    using Pool = std::vector<CacheView<std::byte>>;

    /// `pools` [num_replicas].
    explicit PageCopier(std::vector<Pool> pools) : pools_(std::move(pools)) {}

    /// Copies the first tokens of pages, in any order. Of one CacheManager's transfers no page is
    /// a source and a destination, and none a destination twice.
    void run(const PageMove* copies, std::int64_t n) const;
    /// What `run` would move.
    [[nodiscard]] std::int64_t bytes_of(const PageMove* copies, std::int64_t n) const noexcept;

   private:
    std::vector<Pool> pools_;
};

}  // namespace kvcore
