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

/// What a policy knows of each node, by its id.
///
/// One piece of memory, so that a node is found without a division. It grows by realloc, for which
/// the system maps the pages of a large piece elsewhere instead of copying them: a cache of a
/// million runs does not stall for a moment when it gets one more.
template <class T>
class NodeArray {
    static_assert(std::is_trivially_copyable_v<T>, "growing moves bytes");

   public:
    /// The entry of one more node; its id is the number of those before. Throws std::bad_alloc and
    /// has changed nothing.
    void push_back(const T& entry) {
        if (size_ == capacity_) grow();
        entries_.get()[size_++] = entry;
    }
    /// The entry of node `last`, where it is not there yet: for who makes room in several arrays,
    /// of which a later one may fail.
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
