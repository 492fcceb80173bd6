// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "layers/window_policy.hpp"
#include "support/make_room.hpp"
#include "support/memory.hpp"

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

/// Pages of windows that the tree has and nobody reads, by how they go. Some may have a reader
/// again: who meets those removes them.
///
/// Each is in one of these, in the order in which their last readers left:
///     useless     what no hit reads any more: where layers keep a state, no checkpoint follows
///     passed      what a request left behind in the middle of a prompt: only a hit that ends just
///                 there could use it
///     spare       departures, as below, that cost a prompt a few pages of its hit and no more: at
///                 the end of an answer, and one page more in front of each window. The oldest goes
///                 first
///     departures  what left together at the end of a prompt, at a release or in front of branches:
///                 what the next turn hits. Which of them goes first is the policy's to say
/// What is in a departure serves a hit together: once one page of it is gone, the others can serve
/// none any more, nor can what left at the same time from further on. Such departures are broken;
/// those are told first, behind what was useless from the beginning.
///
/// An entry is a column of one window: all its pages go together.
///
/// Owns: links by entry, lists by departure. Threads: none of its own. Cost: O(1) and that of the
/// policy's verb; `make_room` alone asks for memory after construction.
class IdlePages {
   public:
    using Entry = std::uint32_t;
    using Departure = WindowPolicy::Departure;
    static constexpr Entry kNone = ~Entry{0};

    IdlePages(std::size_t num_entries, WindowPolicy& policy)
        : policy_(policy), links_(num_entries), departures_(1) {}

    /// So that of so many entries what leaves next can be kept: up to `spare` departures more.
    /// Throws std::bad_alloc.
    void make_room(std::size_t entries, std::size_t spare) {
        if (policy_.num_free_departures() >= spare) return;
        const std::size_t n = std::min(entries, policy_.num_departures() + 2 * spare);
        if (departures_.size() <= n) {
            kvcore::make_room(departures_, n + 1 - departures_.size());
            departures_.resize(n + 1);
        }
        policy_.make_room_for_departures(n);  // last: whatever it has made can be used
    }
    [[nodiscard]] bool contains(Entry entry) const noexcept { return links_[entry].list != 0; }
    /// What is kept from now on leaves at the same time.
    void begin_leaving() noexcept {
        ++moment_;
        kept_ = {};
        is_spare_ = false;
    }
    /// The same as one departure, of a prefix that ends there, spare or not.
    void leave_from(TreePosition end, bool is_spare = false) noexcept {
        is_spare_ = is_spare;
        Kept& kept = this->kept();
        if (end.node == kept.end.node && end.depth == kept.end.depth) return;
        if (kept.departure != 0 && policy_.goes_by_time()) return;
        kept.end = end;
        kept.departure = 0;
    }
    /// The one that goes behind an entry; kNone behind the last.
    [[nodiscard]] Entry behind(Entry entry) const noexcept { return links_[entry].next - 1; }
    /// Asks for what is read when an entry comes or goes.
    void prefetch(Entry entry) const noexcept { kvcore::prefetch(&links_[entry]); }
    /// As the youngest one, wherever it was.
    void pass(Entry entry) noexcept {
        if (contains(entry)) remove(entry);
        push(passed_, kPassed, entry);
    }
    void give_up(Entry entry) noexcept {
        if (contains(entry)) remove(entry);
        push(useless_, kUseless, entry);
    }
    /// In a departure. Where there is no room for one more it stays in the one that it is in, or
    /// goes like those that are passed.
    void keep(Entry entry) noexcept {
        const bool has_room = kept().departure != 0 || policy_.num_free_departures() > 0;
        if (!has_room && is_kept_with_others(entry)) return;
        if (contains(entry)) remove(entry);
        if (kept().departure == 0) begin_departure();
        const Departure departure = kept().departure;
        if (departure == 0) return push(passed_, kPassed, entry);
        push(departures_[departure].entries, departure + kPassed, entry);
    }
    /// The same of one entry after the other: those that were kept so before are moved together, at
    /// the latest at its end. Until then nothing else is done to what is kept.
    class Keeper {
       public:
        explicit Keeper(IdlePages& idle) noexcept : idle_(idle) {}
        Keeper(const Keeper&) = delete;
        Keeper& operator=(const Keeper&) = delete;
        ~Keeper() { move(); }

        void keep(Entry entry) noexcept {
            if (first_ != kNone && idle_.links_[last_].next == entry + 1) {
                last_ = entry;
                idle_.links_[entry].list = to_;
                return;
            }
            move();
            const Departure departure = idle_.kept().departure;
            if (departure == 0 || !idle_.contains(entry)) return idle_.keep(entry);
            first_ = last_ = entry;
            to_ = departure + kPassed;
            from_ = std::exchange(idle_.links_[entry].list, to_);
        }

       private:
        void move() noexcept {
            if (first_ == kNone) return;
            idle_.move(first_, last_, from_);
            first_ = kNone;
        }

        IdlePages& idle_;
        Entry first_ = kNone;  // of those to move, which stand one behind the other
        Entry last_ = kNone;
        std::uint32_t from_ = 0;  // the list that they stand in
        std::uint32_t to_ = 0;    // that of the departure
    };
    [[nodiscard]] bool is_passed(Entry entry) const noexcept {
        return links_[entry].list == kPassed;
    }
    /// An entry that is in one of them, whose pages stay.
    void remove(Entry entry) noexcept {
        const std::uint32_t number = std::exchange(links_[entry].list, 0);
        unlink(entry, entry, list_of(number));
        end_if_empty(number);
    }
    /// The same of one whose pages are gone. Where that breaks a departure, tells where it ended;
    /// else no node.
    TreePosition lose(Entry entry) noexcept {
        const std::uint32_t list = links_[entry].list;
        if (list <= kPassed) {
            remove(entry);
            return {};
        }
        const Departure departure = list - kPassed;
        TreePosition end;
        if (!departures_[departure].is_broken) end = break_up(departure);
        remove(entry);
        return end;
    }

