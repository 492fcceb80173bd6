// SPDX-License-Identifier: Apache-2.0
// Work on small arrays around the verbs: strided copies, and sums of lengths.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/cuda.hpp"
#include "launch.hpp"
#include "teams.hpp"
#include "units.hpp"

namespace kvcore::cuda {

/// Each lane moves a unit. Axes are numbered from the outermost.
template <class Unit>
struct StridedBody {
    struct Axis {
        Divider size = Divider(1);
        std::int64_t from = 0;
        std::int64_t to = 0;
    };
    const std::byte* source;
    std::byte* destination;
    Axis axes[StridedCopy::kMostAxes];
    std::int32_t num_axes;
    Divider run;  // units that are contiguous on both sides
    std::int64_t count;
    static constexpr std::int64_t kSize = sizeof(Unit);

    KVCORE_HOST_DEVICE void operator()(Lane lane) const {
        for (std::int64_t i = lane.index(); i < count; i += lane.count()) {
            std::int64_t rest = run.quotient(i);
            const std::byte* from = source + run.remainder(i, rest) * kSize;
            std::byte* to = destination + run.remainder(i, rest) * kSize;
            for (std::int32_t axis = num_axes - 1; axis >= 0; --axis) {
                const Axis& along = axes[axis];
                const std::int64_t outer = along.size.quotient(rest);
                const std::int64_t at = along.size.remainder(rest, outer);
                from += at * along.from;
                to += at * along.to;
                rest = outer;
            }
            store_unit(to, load_unit<Unit>(from));
        }
    }
};

/// Each team sums the lengths of the rows before its row.
struct OffsetsBody {
    const std::uint32_t* lengths;  // [batch]
    std::uint32_t* offsets;        // [batch + 1]

    struct Held {};
    using Part = std::uint32_t;

    [[nodiscard]] KVCORE_HOST_DEVICE Part part(std::int64_t row, TeamLane of,
                                               Held& /*held*/) const {
        Part sum = 0;
        for (std::int64_t i = of.lane; i < row; i += of.lanes) sum += lengths[i];
        return sum;
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static Part join(Part a, Part b) { return a + b; }
    KVCORE_HOST_DEVICE void finish(std::int64_t row, TeamLane of, Part sum,
                                   const Held& /*held*/) const {
        if (of.lane == 0) offsets[row] = sum;
    }
};

namespace {

/// Returns the same copy with the fewest axes. Axes of size 1 are dropped, neighbouring axes that
/// continue each other are merged, and the innermost axis becomes part of the items if it is
/// contiguous on both sides.
[[nodiscard]] StridedCopy with_few_axes(const StridedCopy& given) noexcept {
    StridedCopy kept;
    kept.item_bytes = given.item_bytes;
    for (int axis = 0; axis < given.num_axes; ++axis) {
        const StridedAxis& along = given.axes[axis];
        if (along.size == 1) continue;
        if (kept.num_axes > 0) {
            StridedAxis& last = kept.axes[kept.num_axes - 1];
            if (last.from == along.from * along.size && last.to == along.to * along.size) {
                last = {last.size * along.size, along.from, along.to};
                continue;
            }
        }
        kept.axes[kept.num_axes++] = along;
    }
    if (kept.num_axes > 0) {
        const StridedAxis& last = kept.axes[kept.num_axes - 1];
        if (last.from == kept.item_bytes && last.to == kept.item_bytes) {
            kept.item_bytes *= last.size;
            --kept.num_axes;
        }
    }
    return kept;
}

}  // namespace

Status copy_strided(const StridedCopy& given, const std::byte* source, std::byte* destination,
                    Stream stream) noexcept {
    if (given.num_axes < 0 || given.num_axes > StridedCopy::kMostAxes) return kInvalidCall;
    std::int64_t bytes = given.item_bytes;
    for (int axis = 0; axis < given.num_axes; ++axis) bytes *= given.axes[axis].size;
    if (bytes < 0) return kInvalidCall;
    if (bytes == 0) return kSuccess;
    const StridedCopy copy = with_few_axes(given);
    std::int64_t alignment = alignment_of(source, destination, copy.item_bytes);
    for (int axis = 0; axis < copy.num_axes; ++axis) {
        alignment = alignment_of(alignment, copy.axes[axis].from, copy.axes[axis].to);
    }
    return with_unit(alignment, [&](auto unit) {
        using Body = StridedBody<decltype(unit)>;
        const std::int64_t count = bytes / Body::kSize;
        Body body{source, destination, {}, copy.num_axes, Divider(copy.item_bytes / Body::kSize),
                  count};
        for (int axis = 0; axis < copy.num_axes; ++axis) {
            const StridedAxis& along = copy.axes[axis];
            body.axes[axis] = {Divider(along.size), along.from, along.to};
        }
        return launch(body, grid_for(count), stream);
    });
}

Status row_offsets(const std::uint32_t* lengths, std::uint32_t* offsets, std::int64_t batch,
                   Stream stream) noexcept {
    if (batch < 0) return kInvalidCall;
    return launch_teams(OffsetsBody{lengths, offsets}, {batch + 1, team_for(batch)}, stream);
}

}  // namespace kvcore::cuda
