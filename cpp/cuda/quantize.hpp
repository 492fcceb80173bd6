// SPDX-License-Identifier: Apache-2.0
// K16: converts contiguous elements to narrow codes and back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "atomics.hpp"
#include "convert_pairs.hpp"
#include "convert_runs.hpp"
#include "teams.hpp"

namespace kvcore::cuda {

// ---- a scale for each head, from all rows -------------------------------------------------------

/// Each team reads some rows of a head, or a part of a long row, and raises the head's maximum. The
/// maximum is stored in the place of the head's scale, as the bits of a float.
template <DType kWide, int kCount>
struct HeadMaximumBody {
    using Elements = Piece<kWide, kCount>;
    using Part = std::uint32_t;
    struct Held {
        std::int64_t head;
    };

    const std::byte* source;  // [rows, heads, pieces]
    std::uint32_t* maxima;    // [heads]
    std::int64_t rows;
    std::int64_t rows_each;  // of a team
    std::int64_t pieces;     // of a head's row
    std::int64_t pieces_each;
    Divider heads;
    Divider parts;  // of a row

    [[nodiscard]] KVCORE_HOST_DEVICE static Part join(Part a, Part b) noexcept {
        return a > b ? a : b;
    }

    [[nodiscard]] KVCORE_HOST_DEVICE Part part(std::int64_t team, TeamLane of,
                                               Held& held) const noexcept {
        const std::int64_t run = parts.quotient(team);
        const std::int64_t first = parts.remainder(team, run) * pieces_each;
        const std::int64_t block = heads.quotient(run);
        held.head = heads.remainder(run, block);
        const std::int64_t end = first + pieces_each < pieces ? first + pieces_each : pieces;
        Part most = 0;
        for (std::int64_t row = block * rows_each; row < rows && row < (block + 1) * rows_each;
             ++row) {
            const std::byte* from =
                source + (row * heads.divisor() + held.head) * pieces * Elements::kBytes;
            most = join(most, largest_of(from, first + of.lane, end, of.lanes));
        }
        return most;
    }

    KVCORE_HOST_DEVICE void finish(std::int64_t, TeamLane of, Part most,
                                   const Held& held) const noexcept {
        if (of.lane == 0 && most > 0) atomic_max(maxima + held.head, most);
    }

   private:
    // Several loads are in flight before the first piece is read.
    [[nodiscard]] KVCORE_HOST_DEVICE static Part largest_of(const std::byte* from, std::int64_t at,
                                                            std::int64_t end,
                                                            std::int64_t stride) noexcept {
        constexpr int kFlying = 4;
        Part most = 0;
        for (; at < end; at += kFlying * stride) {
            Elements some[kFlying];
            KVCORE_UNROLL
            for (int i = 0; i < kFlying; ++i) {
                some[i] = {};
                const std::int64_t piece = at + i * stride;
                if (piece < end) some[i].load(from + piece * Elements::kBytes);
            }
            most = join(most, largest_magnitude(some));
        }
        return most;
    }
};

template <DType kWide, int kCount>
[[nodiscard]] Status raise_maxima(HeadRows shape, const std::byte* source, float* scales,
                                  Stream stream) noexcept {
    // Enough teams for any GPU, but few enough that they do not wait for each other at the end.
    constexpr std::int64_t kTeams = 1 << 16;
    constexpr std::int64_t kLeast = 4096;  // elements of a team
    const std::int64_t elements = shape.rows * shape.heads * shape.dim;
    const std::int64_t share = std::max(elements / kTeams, kLeast);
    const std::int64_t pieces = shape.dim / kCount;
    const std::int64_t each = std::min(pieces, std::max<std::int64_t>(1, share / kCount));
    const std::int64_t rows_each = std::max<std::int64_t>(1, share / shape.dim);
    const std::int64_t parts = (pieces + each - 1) / each;
    const std::int64_t blocks = (shape.rows + rows_each - 1) / rows_each;
    const HeadMaximumBody<kWide, kCount> body{source,
                                              reinterpret_cast<std::uint32_t*>(scales),
                                              shape.rows,
                                              rows_each,
                                              pieces,
                                              each,
                                              Divider(shape.heads),
                                              Divider(parts)};
    return launch_teams(body, {blocks * shape.heads * parts, team_for((each + 3) / 4)}, stream);
}

template <DType kWide>
[[nodiscard]] Status raise_maxima_of(HeadRows shape, const std::byte* source, float* scales,
                                     Stream stream) noexcept {
    constexpr std::int64_t kItem = item_size(kWide);
    constexpr int kCount = 16 / static_cast<int>(kItem);
    return shape.dim % kCount == 0 && alignment_of(source) == 16
               ? raise_maxima<kWide, kCount>(shape, source, scales, stream)
               : raise_maxima<kWide, 1>(shape, source, scales, stream);
}

/// Writes zeros, or replaces maxima with scales.
struct ScalesBody {
    float* scales;
    std::int64_t heads;
    DType narrow;
    bool finishes;