    /// The first of those that can serve no hit, of those passed, and of a departure.
    [[nodiscard]] Entry first_useless() const noexcept {
        if (useless_.first != 0) return useless_.first - 1;
        return broken_.first == 0 ? kNone : first_of(broken_.first);
    }
    [[nodiscard]] Entry first_passed() const noexcept { return passed_.first - 1; }
    [[nodiscard]] Entry first_of(Departure departure) const noexcept {
        return departures_[departure].entries.first - 1;
    }

   private:
    static constexpr std::uint32_t kUseless = 1;
    static constexpr std::uint32_t kPassed = 2;

    struct Link {
        std::uint32_t previous = 0;  // entry + 1; 0: none
        std::uint32_t next = 0;
        std::uint32_t list = 0;  // 0: in none; kUseless; kPassed; kPassed + departure
    };
    struct List {
        std::uint32_t first = 0;
        std::uint32_t last = 0;
    };
    struct Left {
        List entries;
        Departure before = 0;  // of those broken
        Departure behind = 0;
        Departure next = 0;  // of the ring of those that left at the same time, spare or not
        Departure previous = 0;
        bool is_broken = false;
    };

    struct Kept {
        TreePosition end;
        Departure departure = 0;
        Departure ring = 0;  // one of those that left at this moment
    };

    [[nodiscard]] Kept& kept() noexcept { return kept_[is_spare_ ? 1 : 0]; }
    // Of one that is alone, the departure ends with it: there is room for another one.
    [[nodiscard]] bool is_kept_with_others(Entry entry) const noexcept {
        const Link& link = links_[entry];
        return link.list > kPassed && (link.previous != 0 || link.next != 0);
    }
    [[nodiscard]] List& list_of(std::uint32_t number) noexcept {
        if (number > kPassed) return departures_[number - kPassed].entries;
        return number == kPassed ? passed_ : useless_;
    }
    void end_if_empty(std::uint32_t number) noexcept {
        if (number > kPassed && list_of(number).first == 0) end(number - kPassed);
    }
    // Entries that stand one behind the other.
    void unlink(Entry first, Entry last, List& list) noexcept {
        const std::uint32_t previous = links_[first].previous;
        const std::uint32_t next = links_[last].next;
        (previous != 0 ? links_[previous - 1].next : list.first) = next;
        (next != 0 ? links_[next - 1].previous : list.last) = previous;
    }
    void append(Entry first, Entry last, List& list) noexcept {
        links_[first].previous = list.last;
        links_[last].next = 0;
        (list.last != 0 ? links_[list.last - 1].next : list.first) = first + 1;
        list.last = last + 1;
    }
    void push(List& list, std::uint32_t number, Entry entry) noexcept {
        links_[entry].list = number;
        append(entry, entry, list);
    }
    // To the departure that is kept now, whose number they have already.
    void move(Entry first, Entry last, std::uint32_t from) noexcept {
        unlink(first, last, list_of(from));
        append(first, last, departures_[kept().departure].entries);
        end_if_empty(from);
    }
    void begin_departure() noexcept {
        const Departure begun = policy_.begin(kept().end, moment_, is_spare_);
        kept().departure = begun;
        if (begun == 0) return;
        Left& left = departures_[begun];
        if (left.next != 0) return;
        Departure& ring = kept().ring;
        if (ring == 0) ring = left.previous = left.next = begun;
        left.next = ring;
        left.previous = departures_[ring].previous;
        departures_[left.previous].next = departures_[ring].previous = begun;
    }
    // Those that ended further on read it too. Returns where the last one ended.
    TreePosition break_up(Departure departure) noexcept {
        TreePosition end = policy_.end_of(departure);
        const std::int32_t depth = end.depth;
        Departure each = departure;
        do {
            const TreePosition at = policy_.end_of(each);
            if (at.depth >= depth && !departures_[each].is_broken) put_to_broken(each);
            if (at.depth > end.depth) end = at;
            each = departures_[each].next;
        } while (each != departure);
        return end;
    }
    void put_to_broken(Departure departure) noexcept {
        Left& left = departures_[departure];
        left.is_broken = true;
        left.before = broken_.last;
        left.behind = 0;
        (broken_.last != 0 ? departures_[broken_.last].behind : broken_.first) = departure;
        broken_.last = departure;
    }
    void end(Departure departure) noexcept {
        const Left left = departures_[departure];
        if (left.is_broken) {
            (left.before != 0 ? departures_[left.before].behind : broken_.first) = left.behind;
            (left.behind != 0 ? departures_[left.behind].before : broken_.last) = left.before;
        }
        departures_[left.previous].next = left.next;
        departures_[left.next].previous = left.previous;
        for (Kept& kept : kept_) {
            if (kept.ring == departure) kept.ring = left.next != departure ? left.next : 0;
            if (kept.departure != departure) continue;
            kept.departure = 0;
            kept.end = {};
        }
        departures_[departure] = {};
        policy_.end(departure);
    }

    WindowPolicy& policy_;
    ZeroedArray<Link> links_;
    std::vector<Left> departures_;
    List useless_;
    List passed_;
    List broken_;               // departures
    std::array<Kept, 2> kept_;  // what is kept now, and what of that is spare
    bool is_spare_ = false;     // the second of them
    std::uint32_t moment_ = 0;
};

}  // namespace kvcore
