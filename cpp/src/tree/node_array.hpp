// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#include "kvcore/eviction.hpp"
#include "support/memory.hpp"

namespace kvcore {

/// The data that a policy keeps for each node, by node id.
///
/// One contiguous block, so that an access needs no division. It grows by realloc: for a large
/// block the system remaps memory pages instead of copying them, so a cache of a million runs does
/// not stall when a run is added.
template <class T>
class NodeArray {
    static_assert(std::is_trivially_copyable_v<T>, "growing moves bytes");

   public:
    /// Adds the entry of the next node; its id is the number of entries before the call. Throws
    /// std::bad_alloc without a change.
    void push_back(const T& entry) {
        if (size_ == capacity_) grow();
        entries_.get()[size_++] = entry;
    }
    /// Adds the entry of node `last` if it does not exist. A caller that makes room in several
    /// arrays can repeat the call after an allocation has failed.
    void make_room(NodeId last, const T& entry) {
        if (size_ == last) push_back(entry);
    }
    [[nodiscard]] T& operator[](NodeId node) noexcept { return entries_.get()[node]; }
    [[nodiscard]] const T& operator[](NodeId node) const noexcept { return entries_.get()[node]; }

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

}  // namespace kvcore
