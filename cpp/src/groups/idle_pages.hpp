// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace kvcore {

/// Address space that reads as zeros and is backed on first touch.
template <class T>
class ZeroedArray {
   public:
    /// Throws std::bad_alloc.
    explicit ZeroedArray(std::size_t n) : memory_(static_cast<T*>(std::calloc(n, sizeof(T)))) {
        if (memory_ == nullptr) throw std::bad_alloc();
    }
    [[nodiscard]] T& operator[](std::size_t i) const noexcept { return memory_.get()[i]; }

   private:
    struct CFree {
        void operator()(T* memory) const noexcept { std::free(memory); }
    };
    std::unique_ptr<T[], CFree> memory_;
};

/// Pages of windows that the tree has and nobody reads, in the order in which they go. Some may
/// have a reader again: who meets those removes them.
///
/// Two queues, each in the order in which the last readers left:
///     passed  those that a request left behind in the middle of a prompt: only a hit that ends
///             just there could use them
///     kept    those at the end of a prompt, at a release and in front of branches: what the next
///             turn hits
/// What left together and is kept serves a hit together: once one of them is gone, the others can
/// serve none any more, and go before all else.
///
/// An entry is a column of one window: all its pages go together.
///
/// Owns: links by entry. Threads: none of its own. Cost: O(1); no memory after construction.
class IdlePages {
   public:
    using Entry = std::uint32_t;
    static constexpr Entry kNone = ~Entry{0};

    explicit IdlePages(std::size_t num_entries) : links_(num_entries) {}

    [[nodiscard]] bool contains(Entry entry) const noexcept { return links_[entry].queue != 0; }
    /// The same, but as the youngest one, in whichever queue it was.
    void renew(Entry entry, bool is_kept, std::uint64_t time) noexcept {
        if (contains(entry)) remove(entry);
        add(entry, is_kept, time);
    }
    /// What is added from now on left together.
    void begin_departure() noexcept { ++departure_; }
    /// An entry that is in neither queue, as the youngest one.
    void add(Entry entry, bool is_kept, std::uint64_t time) noexcept {
        Queue& queue = queues_[is_kept ? 1 : 0];
        const auto number = static_cast<std::uint8_t>(is_kept ? 2 : 1);
        links_[entry] = {queue.last, 0, time, departure_, number};
        (queue.last != 0 ? links_[queue.last - 1].next : queue.first) = entry + 1;
        queue.last = entry + 1;
    }
    /// An entry that is in one of them.
    void remove(Entry entry) noexcept {
        const Link link = links_[entry];
        Queue& queue = queues_[link.queue - 1];
        (link.previous != 0 ? links_[link.previous - 1].next : queue.first) = link.next;
        (link.next != 0 ? links_[link.next - 1].previous : queue.last) = link.previous;
        links_[entry].queue = 0;
    }
    /// Of those passed, moved to those kept.
    void keep(Entry entry, std::uint64_t time) noexcept {
        if (links_[entry].queue != 1) return;
        remove(entry);
        add(entry, true, time);
    }
    /// What goes next, should it have no reader, where runs of the tree wait since `others`; kNone:
    /// one of those goes first.
    [[nodiscard]] Entry next(std::uint64_t others) const noexcept {
        const std::uint32_t kept = queues_[1].first;
        const std::uint32_t passed = queues_[0].first;
        if (kept != 0 && links_[kept - 1].departure == broken_) return kept - 1;
        if (passed != 0) return passed - 1;
        if (kept != 0 && links_[kept - 1].time <= others) return kept - 1;
        return kNone;
    }
    /// An entry goes for good.
    void take(Entry entry) noexcept {
        if (links_[entry].queue == 2) broken_ = links_[entry].departure;
        remove(entry);
    }

   private:
    struct Link {
        std::uint32_t previous = 0;  // entry + 1; 0: none
        std::uint32_t next = 0;
        std::uint64_t time = 0;
        std::uint32_t departure = 0;
        std::uint8_t queue = 0;  // 0: in none, 1: passed, 2: kept
    };
    struct Queue {
        std::uint32_t first = 0;
        std::uint32_t last = 0;
    };

    ZeroedArray<Link> links_;
    Queue queues_[2];
    std::uint32_t departure_ = 1;
    std::uint32_t broken_ = 0;  // that of `kept` which lost an entry last
};

}  // namespace kvcore
