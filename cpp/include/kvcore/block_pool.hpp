// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>

#include "kvcore/types.hpp"

namespace kvcore {

/// Called with the ids of a pool that have lost their last reference, before they are handed out
/// again.
class PoolListener {
   public:
    PoolListener() = default;
    PoolListener(const PoolListener&) = delete;
    PoolListener& operator=(const PoolListener&) = delete;
    virtual ~PoolListener() = default;

    /// `ids` [n] are free. The listener must not use the pool.
    virtual void freed(const BlockId* ids, std::int64_t n) noexcept = 0;
};

/// Reference counts of pages, over the ids first .. first + num_blocks - 1.
///
/// Owns: one count per id and the stack of free ids. Both are reserved as address space at
/// construction and touched only when ids come into use, so a pool of a million pages is built in
/// microseconds.
/// Invariant: an id is on the free stack (or was never handed out) exactly when its count is 0.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(1) per id and verb, no allocation after construction.
class BlockPool {
   public:
    /// `first`: the pool's first id; smaller ids are not in the pool. Throws std::invalid_argument
    /// unless 1 <= num_blocks, 0 <= first and first + num_blocks <= 2^31 - 1.
    explicit BlockPool(std::int64_t num_blocks, BlockId first = 0);

    /// Sets the listener from now on; nullptr removes it. The pool does not own the listener.
    void set_listener(PoolListener* listener) noexcept { listener_ = listener; }

    /// Number of ids in the pool. O(1).
    [[nodiscard]] std::int64_t num_blocks() const noexcept { return num_blocks_; }
    /// The first id, and the last id plus 1: an array indexed by page id needs `end_id()` elements.
    /// O(1).
    [[nodiscard]] BlockId first_id() const noexcept { return first_; }
    [[nodiscard]] std::int64_t end_id() const noexcept { return end_; }
    /// Number of ids without a reference. O(1).
    [[nodiscard]] std::int64_t num_free() const noexcept {
        return num_recycled_ + (end_ - next_fresh_);
    }

    /// Takes `n` pages with one reference each and writes their ids to `out` [n]. Pages freed last
    /// are handed out first; among pages freed by one call, the last page comes first: after a
    /// sequence frees its pages 1, 2, 3, they are handed out as 3, 2, 1. Returns false, and changes
    /// nothing, if fewer than `n` pages are free.
    [[nodiscard]] bool allocate(std::int64_t n, BlockId* out) noexcept;

    /// Writes the free ids to `out` [num_free()], in the order in which `allocate` hands them out.
    /// O(ids).
    void copy_free(BlockId* out) const noexcept;

    /// Adds one reference to each of `ids` [n]. Throws InvalidHandleError for an id that is free or
    /// out of range; nothing has changed after the error.
    void share(const BlockId* ids, std::int64_t n);

    /// Drops one reference of each of `ids` [n]; a page without references is free again. Throws
    /// InvalidHandleError for an id that is already free (a double free) or out of range; nothing
    /// has changed after the error.
    void free(const BlockId* ids, std::int64_t n);

    /// Number of references to a page; 0 if free. Throws InvalidHandleError for an id out of range.
    [[nodiscard]] std::uint32_t ref_count(BlockId id) const;

    /// Throws IntegrityError unless the invariant holds. O(num_blocks).
    void check_integrity() const;

   private:
    struct CFree {
        void operator()(void* memory) const noexcept { std::free(memory); }
    };

    [[nodiscard]] bool is_live(BlockId id) const noexcept {
        return id >= 0 && id < next_fresh_ && refs_[static_cast<std::size_t>(id)] != 0;
    }
    void free_shared(const BlockId* ids, std::int64_t n);
    [[noreturn]] void refuse_free(const BlockId* ids, std::int64_t n) const;

    void tell(const BlockId* ids, std::int64_t n) const noexcept {
        if (listener_ != nullptr && n > 0) listener_->freed(ids, n);
    }

    PoolListener* listener_ = nullptr;
    std::int64_t num_blocks_;
    BlockId first_;
    std::int64_t end_;
    std::int64_t next_fresh_;        // smaller ids of the pool were handed out before
    std::int64_t num_recycled_ = 0;  // depth of the stack
    std::unique_ptr<std::uint32_t[], CFree> refs_;
    std::unique_ptr<BlockId[], CFree> stack_;
};

/// The pages of each replica that one tenant may hold. A page is held while a request, a pin or a
/// copy keeps it from eviction. It counts once, for the tenant whose request took it from the pool;
/// this tenant also cached it first. A cached page without a holder counts for no tenant. If it is
/// held again and its tenant has no room, it counts for the tenant of the new holder.
struct TenantQuota {
    static constexpr std::int64_t kNoCeiling = std::numeric_limits<std::int64_t>::max();

    std::int64_t reserved_pages = 0;      // kept free or evictable for it: others cannot take them
    std::int64_t max_pages = kNoCeiling;  // the tenant never holds more
};

}  // namespace kvcore
