// SPDX-License-Identifier: Apache-2.0
// One body for all kernels that move bytes. It moves items; each item is runs of bytes along two
// axes.
//
// Items are cut into pieces of kUnroll units for each lane of a team, and teams move pieces. So a
// lookup (of a slot, a pair, the row of a token) is done once for a piece, the lanes of a team move
// neighbouring units, and a lane has kUnroll loads in flight before it stores. If only the
// destination needs a lookup, the loads are issued before the lookup.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "kvcore/types.hpp"
#include "launch.hpp"
#include "teams.hpp"
#include "units.hpp"

namespace kvcore::cuda {

/// The destination and the source of an item. `to` nullptr: the item is not moved.
struct Place {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    std::int64_t bytes = std::numeric_limits<std::int64_t>::max();  // of the item, from its start
};

/// Steps of an axis, in bytes.
struct CopyAxis {
    std::int64_t count = 1;
    std::int64_t to = 0;
    std::int64_t from = 0;
};

/// The shape that all items of a tensor have: runs along two axes, the outer axis first.
struct CopyShape {
    std::int64_t run = 0;  // bytes
    CopyAxis outer = {};
    CopyAxis inner = {};

    [[nodiscard]] std::int64_t bytes() const noexcept { return outer.count * inner.count * run; }

    /// Returns the same bytes in the same order, in the longest runs.
    [[nodiscard]] CopyShape merged() const noexcept {
        CopyShape shape = *this;
        if (shape.take(shape.inner)) static_cast<void>(shape.take(shape.outer));
        if (shape.outer.count == 1) shape.outer = {};
        return shape;
    }
    /// Returns the same bytes in any order, in the longest runs.
    [[nodiscard]] CopyShape reordered() const noexcept {
        const CopyShape shape = merged();
        const CopyShape other = CopyShape{run, inner, outer}.merged();
        return other.run > shape.run ? other : shape;
    }
    [[nodiscard]] std::int64_t alignment() const noexcept {
        return alignment_of(run, outer.to, outer.from, inner.to, inner.from);
    }

   private:
    // Makes an axis part of the run if its steps are as long as the run; returns false if not.
    [[nodiscard]] bool take(CopyAxis& axis) noexcept {
        if (axis.count != 1 && (axis.to != run || axis.from != run)) return false;
        run *= axis.count;
        axis = {};
        return true;
    }
};

/// A shape in units, and the number of pieces of its items.
struct CopyPart {
    std::int64_t count;  // units of an item
    Divider run;         // units
    Divider inner;       // runs
    Divider pieces;      // of an item
    CopyShape shape;
};

/// `items.find(part, item, counts)` finds an item; `counts` is true in one lane of each item. With
/// kKnowsSource, `items.source(part, item)` returns the source of every item, which may be read
/// even if the item has no destination; such an item is always whole.
template <class Items, class Unit>
struct CopyBody {
    Items items;
    CopyPart parts[2];          // for example of K and V
    std::int64_t first_pieces;  // of all items of the first part
    std::int64_t all_pieces;
    std::int32_t shift;  // teams of 2^shift lanes

    static constexpr std::int32_t kUnroll = 4;
    static constexpr std::int64_t kSize = sizeof(Unit);

    KVCORE_HOST_DEVICE void operator()(Lane lane) const {
        const std::int64_t stride = lane.count() >> shift;
        const std::int32_t in_team = lane.thread & ((1 << shift) - 1);
        for (std::int64_t at = lane.index() >> shift; at < all_pieces; at += stride) {
            const int which = at < first_pieces ? 0 : 1;
            const CopyPart& part = parts[which];
            const std::int64_t index = which == 0 ? at : at - first_pieces;
            const std::int64_t item = part.pieces.quotient(index);
            const std::int64_t piece = part.pieces.remainder(index, item);
            const bool counts = which == 0 && piece == 0 && in_team == 0;
            const std::int64_t first = (piece * kUnroll << shift) + in_team;
            Unit held[kUnroll] = {};
            if constexpr (Items::kKnowsSource) {
                const Units units = units_of(part, first, part.count);
                load(units, items.source(which, item), held);
                const Place place = items.find(which, item, counts);
                if (place.to != nullptr) store(units, place.to, held);
            } else {
                const Place place = items.find(which, item, counts);
                if (place.to == nullptr) continue;
                const Units units = units_of(part, first, min_of(part.count, place.bytes / kSize));
                load(units, place.from, held);
                store(units, place.to, held);
            }
        }
    }

