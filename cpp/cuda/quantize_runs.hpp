// SPDX-License-Identifier: Apache-2.0
// Converts wide elements to narrow codes, with scales that are computed or given.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "convert_pairs.hpp"
#include "convert_runs.hpp"
#include "teams.hpp"

namespace kvcore::cuda {

/// Codes of one dtype, in pieces.
template <DType kNarrow>
struct CodesOf {
    [[nodiscard]] KVCORE_HOST_DEVICE static constexpr DType dtype() noexcept { return kNarrow; }
    template <int kCount>
    KVCORE_HOST_DEVICE static void store(std::byte* to, const float (&values)[kCount]) noexcept {
        Piece<kNarrow, kCount>::of(values).store(to);
    }
};

/// Codes of a dtype that the launch names, one by one.
struct AnyCodes {
    DType narrow;

    [[nodiscard]] KVCORE_HOST_DEVICE DType dtype() const noexcept { return narrow; }
    KVCORE_HOST_DEVICE void store(std::byte* to, const float (&value)[1]) const noexcept {
        with_narrow(narrow, [&](auto code) { CodesOf<decltype(code)::value>::store(to, value); });
    }
};

/// Each team writes the codes of a part of a run. It finds the largest magnitude, then divides by
/// it; meanwhile it holds the elements in registers. Elements of a long run that do not fit are
/// read twice.
template <DType kWide, class Codes, int kCount, int kTensors>
struct QuantizeBody {
    using Elements = Piece<kWide, kCount>;
    static constexpr int kHeld = 4;  // pieces of a lane
    // With two tensors, a lane holds 128 bytes.
    static constexpr int kBlocks = kTensors == 1 ? 4 : 3;

    struct Tensor {
        Elements pieces[kHeld];
    };
    struct Held {
        FoundParts<kTensors> found;
        Tensor tensors[kTensors];
    };
    /// Bits of the largest finite magnitudes: 32 for each tensor.
    using Part = std::conditional_t<kTensors == 1, std::uint32_t, std::uint64_t>;

    RunParts<kTensors> parts;
    Codes codes;

    [[nodiscard]] KVCORE_HOST_DEVICE static Part join(Part a, Part b) noexcept {
        Part joined = 0;
        KVCORE_UNROLL
        for (int tensor = 0; tensor < kTensors; ++tensor) {
            joined |= placed(larger(part_of(a, tensor), part_of(b, tensor)), tensor);
        }
        return joined;
    }

    // Issues all loads before it waits for the first result.
    [[nodiscard]] KVCORE_HOST_DEVICE Part part(std::int64_t team, TeamLane of,
                                               Held& held) const noexcept {
        held.found = parts.find(team, of.lane == 0);
        const std::int64_t n = held.found.pieces;
        if (n == 0) return 0;
        const std::uint32_t first = held_pieces(of, n);
        KVCORE_UNROLL
        for (int tensor = 0; tensor < kTensors; ++tensor) {
            KVCORE_UNROLL
            for (int i = 0; i < kHeld; ++i) {
                const std::uint32_t at = of.piece(i);
                Elements& piece = held.tensors[tensor].pieces[i];
                piece = {};
                if (at < first) piece.load(address(held.found.of[tensor], at));
            }
        }
        if (parts.runs(0).new_scales == nullptr) return 0;
        Part all = 0;
        KVCORE_UNROLL
        for (int tensor = 0; tensor < kTensors; ++tensor) {
            std::uint32_t most = largest_magnitude(held.tensors[tensor].pieces);
            KVCORE_KEEP_LOOP
            for (std::int64_t at = of.lane + kHeld * of.lanes; at < n; at += of.lanes) {
                const Elements more[] = {loaded(held.found.of[tensor], at)};
                most = larger(most, largest_magnitude(more));
            }
            all |= placed(most, tensor);
        }
        return all;
    }

    KVCORE_HOST_DEVICE void finish(std::int64_t, TeamLane of, Part all,
                                   const Held& held) const noexcept {
        const std::int64_t n = held.found.pieces;
        if (n == 0) return;
        const std::uint32_t first = held_pieces(of, n);
        KVCORE_UNROLL
        for (int tensor = 0; tensor < kTensors; ++tensor) {
            const RunPart& run = held.found.of[tensor];
            const float factor =
                1.0F / scale_of(parts.runs(tensor), of, part_of(all, tensor), run.scale);
            KVCORE_UNROLL
            for (int i = 0; i < kHeld; ++i) {
                const std::uint32_t at = of.piece(i);
                if (at < first) store(run, at, held.tensors[tensor].pieces[i], factor);
            }
            KVCORE_KEEP_LOOP
            for (std::int64_t at = of.lane + kHeld * of.lanes; at < n; at += of.lanes) {
                store(run, at, loaded(run, at), factor);
            }
        }
    }