    KVCORE_HOST_DEVICE void operator()(Lane lane) const noexcept {
        for (std::int64_t head = lane.index(); head < heads; head += lane.count()) {
            scales[head] = finishes ? scale_for(bits_of(scales[head]), narrow) : 0.0F;
        }
    }
};

[[nodiscard]] inline Status find_scales(HeadRows shape, DType wide, const std::byte* source,
                                        DType narrow, float* scales, Stream stream) noexcept {
    const Grid heads = grid_for(shape.heads);
    Status status = launch(ScalesBody{scales, shape.heads, narrow, false}, heads, stream);
    if (status == kSuccess && shape.rows * shape.heads * shape.dim > 0) {
        status = wide == DType::kFloat32
                     ? raise_maxima_of<DType::kFloat32>(shape, source, scales, stream)
                 : wide == DType::kFloat16
                     ? raise_maxima_of<DType::kFloat16>(shape, source, scales, stream)
                     : raise_maxima_of<DType::kBFloat16>(shape, source, scales, stream);
    }
    if (status != kSuccess) return status;
    return launch(ScalesBody{scales, shape.heads, narrow, true}, heads, stream);
}

// ---- the verbs ----------------------------------------------------------------------------------

// Returns the runs of contiguous elements, with a scale for each head of each token, or for each
// head of all tokens.
[[nodiscard]] inline Runs contiguous_runs(HeadRows shape, const std::byte* source,
                                          std::int64_t item_from, std::byte* destination,
                                          std::int64_t item_to, bool has_scales_of_rows) noexcept {
    constexpr std::int64_t kScale = sizeof(float);
    Runs runs;
    runs.tokens = shape.rows;
    runs.heads = shape.heads;
    runs.group = shape.dim;
    runs.source = source;
    runs.from.head = shape.dim * item_from;
    runs.from.token = shape.heads * runs.from.head;
    runs.destination = destination;
    runs.to.head = shape.dim * item_to;
    runs.to.token = shape.heads * runs.to.head;
    runs.of_scales.head = kScale;
    runs.of_scales.token = has_scales_of_rows ? shape.heads * kScale : 0;
    return runs;
}

[[nodiscard]] inline const std::byte* bytes_of(const float* scales) noexcept {
    return reinterpret_cast<const std::byte*>(scales);
}

Status quantize(Groups shape, DType wide, const std::byte* source, DType narrow, std::byte* codes,
                float* scales, Stream stream) noexcept {
    Runs runs =
        contiguous_runs({shape.groups, 1, shape.group}, source, item_size(wide), codes, 1, true);
    runs.new_scales = reinterpret_cast<std::byte*>(scales);
    return quantize_runs(runs, wide, narrow, stream);
}

Status quantize(HeadRows shape, DType wide, const std::byte* source, DType narrow, std::byte* codes,
                float* scales, Stream stream) noexcept {
    const Status status = find_scales(shape, wide, source, narrow, scales, stream);
    if (status != kSuccess) return status;
    return quantize_by(shape, wide, source, narrow, codes, scales, stream);
}

Status quantize_by(HeadRows shape, DType wide, const std::byte* source, DType narrow,
                   std::byte* codes, const float* scales, Stream stream) noexcept {
    Runs runs = contiguous_runs(shape, source, item_size(wide), codes, 1, false);
    runs.scales = bytes_of(scales);
    return quantize_runs(runs, wide, narrow, stream);
}

Status dequantize(Groups shape, DType narrow, const std::byte* codes, const float* scales,
                  DType wide, std::byte* destination, Stream stream) noexcept {
    Runs runs = contiguous_runs({shape.groups, 1, shape.group}, codes, 1, destination,
                                item_size(wide), true);
    runs.scales = bytes_of(scales);
    return widen_runs(runs, narrow, wide, stream);
}

Status dequantize(HeadRows shape, DType narrow, const std::byte* codes, const float* scales,
                  DType wide, std::byte* destination, Stream stream) noexcept {
    Runs runs = contiguous_runs(shape, codes, 1, destination, item_size(wide), false);
    runs.scales = bytes_of(scales);
    return widen_runs(runs, narrow, wide, stream);
}

}  // namespace kvcore::cuda