   private:
    /// The units of a lane in a piece, as offsets in an item, in bytes.
    struct Units {
        bool is_there[kUnroll] = {};
        std::int64_t from[kUnroll] = {};
        std::int64_t to[kUnroll] = {};
    };

    [[nodiscard]] KVCORE_HOST_DEVICE Units units_of(const CopyPart& part, std::int64_t first,
                                                    std::int64_t end) const {
        Units units;
        for (std::int32_t i = 0; i < kUnroll; ++i) {
            const std::int64_t unit = first + (i << shift);
            units.is_there[i] = unit < end;
            units.from[i] = unit * kSize;
            units.to[i] = unit * kSize;
        }
        if (part.run.divisor() == part.count) return units;
        for (std::int32_t i = 0; i < kUnroll; ++i) {
            if (!units.is_there[i]) continue;
            const std::int64_t unit = first + (i << shift);
            const std::int64_t run = part.run.quotient(unit);
            const std::int64_t in_run = part.run.remainder(unit, run) * kSize;
            const std::int64_t outer = part.inner.quotient(run);
            const std::int64_t inner = part.inner.remainder(run, outer);
            const CopyShape& shape = part.shape;
            units.from[i] = outer * shape.outer.from + inner * shape.inner.from + in_run;
            units.to[i] = outer * shape.outer.to + inner * shape.inner.to + in_run;
        }
        return units;
    }
    KVCORE_HOST_DEVICE static void load(const Units& units, const std::byte* from,
                                        Unit (&held)[kUnroll]) {
        for (std::int32_t i = 0; i < kUnroll; ++i) {
            if (units.is_there[i]) held[i] = load_unit<Unit>(from + units.from[i]);
        }
    }
    KVCORE_HOST_DEVICE static void store(const Units& units, std::byte* to,
                                         const Unit (&held)[kUnroll]) {
        for (std::int32_t i = 0; i < kUnroll; ++i) {
            if (units.is_there[i]) store_unit(to + units.to[i], held[i]);
        }
    }

    [[nodiscard]] KVCORE_HOST_DEVICE static std::int64_t min_of(std::int64_t a,
                                                                std::int64_t b) noexcept {
        return a < b ? a : b;
    }
};

/// Items without bytes have one piece.
[[nodiscard]] inline CopyPart part_of(const CopyShape& shape, std::int64_t unit_bytes,
                                      std::int64_t piece_units) noexcept {
    const std::int64_t count = shape.bytes() / unit_bytes;
    const auto divider = [](std::int64_t by) { return Divider(by < 1 ? 1 : by); };
    return {count, divider(shape.run / unit_bytes), divider(shape.inner.count),
            divider(ceil_div(count, piece_units)), shape};
}

/// Moves `n` items of two shapes; the second shape may have no bytes. `alignment` divides all
/// addresses of items. Items that count bad places are looked up even if they have no bytes.
template <class Items>
[[nodiscard]] Status launch_copy(const Items& items, std::int64_t n, const CopyShape& first,
                                 const CopyShape& second, std::int64_t alignment, Stream stream,
                                 std::int64_t max_blocks = 0) noexcept {
    const std::int64_t bytes = first.bytes() + second.bytes();
    if (n < 0 || max_blocks < 0) return kInvalidCall;
    if (n == 0 || (bytes == 0 && !items.counts())) return kSuccess;
    const std::int64_t common = alignment_of(alignment, first.alignment(), second.alignment());
    return with_unit(common, [&](auto unit) {
        using Body = CopyBody<Items, decltype(unit)>;
        const std::int64_t longest =
            first.bytes() > second.bytes() ? first.bytes() : second.bytes();
        const Teams team{1, team_for(ceil_div(longest, Body::kSize * Body::kUnroll))};
        const std::int64_t piece = team.lanes * Body::kUnroll;
        const CopyPart parts[2] = {part_of(first, Body::kSize, piece),
                                   part_of(second, Body::kSize, piece)};
        const std::int64_t of_first = n * parts[0].pieces.divisor();
        const std::int64_t of_second = second.bytes() == 0 ? 0 : n * parts[1].pieces.divisor();
        const std::int64_t all = of_first + of_second;
        return launch(Body{items, {parts[0], parts[1]}, of_first, all, team.shift()},
                      grid_for(all * team.lanes, max_blocks), stream);
    });
}

}  // namespace kvcore::cuda
