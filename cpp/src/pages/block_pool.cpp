// SPDX-License-Identifier: Apache-2.0
#include "kvcore/block_pool.hpp"

#include <algorithm>
#include <limits>
#include <new>
#include <numeric>
#include <stdexcept>
#include <unordered_map>

#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

constexpr std::int64_t kMaxBlocks = std::numeric_limits<BlockId>::max();

std::int64_t checked_size(std::int64_t num_blocks, BlockId first) {
    if (first < 0 || first == kMaxBlocks) {
        throw std::invalid_argument(
            detail::concat("first is ", first, ", must be 0 .. ", kMaxBlocks - 1));
    }
    if (num_blocks < 1 || num_blocks > kMaxBlocks - first) {
        throw std::invalid_argument(
            detail::concat("num_blocks is ", num_blocks, ", must be 1 .. ", kMaxBlocks - first));
    }
    return num_blocks;
}

// calloc and malloc of large sizes hand out address space that is backed on first touch.
template <class T>
T* checked_memory(void* memory) {
    if (memory == nullptr) throw std::bad_alloc();
    return static_cast<T*>(memory);
}

}  // namespace

BlockPool::BlockPool(std::int64_t num_blocks, BlockId first)
    : num_blocks_(checked_size(num_blocks, first)),
      first_(first),
      end_(first + num_blocks),
      next_fresh_(first),
      refs_(checked_memory<std::uint32_t>(
          std::calloc(static_cast<std::size_t>(end_), sizeof(std::uint32_t)))),
      stack_(checked_memory<BlockId>(
          std::malloc(static_cast<std::size_t>(num_blocks) * sizeof(BlockId)))) {}

bool BlockPool::allocate(std::int64_t n, BlockId* out) noexcept {
    if (n > num_free()) return false;
    if (n == 1 && num_recycled_ > 0) {  // as in decode steps
        *out = stack_[static_cast<std::size_t>(--num_recycled_)];
        refs_[static_cast<std::size_t>(*out)] = 1;
        return true;
    }
    const std::int64_t recycled = std::min(n, num_recycled_);
    std::uint32_t* refs = refs_.get();
    const BlockId* top = stack_.get() + num_recycled_;
    const auto take = [&](std::int64_t i) {
        const BlockId id = top[-1 - i];
        refs[id] = 1;
        out[i] = id;
    };
    std::int64_t given = 0;
    for (; given + 4 <= recycled; given += 4) {  // a loop costs as much as the work for an id
        take(given);
        take(given + 1);
        take(given + 2);
        take(given + 3);
    }
    for (; given < recycled; ++given) take(given);
    num_recycled_ -= recycled;
    for (std::int64_t i = recycled; i < n; ++i) {
        const std::int64_t id = next_fresh_++;
        refs[id] = 1;
        out[i] = static_cast<BlockId>(id);
    }
    return true;
}

void BlockPool::copy_free(BlockId* out) const noexcept {
    const BlockId* stack = stack_.get();
    out = std::reverse_copy(stack, stack + num_recycled_, out);
    std::iota(out, out + (end_ - next_fresh_), static_cast<BlockId>(next_fresh_));
}

void BlockPool::share(const BlockId* ids, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
        if (!is_live(ids[i])) {
            throw InvalidHandleError(
                detail::concat("page ", ids[i], " cannot be shared: it is free or not one of the ",
                               num_blocks_, " pages; share only allocated pages"));
        }
    }
    for (std::int64_t i = 0; i < n; ++i) ++refs_[static_cast<std::size_t>(ids[i])];
}

// Freed references are nearly always last references. So the loop drops them without a branch per
// id; if a reference was not the last, the work is undone and repeated page by page.
void BlockPool::free(const BlockId* ids, std::int64_t n) {
    // The top bit of `unknown` is set if an id is negative, or greater than the last known id.
    const auto last = static_cast<std::uint32_t>(next_fresh_ - 1);
    std::uint32_t unknown = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        const auto id = static_cast<std::uint32_t>(ids[i]);
        unknown |= (last - id) | id;
    }
    if (unknown >> 31 != 0) refuse_free(ids, n);
    std::uint32_t* refs = refs_.get();
    const auto drop = [&](std::int64_t i) { return --refs[ids[i]]; };
    std::uint32_t others = 0;
    std::int64_t dropped = 0;
    for (; dropped + 4 <= n; dropped += 4) {  // a loop costs as much as the work for an id
        others |= drop(dropped);
        others |= drop(dropped + 1);
        others |= drop(dropped + 2);
        others |= drop(dropped + 3);
    }
    for (; dropped < n; ++dropped) others |= drop(dropped);
    if (others != 0) return free_shared(ids, n);
    BlockId* top = stack_.get() + num_recycled_;
    if (n == 1) {  // as in decode steps
        *top = *ids;
    } else {
        std::copy(ids, ids + n, top);
    }
    num_recycled_ += n;
    tell(stack_.get() + num_recycled_ - n, n);
}

// One reference of each page has been dropped; some of them were not the last, or did not exist.
void BlockPool::free_shared(const BlockId* ids, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) ++refs_[static_cast<std::size_t>(ids[i])];
    const std::int64_t recycled = num_recycled_;
    std::int64_t done = 0;
    for (; done < n && is_live(ids[done]); ++done) {
        if (--refs_[static_cast<std::size_t>(ids[done])] == 0)
            stack_[static_cast<std::size_t>(num_recycled_++)] = ids[done];
    }
    if (done == n) return tell(stack_.get() + recycled, num_recycled_ - recycled);
    // In reverse, so that every id put on the stack is its top again.
    while (done-- > 0) {
        if (refs_[static_cast<std::size_t>(ids[done])]++ == 0) --num_recycled_;
    }
    refuse_free(ids, n);
}

void BlockPool::refuse_free(const BlockId* ids, std::int64_t n) const {
    std::unordered_map<BlockId, std::uint32_t> dropped;
    const BlockId* bad = std::find_if(ids, ids + n, [&](BlockId id) {
        return !is_live(id) || dropped[id]++ == refs_[static_cast<std::size_t>(id)];
    });
    throw InvalidHandleError(
        detail::concat("page ", *bad, " cannot be freed: it is free already or not one of the ",
                       num_blocks_, " pages; free each reference once"));
}

std::uint32_t BlockPool::ref_count(BlockId id) const {
    if (id < first_ || id >= end_) {
        throw InvalidHandleError(detail::concat("page ", id, " is outside the pool of ",
                                                num_blocks_, " pages, must be ", first_, " .. ",
                                                end_ - 1));
    }
    return id < next_fresh_ ? refs_[static_cast<std::size_t>(id)] : 0;
}

void BlockPool::check_integrity() const {
    std::int64_t live = 0;
    for (std::int64_t id = first_; id < next_fresh_; ++id) {
        live += refs_[static_cast<std::size_t>(id)] != 0 ? 1 : 0;
    }
    detail::require_law(live + num_recycled_ == next_fresh_ - first_,
                        "block pool: free + referenced == handed out at least once");
    for (std::int64_t i = 0; i < num_recycled_; ++i) {
        detail::require_law(
            refs_[static_cast<std::size_t>(stack_[static_cast<std::size_t>(i)])] == 0,
            "block pool: a page on the free stack has no references");
    }
}

}  // namespace kvcore