   private:
    [[nodiscard]] KVCORE_HOST_DEVICE static std::uint32_t larger(std::uint32_t a,
                                                                 std::uint32_t b) noexcept {
        return a > b ? a : b;
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static std::uint32_t part_of(Part all, int tensor) noexcept {
        return static_cast<std::uint32_t>(all >> 32 * tensor);
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static Part placed(std::uint32_t most, int tensor) noexcept {
        return Part{most} << 32 * tensor;
    }
    // Returns how many of a run's n pieces the team holds.
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
    [[nodiscard]] KVCORE_HOST_DEVICE float scale_of(const Runs& runs, TeamLane of,
                                                    std::uint32_t most,
                                                    std::int64_t offset) const noexcept {
        if (runs.new_scales != nullptr) {
            const float scale = scale_for(most, codes.dtype());
            if (of.lane == 0) store_word<4>(runs.new_scales + offset, bits_of(scale));
            return scale;
        }
        return runs.scales == nullptr ? runs.scale : float_of(load_word<4>(runs.scales + offset));
    }
    KVCORE_HOST_DEVICE void store(const RunPart& run, std::int64_t at, const Elements& piece,
                                  float factor) const noexcept {
        float values[kCount];
        for (int i = 0; i < kCount; ++i) values[i] = piece.number(i) * factor;
        codes.store(run.destination + at * kCount, values);
    }
};

template <DType kWide, int kCount, class Codes, int kTensors>
[[nodiscard]] Status quantize_pieces(const RunsOf<kTensors>& runs, Codes codes,
                                     Stream stream) noexcept {
    using Body = QuantizeBody<kWide, Codes, kCount, kTensors>;
    constexpr std::int64_t kHeld = Body::kHeld;
    const std::int64_t pieces = runs.of[0].group / kCount;
    const std::int32_t lanes = team_for((pieces + kHeld - 1) / kHeld);
    // A scale belongs to a whole run, so long runs may be cut only if scales are given.
    const std::int64_t of_part = runs.of[0].new_scales != nullptr ? pieces : lanes * kHeld;
    const RunParts<kTensors> parts(runs, kCount, item_size(kWide), 1, of_part);
    return launch_teams(Body{parts, codes}, {parts.count(), lanes}, stream);
}

template <DType kWide>
constexpr int kPiece = 16 / static_cast<int>(item_size(kWide));

template <DType kWide>
[[nodiscard]] bool is_in_pieces(const Runs& runs) noexcept {
    return takes_pieces(runs, kPiece<kWide>, item_size(kWide), 1);
}

template <DType kWide, int kTensors>
[[nodiscard]] Status quantize_pieces(const RunsOf<kTensors>& runs, DType narrow,
                                     Stream stream) noexcept {
    return narrow == DType::kInt8
               ? quantize_pieces<kWide, kPiece<kWide>>(runs, CodesOf<DType::kInt8>{}, stream)
               : quantize_pieces<kWide, kPiece<kWide>>(runs, CodesOf<DType::kFloat8E4M3FN>{},
                                                       stream);
}

// Codes of float8_e5m2, which caches seldom have, are made one by one: no kernel is compiled for
// pieces of them.

template <DType kWide>
[[nodiscard]] Status quantize_from(DType narrow, Stream stream, const Runs& runs) noexcept {
    if (runs.elements() == 0) return kSuccess;
    return has_pieces(narrow) && is_in_pieces<kWide>(runs)
               ? quantize_pieces<kWide>(RunsOf<1>{{runs}}, narrow, stream)
               : quantize_pieces<kWide, 1>(RunsOf<1>{{runs}}, AnyCodes{narrow}, stream);
}

template <DType kWide>
[[nodiscard]] Status quantize_from(DType narrow, Stream stream, const Runs& k,
                                   const Runs& v) noexcept {
    const bool is_one = has_pieces(narrow) && k.elements() > 0 && are_alike(k, v) &&
                        is_in_pieces<kWide>(k) && is_in_pieces<kWide>(v);
    if (is_one) return quantize_pieces<kWide>(RunsOf<2>{{k, v}}, narrow, stream);
    const Status status = quantize_from<kWide>(narrow, stream, k);
    return status == kSuccess ? quantize_from<kWide>(narrow, stream, v) : status;
}

// `runs`: the runs of one tensor, or of K and V.

template <class... OfRuns>
[[nodiscard]] Status quantize_any(DType wide, DType narrow, Stream stream,
                                  const OfRuns&... runs) noexcept {
    switch (wide) {
        case DType::kFloat32:
            return quantize_from<DType::kFloat32>(narrow, stream, runs...);
        case DType::kFloat16:
            return quantize_from<DType::kFloat16>(narrow, stream, runs...);
        default:
            return quantize_from<DType::kBFloat16>(narrow, stream, runs...);
    }
}

Status quantize_runs(const Runs& runs, DType wide, DType narrow, Stream stream) noexcept {
    return quantize_any(wide, narrow, stream, runs);
}

Status quantize_runs(const Runs& k, const Runs& v, DType wide, DType narrow,
                     Stream stream) noexcept {
    return quantize_any(wide, narrow, stream, k, v);
}

}  // namespace kvcore::cuda
