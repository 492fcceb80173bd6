// SPDX-License-Identifier: Apache-2.0
// Converts narrow codes, times their scales, to wide elements, in pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "convert_pairs.hpp"
#include "convert_runs.hpp"
#include "teams.hpp"

namespace kvcore::cuda {

/// Each team writes a part of a run. Codes are widened in pairs. If a lane has a code or a scale
/// that is not finite, it converts its elements one by one, so that NaN results are the same as on
/// CPUs.
template <DType kNarrow, DType kWide, int kTensors>
struct DequantizeBody {
    static constexpr int kItem = static_cast<int>(item_size(kWide));
    static constexpr int kCount = 16 / kItem;
    static constexpr int kHeld = 4;  // pieces of a lane
    using Codes = Piece<kNarrow, kCount>;
    using Elements = Piece<kWide, kCount>;

    struct Tensor {
        Codes pieces[kHeld];
        float scale;
    };
    struct Held {
        FoundParts<kTensors> found;
        Tensor tensors[kTensors];
    };
    using Part = NoPart;

    RunParts<kTensors> parts;

    // Issues all loads before it waits for the first result.
    [[nodiscard]] KVCORE_HOST_DEVICE Part part(std::int64_t team, TeamLane of,
                                               Held& held) const noexcept {
        held.found = parts.find(team, of.lane == 0);
        const auto n = static_cast<std::uint32_t>(held.found.pieces);
        if (n == 0) return {};
        KVCORE_UNROLL
        for (int tensor = 0; tensor < kTensors; ++tensor) {
            const RunPart& run = held.found.of[tensor];
            Tensor& into = held.tensors[tensor];
            KVCORE_UNROLL
            for (int i = 0; i < kHeld; ++i) {
                const std::uint32_t at = of.piece(i);
                into.pieces[i] = {};
                if (at < n) into.pieces[i].load(run.source + std::int64_t{at} * Codes::kBytes);
            }
            const std::byte* scales = parts.runs(tensor).scales;
            into.scale = scales == nullptr ? 1.0F : float_of(load_word<4>(scales + run.scale));
        }
        return {};
    }

    KVCORE_HOST_DEVICE void finish(std::int64_t, TeamLane of, Part, Held& held) const noexcept {
        const auto n = static_cast<std::uint32_t>(held.found.pieces);
        if (n == 0) return;
        KVCORE_UNROLL
        for (int tensor = 0; tensor < kTensors; ++tensor) {
            std::byte* to = held.found.of[tensor].destination;
            if (is_finite(held.tensors[tensor])) {
                store(of, held.tensors[tensor], n, to);
            } else {
                store_one_by_one(of, held.tensors[tensor], n, to);
            }
        }
    }

   private:
    [[nodiscard]] KVCORE_HOST_DEVICE static bool is_finite(const Tensor& tensor) noexcept {
        std::uint32_t marks = 0;
        KVCORE_UNROLL
        for (int i = 0; i < kHeld; ++i) {
            for (const std::uint32_t word : tensor.pieces[i].words) {
                marks |= mark_infinite<kNarrow>(word);
            }
        }
        return (marks & kMarks) == 0 &&
               (bits_of(tensor.scale) & detail::kFloatInfinity) != detail::kFloatInfinity;
    }

    KVCORE_HOST_DEVICE static void store(TeamLane of, const Tensor& tensor, std::uint32_t n,
                                         std::byte* to) noexcept {
        KVCORE_UNROLL
        for (int i = 0; i < kHeld; ++i) {
            const std::uint32_t at = of.piece(i);
            if (at >= n) break;
            float values[kCount];
            KVCORE_UNROLL
            for (int j = 0; j < kCount; j += 4) {
                float four[4];
                widen_word<kNarrow>(tensor.pieces[i].words[j / 4], four);
                for (int k = 0; k < 4; ++k) values[j + k] = four[k] * tensor.scale;
            }
            rounded<kWide>(values).store(to + std::int64_t{at} * Elements::kBytes);
        }
    }

    // The loop is not unrolled, to keep rarely used code short. Each round moves all pieces by one
    // place, because registers cannot be indexed.
    KVCORE_HOST_DEVICE static void store_one_by_one(TeamLane of, Tensor& tensor, std::uint32_t n,
                                                    std::byte* to) noexcept {
        using Element = std::conditional_t<kItem == 2, std::uint16_t, std::uint32_t>;
        KVCORE_KEEP_LOOP
        for (std::uint32_t at = of.piece(0); at < n; at += static_cast<std::uint32_t>(of.lanes)) {
            std::byte* element = to + std::int64_t{at} * Elements::kBytes;
            Codes piece = tensor.pieces[0];
            KVCORE_UNROLL
            for (int i = 1; i < kHeld; ++i) tensor.pieces[i - 1] = tensor.pieces[i];
            KVCORE_KEEP_LOOP
            for (int i = 0; i < kCount; ++i, element += kItem) {
                const float value = product(piece.value(0), tensor.scale);
                store_unit(element, static_cast<Element>(narrowed<kWide>(value)));
                piece.drop_first();
            }
        }
    }
};

template <DType kNarrow, DType kWide, int kTensors>
[[nodiscard]] Status dequantize_pieces(const RunsOf<kTensors>& runs, Stream stream) noexcept {
    using Body = DequantizeBody<kNarrow, kWide, kTensors>;
    constexpr std::int64_t kHeld = Body::kHeld;
    const std::int32_t lanes = team_for((runs.of[0].group / Body::kCount + kHeld - 1) / kHeld);
    const RunParts<kTensors> parts(runs, Body::kCount, 1, item_size(kWide), lanes * kHeld);
    return launch_teams(Body{parts}, {parts.count(), lanes}, stream);
}

template <DType kWide, int kTensors>
[[nodiscard]] Status dequantize_pieces(const RunsOf<kTensors>& runs, DType narrow,
                                       Stream stream) noexcept {
    return narrow == DType::kInt8 ? dequantize_pieces<DType::kInt8, kWide>(runs, stream)
                                  : dequantize_pieces<DType::kFloat8E4M3FN, kWide>(runs, stream);
}

}  // namespace kvcore::cuda
