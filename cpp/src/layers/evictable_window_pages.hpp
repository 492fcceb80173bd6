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
#include "support/memory.hpp"

namespace kvcore {

/// The order of eviction of idle window pages: the tree has them and no reader does. An entry may
/// have a reader again; a caller that meets the entry removes it.
///
/// Each entry is in a list. A list has its entries in the order in which their last readers left:
///     useless     no hit reads the page any more: layers keep a state, and no checkpoint follows
///     passed      a request moved past the page in the middle of a prompt: only a hit that ends
///                 just after it could use it
///     spare       departures, see below, whose eviction costs a prompt only a few pages of a hit:
///                 at the end of an answer, and one more page before each window. The oldest is
///                 evicted first
///     departures  pages that left together at the end of a prompt, at a release or before
///                 branches: the next turn hits them. The policy orders them
/// All pages of a departure serve a hit together. After one page is evicted, the other pages serve
/// no hit, and neither do pages that left at the same time from a later end. These departures are
/// broken: they are evicted next after the entries of the useless list.
///
/// An entry is a column of one window: all its pages are evicted together.
///
/// Owns: links by entry, lists by departure. Threads: no locks of its own. Cost: O(1) and that of
/// the policy's method; after construction only `make_room` allocates.
class EvictableWindowPages {
   public:
    using Entry = std::uint32_t;
    using Departure = WindowPolicy::Departure;
    static constexpr Entry kNone = ~Entry{0};

    EvictableWindowPages(std::size_t num_entries, WindowPolicy& policy)
        : policy_(policy), links_(num_entries), departures_(1) {}

    /// Makes room to keep pages of up to `entries` entries that readers leave next: up to `spare`
    /// more departures. Throws std::bad_alloc.
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
    /// Begins a moment: entries kept until the next call were left at the same time.
    void begin_leaving() noexcept {
        ++moment_;
        kept_ = {};
        is_spare_ = false;
    }
    /// Entries kept from now on form one departure of the prefix that ends at `end`, spare or not.
    void leave_from(TreePosition end, bool is_spare = false) noexcept {
        is_spare_ = is_spare;
        Kept& kept = this->kept();
        if (end.node == kept.end.node && end.depth == kept.end.depth) return;
        if (kept.departure != 0 && policy_.goes_by_time()) return;
        kept.end = end;
        kept.departure = 0;
    }
    /// The entry after an entry in its list; kNone after the last entry.
    [[nodiscard]] Entry behind(Entry entry) const noexcept { return links_[entry].next - 1; }
    /// Prefetches the memory that is read when an entry is added or removed.
    void prefetch(Entry entry) const noexcept { kvcore::prefetch(&links_[entry]); }
    /// Adds an entry as the youngest passed entry, whichever list it was in.
    void pass(Entry entry) noexcept {
        if (contains(entry)) remove(entry);
        push(passed_, kPassed, entry);
    }
    void give_up(Entry entry) noexcept {
        if (contains(entry)) remove(entry);
        push(unreachable_, kUseless, entry);
    }
    /// Adds an entry to the current departure. If there is no room for another departure, the entry
    /// stays in its departure, or counts as passed.
    void keep(Entry entry) noexcept {
        const bool has_room = kept().departure != 0 || policy_.num_free_departures() > 0;
        if (!has_room && is_kept_with_others(entry)) return;
        if (contains(entry)) remove(entry);
        if (kept().departure == 0) begin_departure();
        const Departure departure = kept().departure;
        if (departure == 0) return push(passed_, kPassed, entry);
        push(departures_[departure].entries, departure + kPassed, entry);
    }
    /// Keeps one entry after the other: consecutive entries of one list are moved together, at the
    /// latest in the destructor. Before that, the caller must not change kept entries in another
    /// way.
    class Keeper {
       public:
        explicit Keeper(EvictableWindowPages& idle) noexcept : idle_(idle) {}
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

        EvictableWindowPages& idle_;
        Entry first_ = kNone;  // of the adjacent entries to move
        Entry last_ = kNone;
        std::uint32_t from_ = 0;  // the list that they are in
        std::uint32_t to_ = 0;    // the list of the departure
    };
    [[nodiscard]] bool is_passed(Entry entry) const noexcept {
        return links_[entry].list == kPassed;
    }
    /// Removes an entry from its list; its pages stay.
    void remove(Entry entry) noexcept {
        const std::uint32_t number = std::exchange(links_[entry].list, 0);
        unlink(entry, entry, list_of(number));
        end_if_empty(number);
    }
    /// Removes an entry whose pages were evicted. If that breaks a departure, returns the last end
    /// of the broken departures; otherwise no node.
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

    /// The first entry that serves no hit, the first passed entry, and the first entry of a
    /// departure.
    [[nodiscard]] Entry first_useless() const noexcept {
        if (unreachable_.first != 0) return unreachable_.first - 1;
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
        std::uint32_t previous = 0;  // entry + 1; 0: no entry
        std::uint32_t next = 0;
        std::uint32_t list = 0;  // 0: no list; kUseless; kPassed; kPassed + departure
    };
    struct List {
        std::uint32_t first = 0;
        std::uint32_t last = 0;
    };
    struct Left {
        List entries;
        Departure before = 0;  // in the list of broken departures
        Departure behind = 0;
        Departure next = 0;  // in the ring of departures of the same moment, spare or not
        Departure previous = 0;
        bool is_broken = false;
    };

    struct Kept {
        TreePosition end;
        Departure departure = 0;
        Departure ring = 0;  // a departure of this moment
    };

    [[nodiscard]] Kept& kept() noexcept { return kept_[is_spare_ ? 1 : 0]; }
    // False for the only entry of a departure: removing it ends the departure, which makes room for
    // another departure.
    [[nodiscard]] bool is_kept_with_others(Entry entry) const noexcept {
        const Link& link = links_[entry];
        return link.list > kPassed && (link.previous != 0 || link.next != 0);
    }
    [[nodiscard]] List& list_of(std::uint32_t number) noexcept {
        if (number > kPassed) return departures_[number - kPassed].entries;
        return number == kPassed ? passed_ : unreachable_;
    }
    void end_if_empty(std::uint32_t number) noexcept {
        if (number > kPassed && list_of(number).first == 0) end(number - kPassed);
    }
    // For adjacent entries of a list.
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
    // Moves entries to the current departure; they already have its number.
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
    // Also breaks the departures of the same moment that end later: they read the page as well.
    // Returns the end of the last broken departure.
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
    List unreachable_;
    List passed_;
    List broken_;               // departures
    std::array<Kept, 2> kept_;  // of the entries kept now: not spare, spare
    bool is_spare_ = false;     // selects the second element of kept_
    std::uint32_t moment_ = 0;
};

}  // namespace kvcore
