// SPDX-License-Identifier: Apache-2.0
// Converts elements of any dtype to wide elements: codes times their scales, or the nearest
// elements of another format.
#pragma once

#include <cstddef>
#include <cstdint>

#include "convert_elements.hpp"
#include "convert_narrow.hpp"
#include "convert_runs.hpp"
#include "teams.hpp"

namespace kvcore::cuda {

/// Each team writes a part of a run, and each lane the elements that it holds. This body takes
/// narrow codes one by one; DequantizeBody takes pieces of them.
template <DType kWide, int kCount>
struct WidenBody {
    static constexpr int kHeld = kCount == 8 ? 2 : 4;  // pieces of a lane

    struct Held {
        FoundParts<1> found;
        float values[kHeld][kCount];
    };
    using Part = NoPart;

    RunParts<1> parts;
    DType from;

    [[nodiscard]] KVCORE_HOST_DEVICE Part part(std::int64_t team, TeamLane of,
                                               Held& held) const noexcept {
        held.found = parts.find(team, of.lane == 0);
        if (held.found.pieces == 0) return {};
        switch (from) {
            case DType::kFloat32:
                load<DType::kFloat32>(of, held);
                break;
            case DType::kFloat16:
                load<DType::kFloat16>(of, held);
                break;
            case DType::kBFloat16:
                load<DType::kBFloat16>(of, held);
                break;
            default:
                if constexpr (kCount == 1) {
                    with_narrow(from, [&](auto code) { load<decltype(code)::value>(of, held); });
                }
        }
        return {};
    }

    KVCORE_HOST_DEVICE void finish(std::int64_t, TeamLane of, Part, Held& held) const noexcept {
        if (held.found.pieces == 0) return;
        const RunPart& run = held.found.of[0];
        const std::byte* scales = parts.runs(0).scales;
        if (scales != nullptr) {
            const float scale = float_of(load_word<4>(scales + run.scale));
            for (auto& values : held.values) {
                for (float& value : values) value = product(value, scale);
            }
        }
        KVCORE_UNROLL
        for (int i = 0; i < kHeld; ++i) {
            const std::int32_t at = of.lane + i * of.lanes;
            if (at >= held.found.pieces) break;
            using Elements = Piece<kWide, kCount>;
            Elements::of(held.values[i]).store(run.destination + at * Elements::kBytes);
        }
    }

   private:
    template <DType kFrom>
    KVCORE_HOST_DEVICE void load(TeamLane of, Held& held) const noexcept {
        using Elements = Piece<kFrom, kCount>;
        Elements pieces[kHeld];
        KVCORE_UNROLL
        for (int i = 0; i < kHeld; ++i) {
            const std::int32_t at = of.lane + i * of.lanes;
            pieces[i] = {};
            if (at >= held.found.pieces) continue;
            pieces[i].load(held.found.of[0].source + at * Elements::kBytes);
        }
        KVCORE_UNROLL
        for (int i = 0; i < kHeld; ++i) {
            for (int j = 0; j < kCount; ++j) held.values[i][j] = pieces[i].value(j);
        }
    }
};

template <DType kWide, int kCount>
[[nodiscard]] Status widen_pieces(const Runs& runs, DType from, Stream stream) noexcept {
    using Body = WidenBody<kWide, kCount>;
    constexpr std::int64_t kHeld = Body::kHeld;
    const std::int32_t lanes = team_for((runs.group / kCount + kHeld - 1) / kHeld);
    const RunParts<1> parts({{runs}}, kCount, item_size(from), item_size(kWide), lanes * kHeld);
    return launch_teams(Body{parts, from}, {parts.count(), lanes}, stream);
}

template <DType kWide>
[[nodiscard]] Status widen_to(const Runs& runs, DType from, Stream stream) noexcept {
    constexpr int kCount = 16 / static_cast<int>(item_size(kWide));
    const bool is_in_pieces = (is_wide(from) || has_pieces(from)) &&
                              takes_pieces(runs, kCount, item_size(from), item_size(kWide));
    if (!is_in_pieces) return widen_pieces<kWide, 1>(runs, from, stream);
    return is_wide(from) ? widen_pieces<kWide, kCount>(runs, from, stream)
                         : dequantize_pieces<kWide>(RunsOf<1>{{runs}}, from, stream);
}

Status widen_runs(const Runs& runs, DType from, DType wide, Stream stream) noexcept {
    if (runs.elements() == 0) return kSuccess;
    switch (wide) {
        case DType::kFloat32:
            return widen_to<DType::kFloat32>(runs, from, stream);
        case DType::kFloat16:
            return widen_to<DType::kFloat16>(runs, from, stream);
        default:
            return widen_to<DType::kBFloat16>(runs, from, stream);
    }
}

template <DType kWide>
[[nodiscard]] Status widen_both_to(const Runs& k, const Runs& v, DType from,
                                   Stream stream) noexcept {
    constexpr int kCount = 16 / static_cast<int>(item_size(kWide));
    const bool is_one = has_pieces(from) && are_alike(k, v) &&
                        takes_pieces(k, kCount, item_size(from), item_size(kWide)) &&
                        takes_pieces(v, kCount, item_size(from), item_size(kWide));
    if (is_one) return dequantize_pieces<kWide>(RunsOf<2>{{k, v}}, from, stream);
    const Status status = widen_runs(k, from, kWide, stream);
    return status == kSuccess ? widen_runs(v, from, kWide, stream) : status;
}

Status widen_runs(const Runs& k, const Runs& v, DType from, DType wide, Stream stream) noexcept {
    if (k.elements() == 0) return widen_runs(v, from, wide, stream);
    switch (wide) {
        case DType::kFloat32:
            return widen_both_to<DType::kFloat32>(k, v, from, stream);
        case DType::kFloat16:
            return widen_both_to<DType::kFloat16>(k, v, from, stream);
        default:
            return widen_both_to<DType::kBFloat16>(k, v, from, stream);
    }
}

}  // namespace kvcore::cuda
