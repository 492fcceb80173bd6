// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kvcore/eviction.hpp"
#include "support/memory.hpp"

namespace kvcore {

/// Nodes in ascending order of their keys. Nodes with equal keys are in the order of their ids.
///
/// Owns: an entry and a place for each node id, in the heap or not.
/// Invariant: no entry is smaller than its parent; `places_[node]` is the index of the node's
/// entry.
/// Memory: only `make_room` allocates.
/// Threads: no locks of its own.
/// Cost: O(log n). A parent has four children, in at most two cache lines.
template <class Key>
class IndexedHeap {
   public:
    /// As EvictionPolicy::make_room.
    void make_room(NodeId last) {
        places_.make_room(last, kOut);
        entries_.make_room(last, Entry{});
    }
    [[nodiscard]] bool contains(NodeId node) const noexcept { return places_[node] != kOut; }
    /// Returns the key of a node in the heap.
    [[nodiscard]] const Key& key(NodeId node) const noexcept { return entries_[places_[node]].key; }
    /// Returns the first node; kNoNode if the heap is empty.
    [[nodiscard]] NodeId first() const noexcept { return size_ == 0 ? kNoNode : entries_[0].node; }
    [[nodiscard]] const Key& first_key() const noexcept { return entries_[0].key; }

    /// Inserts a node, or moves it to the place of its new key.
    void put(NodeId node, const Key& key) noexcept {
        const Entry entry{key, node};
        if (!contains(node)) {
            places_[node] = size_;
            sift_up(size_++, entry);
        } else {
            move(places_[node], entry);
        }
    }
    /// Removes a node. Does nothing if the node is not in the heap.
    void erase(NodeId node) noexcept {
        const std::uint32_t place = places_[node];
        if (place == kOut) return;
        places_[node] = kOut;
        const Entry last = entries_[--size_];
        if (place != size_) move(place, last);
    }
    /// Writes the first `n` nodes in order to `out`. Returns the number of nodes written. O(1) for
    /// up to kMostUpcoming nodes, else O(nodes log n).
    std::size_t upcoming(NodeId* out, std::size_t n) const noexcept {
        if (n > kMostUpcoming) return many_upcoming(out, n);
        // The entries that may be next: the children of the entries already written.
        std::array<std::uint32_t, kMostUpcoming * 3 + 1> edge{0};
        std::size_t edge_size = size_ > 0 ? 1 : 0;
        std::size_t found = 0;
        while (found < n && edge_size > 0) {
            const auto least = std::min_element(
                edge.begin(), edge.begin() + static_cast<std::ptrdiff_t>(edge_size),
                [&](std::uint32_t a, std::uint32_t b) { return entries_[a] < entries_[b]; });
            const std::uint32_t place = *least;
            out[found++] = entries_[place].node;
            *least = edge[--edge_size];
            if (found == n) break;
            const std::uint32_t begin = first_child(place);
            for (std::uint32_t c = begin; c < std::min(begin + kArity, size_); ++c) {
                edge[edge_size++] = c;
            }
        }
        return found;
    }

   private:
    struct Entry {
        Key key;
        NodeId node;

        friend bool operator<(const Entry& a, const Entry& b) noexcept {
            return a.key < b.key || (a.node < b.node && !(b.key < a.key));
        }
    };
    static constexpr std::uint32_t kOut = std::numeric_limits<std::uint32_t>::max();
    static constexpr std::uint32_t kArity = 4;
    static constexpr std::size_t kMostUpcoming = 4;

    // Keeps the least nodes in a heap with the largest of them on top.
    std::size_t many_upcoming(NodeId* out, std::size_t n) const noexcept {
        const auto goes_first = [this](NodeId a, NodeId b) {
            return entries_[places_[a]] < entries_[places_[b]];
        };
        const std::size_t found = std::min<std::size_t>(n, size_);
        for (std::size_t i = 0; i < found; ++i) {
            out[i] = entries_[static_cast<std::uint32_t>(i)].node;
        }
        std::make_heap(out, out + found, goes_first);
        for (auto i = static_cast<std::uint32_t>(found); i < size_; ++i) {
            if (!goes_first(entries_[i].node, out[0])) continue;
            std::pop_heap(out, out + found, goes_first);
            out[found - 1] = entries_[i].node;
            std::push_heap(out, out + found, goes_first);
        }
        std::sort_heap(out, out + found, goes_first);
        return found;
    }

    static std::uint32_t first_child(std::uint32_t place) noexcept { return kArity * place + 1; }
    static std::uint32_t parent(std::uint32_t place) noexcept { return (place - 1) / kArity; }

    void set(std::uint32_t place, const Entry& entry) noexcept {
        entries_[place] = entry;
        places_[entry.node] = place;
    }
    void move(std::uint32_t place, const Entry& entry) noexcept {
        if (place > 0 && entry < entries_[parent(place)]) {
            sift_up(place, entry);
        } else {
            sift_down(place, entry);
        }
    }
    void sift_up(std::uint32_t place, const Entry& entry) noexcept {
        while (place > 0 && entry < entries_[parent(place)]) {
            set(place, entries_[parent(place)]);
            place = parent(place);
        }
        set(place, entry);
    }
    void sift_down(std::uint32_t place, const Entry& entry) noexcept {
        while (first_child(place) < size_) {
            const std::uint32_t begin = first_child(place);
            std::uint32_t least = begin;
            for (std::uint32_t c = begin + 1; c < std::min(begin + kArity, size_); ++c) {
                if (entries_[c] < entries_[least]) least = c;
            }
            if (!(entries_[least] < entry)) break;
            set(place, entries_[least]);
            place = least;
        }
        set(place, entry);
    }

    GrowingArray<Entry> entries_;
    GrowingArray<std::uint32_t> places_;
    std::uint32_t size_ = 0;
};

}  // namespace kvcore
