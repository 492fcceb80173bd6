// SPDX-License-Identifier: Apache-2.0
// K17: merges pairs of partial attentions over different keys.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "convert_elements.hpp"
#include "kvcore/cuda.hpp"
#include "teams.hpp"

namespace kvcore::cuda {

/// Each team merges two states. All its lanes read both LSEs before a lane writes the merged LSE,
/// which may be stored in place of the LSE of `a`.
template <DType kDType, int kCount>
struct MergeBody {
    using Elements = Piece<kDType, kCount>;
    using Part = NoPart;
    struct Held {
        float of_a;  // weights that add up to 1; 0 for an empty state
        float of_b;
        float lse;
    };

    AttentionStates a;
    AttentionStates b;
    std::byte* values;
    float* lse;
    std::int64_t pieces;  // of a state

    [[nodiscard]] KVCORE_HOST_DEVICE Part part(std::int64_t state, TeamLane,
                                               Held& held) const noexcept {
        const float lse_a = known(a.lse[state]);
        const float lse_b = known(b.lse[state]);
        const float most = lse_b > lse_a ? lse_b : lse_a;
        held = {0, 0, most};
        if (most == -kInfinite) return {};
        const float of_a = expf(lse_a - most);
        const float of_b = expf(lse_b - most);
        const float sum = of_a + of_b;
        held = {of_a / sum, of_b / sum, most + logf(sum)};
        return {};
    }

    KVCORE_HOST_DEVICE void finish(std::int64_t state, TeamLane of, Part,
                                   const Held& held) const noexcept {
        const std::int64_t first = state * pieces * Elements::kBytes;
        for (std::int64_t i = of.lane; i < pieces; i += of.lanes) {
            blend(held, first + i * Elements::kBytes);
        }
        if (of.lane == 0) lse[state] = held.lse;
    }

   private:
    static constexpr float kInfinite = std::numeric_limits<float>::infinity();

    // An LSE of +inf also means an empty state.
    [[nodiscard]] KVCORE_HOST_DEVICE static float known(float of) noexcept {
        return of == kInfinite ? -kInfinite : of;
    }
    // A state with weight 0 is not read.
    KVCORE_HOST_DEVICE void blend(const Held& held, std::int64_t at) const noexcept {
        Elements of_a{};
        Elements of_b{};
        if (held.of_a != 0) of_a.load(a.values + at);
        if (held.of_b != 0) of_b.load(b.values + at);
        float merged[kCount];
        for (int i = 0; i < kCount; ++i) {
            merged[i] = fmaf(of_b.value(i), held.of_b, of_a.value(i) * held.of_a);
        }
        Elements::of(merged).store(values + at);
    }
};

template <DType kDType, int kCount>
[[nodiscard]] Status merge_pieces(std::int64_t n, std::int64_t dim, AttentionStates a,
                                  AttentionStates b, std::byte* values, float* lse,
                                  Stream stream) noexcept {
    const std::int64_t pieces = dim / kCount;
    const MergeBody<kDType, kCount> body{a, b, values, lse, pieces};
    return launch_teams(body, {n, team_for((pieces + 1) / 2)}, stream);
}

template <DType kDType>
[[nodiscard]] Status merge_of(std::int64_t n, std::int64_t dim, AttentionStates a,
                              AttentionStates b, std::byte* values, float* lse,
                              Stream stream) noexcept {
    constexpr std::int64_t kItem = item_size(kDType);
    constexpr int kCount = 16 / static_cast<int>(kItem);
    return dim % kCount == 0 && alignment_of(a.values, b.values, values) == 16
               ? merge_pieces<kDType, kCount>(n, dim, a, b, values, lse, stream)
               : merge_pieces<kDType, 1>(n, dim, a, b, values, lse, stream);
}

Status merge_states(std::int64_t n, std::int64_t dim, DType dtype, AttentionStates a,
                    AttentionStates b, std::byte* values, float* lse, Stream stream) noexcept {
    switch (dtype) {
        case DType::kFloat32:
            return merge_of<DType::kFloat32>(n, dim, a, b, values, lse, stream);
        case DType::kFloat16:
            return merge_of<DType::kFloat16>(n, dim, a, b, values, lse, stream);
        default:
            return merge_of<DType::kBFloat16>(n, dim, a, b, values, lse, stream);
    }
}

}  // namespace kvcore::cuda
