// SPDX-License-Identifier: Apache-2.0
// Narrow codes times their scales, as wide elements, in pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "convert_pairs.hpp"
#include "convert_runs.hpp"
#include "teams.hpp"

namespace kvcore::cuda {

/// A team writes a part of a run. Codes are widened in pairs; where a lane has one that is no
/// finite number, or a scale that is none, it takes its elements one by one, so that their NaN is
/// that of processors.
template <DType kNarrow, DType kWide>
struct DequantizeBody {
    static constexpr int kItem = static_cast<int>(item_size(kWide));
    static constexpr int kCount = 16 / kItem;
    static constexpr int kHeld = 4;  // pieces of a lane
    using Codes = Piece<kNarrow, kCount>;
    using Elements = Piece<kWide, kCount>;

    struct Held {
        RunPart run;
        Codes pieces[kHeld];
        float scale;
    };
    using Part = NoPart;

    RunParts parts;

    [[nodiscard]] KVCORE_HOST_DEVICE Part part(std::int64_t team, TeamLane of,
                                               Held& held) const noexcept {
        held.run = parts.find(team, of.lane == 0);
        if (held.run.source == nullptr) return {};
        const auto n = static_cast<std::uint32_t>(held.run.pieces);
        KVCORE_UNROLL
        for (int i = 0; i < kHeld; ++i) {
            const std::uint32_t at = of.piece(i);
            held.pieces[i] = {};
            if (at < n) held.pieces[i].load(held.run.source + std::int64_t{at} * Codes::kBytes);
        }
        const std::byte* scales = parts.runs().scales;
        held.scale = scales == nullptr ? 1.0F : float_of(load_word<4>(scales + held.run.scale));
        return {};
    }

    KVCORE_HOST_DEVICE void finish(std::int64_t, TeamLane of, Part, Held& held) const noexcept {
        if (held.run.source == nullptr) return;
        std::uint32_t marks = 0;
        KVCORE_UNROLL
        for (int i = 0; i < kHeld; ++i) {
            for (const std::uint32_t word : held.pieces[i].words)
                marks |= mark_infinite<kNarrow>(word);
        }
        const bool is_finite =
            (marks & kMarks) == 0 &&
            (bits_of(held.scale) & detail::kFloatInfinity) != detail::kFloatInfinity;
        if (!is_finite) return store_one_by_one(of, held);
        const auto n = static_cast<std::uint32_t>(held.run.pieces);
        KVCORE_UNROLL
        for (int i = 0; i < kHeld; ++i) {
            const std::uint32_t at = of.piece(i);
            if (at >= n) break;
            float values[kCount];
            KVCORE_UNROLL
            for (int j = 0; j < kCount; j += 4) {
                float four[4];
                widen_word<kNarrow>(held.pieces[i].words[j / 4], four);
                for (int k = 0; k < 4; ++k) values[j + k] = four[k] * held.scale;
            }
            std::byte* to = held.run.destination + std::int64_t{at} * Elements::kBytes;
            rounded<kWide>(values).store(to);
        }
    }

   private:
    // A loop, not unrolled, so that what is rarely needed is short. The pieces are turned in it:
    // registers have no index.
    KVCORE_HOST_DEVICE static void store_one_by_one(TeamLane of, Held& held) noexcept {
        using Element = std::conditional_t<kItem == 2, std::uint16_t, std::uint32_t>;
        KVCORE_KEEP_LOOP
        for (std::int64_t at = of.lane; at < held.run.pieces; at += of.lanes) {
            std::byte* to = held.run.destination + at * Elements::kBytes;
            Codes piece = held.pieces[0];
            KVCORE_UNROLL
            for (int i = 1; i < kHeld; ++i) held.pieces[i - 1] = held.pieces[i];
            KVCORE_KEEP_LOOP
            for (int i = 0; i < kCount; ++i, to += kItem) {
                const float value = product(piece.value(0), held.scale);
                store_unit(to, static_cast<Element>(narrowed<kWide>(value)));
                piece.drop_first();
            }
        }
    }
};

template <DType kNarrow, DType kWide>
[[nodiscard]] Status dequantize_pieces(const Runs& runs, Stream stream) noexcept {
    using Body = DequantizeBody<kNarrow, kWide>;
    constexpr std::int64_t kHeld = Body::kHeld;
    const std::int32_t lanes = team_for((runs.group / Body::kCount + kHeld - 1) / kHeld);
    const RunParts parts(runs, Body::kCount, 1, item_size(kWide), lanes * kHeld);
    return launch_teams(Body{parts}, {parts.count(), lanes}, stream);
}

}  // namespace kvcore::cuda
