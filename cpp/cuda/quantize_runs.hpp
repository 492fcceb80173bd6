// SPDX-License-Identifier: Apache-2.0
// Wide elements to narrow codes, with scales that are found or given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "convert_pairs.hpp"
#include "convert_runs.hpp"
#include "teams.hpp"

namespace kvcore::cuda {

/// A team makes the codes of a part of a run. It holds the elements in registers between looking
/// for the largest and dividing by it; what a long run has beyond those is read twice.
template <DType kWide, DType kNarrow, int kCount>
struct QuantizeBody {
    using Elements = Piece<kWide, kCount>;
    static constexpr int kHeld = 4;  // pieces of a lane

    struct Held {
        RunPart run;
        Elements pieces[kHeld];
    };
    using Part = std::uint32_t;  // bits of the largest finite magnitude

    RunParts parts;

    [[nodiscard]] KVCORE_HOST_DEVICE static Part join(Part a, Part b) noexcept {
        return a > b ? a : b;
    }

    [[nodiscard]] KVCORE_HOST_DEVICE Part part(std::int64_t team, TeamLane of,
                                               Held& held) const noexcept {
        held.run = parts.find(team, of.lane == 0);
        if (held.run.source == nullptr) return 0;
        const std::int64_t n = held.run.pieces;
        const std::uint32_t first = held_pieces(of, n);
        KVCORE_UNROLL
        for (int i = 0; i < kHeld; ++i) {
            const std::uint32_t at = of.piece(i);
            held.pieces[i] = {};
            if (at < first) held.pieces[i].load(address(held.run, at));
        }
        if (parts.runs().new_scales == nullptr) return 0;
        Part most = largest_magnitude(held.pieces);
        KVCORE_KEEP_LOOP
        for (std::int64_t at = of.lane + kHeld * of.lanes; at < n; at += of.lanes) {
            const Elements more[] = {loaded(held.run, at)};
            most = join(most, largest_magnitude(more));
        }
        return most;
    }

    KVCORE_HOST_DEVICE void finish(std::int64_t, TeamLane of, Part most,
                                   const Held& held) const noexcept {
        if (held.run.source == nullptr) return;
        const float factor = 1.0F / scale_of(of, most, held.run);
        const std::int64_t n = held.run.pieces;
        const std::uint32_t first = held_pieces(of, n);
        KVCORE_UNROLL
        for (int i = 0; i < kHeld; ++i) {
            const std::uint32_t at = of.piece(i);
            if (at < first) store(held.run, at, held.pieces[i], factor);
        }
        KVCORE_KEEP_LOOP
        for (std::int64_t at = of.lane + kHeld * of.lanes; at < n; at += of.lanes) {
            store(held.run, at, loaded(held.run, at), factor);
        }
    }

   private:
    // Of a run's n pieces, those that the team holds.
    [[nodiscard]] KVCORE_HOST_DEVICE static std::uint32_t held_pieces(TeamLane of,
                                                                      std::int64_t n) noexcept {
        const std::int32_t most = kHeld * of.lanes;
        return static_cast<std::uint32_t>(n < most ? n : most);
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static const std::byte* address(const RunPart& run,
                                                                     std::int64_t at) noexcept {
        return run.source + at * Elements::kBytes;
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static Elements loaded(const RunPart& run,
                                                            std::int64_t at) noexcept {
        Elements piece;
        piece.load(address(run, at));
        return piece;
    }
    [[nodiscard]] KVCORE_HOST_DEVICE float scale_of(TeamLane of, Part most,
                                                    const RunPart& run) const noexcept {
        const Runs& runs = parts.runs();
        if (runs.new_scales != nullptr) {
            const float scale = scale_for(most, kNarrow);
            if (of.lane == 0) store_word<4>(runs.new_scales + run.scale, bits_of(scale));
            return scale;
        }
        return runs.scales == nullptr ? runs.scale
                                      : float_of(load_word<4>(runs.scales + run.scale));
    }
    KVCORE_HOST_DEVICE void store(const RunPart& run, std::int64_t at, const Elements& piece,
                                  float factor) const noexcept {
        float values[kCount];
        for (int i = 0; i < kCount; ++i) values[i] = piece.number(i) * factor;
        Piece<kNarrow, kCount>::of(values).store(run.destination + at * kCount);
    }
};

template <DType kWide, DType kNarrow, int kCount>
[[nodiscard]] Status quantize_pieces(const Runs& runs, Stream stream) noexcept {
    using Body = QuantizeBody<kWide, kNarrow, kCount>;
    constexpr std::int64_t kHeld = Body::kHeld;
    const std::int64_t pieces = runs.group / kCount;
    const std::int32_t lanes = team_for((pieces + kHeld - 1) / kHeld);
    // Scales are those of whole runs; where they are given, long runs may be cut.
    const std::int64_t of_part = runs.new_scales != nullptr ? pieces : lanes * kHeld;
    const RunParts parts(runs, kCount, item_size(kWide), 1, of_part);
    return launch_teams(Body{parts}, {parts.count(), lanes}, stream);
}

template <DType kWide, DType kNarrow>
[[nodiscard]] Status quantize_both(const Runs& runs, Stream stream) noexcept {
    constexpr int kCount = 16 / static_cast<int>(item_size(kWide));
    return takes_pieces(runs, kCount, item_size(kWide), 1)
               ? quantize_pieces<kWide, kNarrow, kCount>(runs, stream)
               : quantize_pieces<kWide, kNarrow, 1>(runs, stream);
}

template <DType kWide>
[[nodiscard]] Status quantize_from(const Runs& runs, DType narrow, Stream stream) noexcept {
    switch (narrow) {
        case DType::kFloat8E4M3FN:
            return quantize_both<kWide, DType::kFloat8E4M3FN>(runs, stream);
        case DType::kFloat8E5M2:
            return quantize_both<kWide, DType::kFloat8E5M2>(runs, stream);
        default:
            return quantize_both<kWide, DType::kInt8>(runs, stream);
    }
}

Status quantize_runs(const Runs& runs, DType wide, DType narrow, Stream stream) noexcept {
    if (runs.elements() == 0) return kSuccess;
    switch (wide) {
        case DType::kFloat32:
            return quantize_from<DType::kFloat32>(runs, narrow, stream);
        case DType::kFloat16:
            return quantize_from<DType::kFloat16>(runs, narrow, stream);
        default:
            return quantize_from<DType::kBFloat16>(runs, narrow, stream);
    }
}

}  // namespace kvcore::cuda
