// SPDX-License-Identifier: Apache-2.0
// Converts K and V to floats in scratch, scaled and padded. Each ISA's source includes this file
// inside its own unnamed namespace, after blocks.hpp.

// The addresses of a tile's keys, for head 0.
struct TileRows {
    const std::byte* k[kTileKeys];  // the last key is repeated up to kTileKeys
    const std::byte* v[kTileKeys];
    const std::byte* rope[kTileKeys];
    const std::byte* k_scales[kTileKeys];
    const std::byte* v_scales[kTileKeys];
    std::int64_t n;
};

// to[0 .. n] = from[0 .. n] * scale
template <DType kDType>
inline void widen_row(const std::byte* from, std::int64_t n, float scale, float* to) {
    const F32 factor = all(scale * Read<kDType>::kFactor);
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        store(to + i, read_elements<kDType>(from, i, kLanes) * factor);
    }
    if (i < n) store_some(to + i, read_elements<kDType>(from, i, n - i) * factor, n - i);
}

// Writes the elements of one head of `rows` as floats; the written rows are `stride` floats apart.
template <DType kDType>
void stage_rows(HeadRowsAt rows, std::int64_t n, std::int64_t dim, const std::byte* const* scales,
                std::int64_t scale_offset, std::int64_t group, float* to, std::int64_t stride) {
    for (std::int64_t t = 0; t < n; ++t) {
        const std::byte* from = rows.at(t);
        float* row = to + t * stride;
        if (scales[t] == nullptr) {
            widen_row<kDType>(from, dim, 1.0F, row);
            continue;
        }
        const std::byte* scale_at = scales[t] + scale_offset;
        for (std::int64_t i = 0; i < dim; i += group) {
            float scale;
            __builtin_memcpy(&scale, scale_at, sizeof scale);
            widen_row<kDType>(from + i * item_size(kDType), group < dim - i ? group : dim - i,
                              scale, row + i);
            scale_at += sizeof scale;
        }
    }
}

// Stages rows of nvfp4, whose `scales` are bytes. Both products are rounded as in
// `dequantize_nvfp4`.
inline void stage_blocks(HeadRowsAt rows, std::int64_t n, std::int64_t dim,
                         const std::byte* const* scales, std::int64_t scale_offset,
                         float global_scale, float* to, std::int64_t stride) {
    Tile row{};
    row.tokens = row.heads = 1;
    row.dim = (dim + kBlock - 1) / kBlock * kBlock;  // values may end within a block
    for (std::int64_t t = 0; t < n; ++t) {
        row.source = rows.at(t);
        row.scales = scales[t] + scale_offset;
        row.destination = reinterpret_cast<std::byte*>(to + t * stride);
        dequantize_nvfp4<DType::kFloat32>(row, global_scale);
    }
}

// to[i][t] = from[t][i], four keys by kLanes elements at a time. For t >= n, `to` gets arbitrary
// values.
inline void transpose(const float* from, std::int64_t stride, std::int64_t n, std::int64_t dim,
                      float* to) {
    for (std::int64_t i = 0; i < dim; i += kLanes) {
        for (std::int64_t t = 0; t < n; t += 4) {
            const float* at = from + t * stride + i;
            F32 row[4];
            KVCORE_UNROLL
            for (int k = 0; k < 4; ++k) row[k] = load<F32>(at + k * stride);
            store_across(row, to + i * kTileKeys + t, kTileKeys);
        }
    }
}

using StageRows = void (*)(HeadRowsAt, std::int64_t, std::int64_t, const std::byte* const*,
                           std::int64_t, std::int64_t, float*, std::int64_t);
using Dots = void (*)(std::int64_t, const float*, std::int64_t, HeadRowsAt, HeadRowsAt,
                      std::int64_t, std::int64_t, std::int64_t, float*, std::int64_t);
using AddValues = void (*)(std::int64_t, Weights, HeadRowsAt, HeadRowsAt, std::int64_t,
                           std::int64_t, std::int64_t, Sums);

// sums[m] += weights[m][t] * values[t] for keys begin .. end, read directly from their pages.
template <DType kDType>
void add_values(std::int64_t n, Weights weights, HeadRowsAt values, HeadRowsAt next,
                std::int64_t dim, std::int64_t begin, std::int64_t end, Sums sums) {
    add_products_to(n, weights, PointedRows<kDType>{values, next, dim}, begin, end, 0,
                    (dim + kLanes - 1) / kLanes * kLanes, sums);
}

// The functions of each dtype, by its number.
template <class Indices>
struct RowFunctions;
template <std::size_t... kIndex>
struct RowFunctions<std::index_sequence<kIndex...>> {
    static constexpr StageRows kStageRows[] = {stage_rows<static_cast<DType>(kIndex)>...};
    static constexpr Dots kDots[] = {dots<static_cast<DType>(kIndex)>...};
    static constexpr AddValues kAddValues[] = {add_values<static_cast<DType>(kIndex)>...};
    static constexpr float kReadFactor[] = {Read<static_cast<DType>(kIndex)>::kFactor...};
};
constexpr const auto& kStageRows = RowFunctions<AllDTypes>::kStageRows;
constexpr const auto& kDots = RowFunctions<AllDTypes>::kDots;
constexpr const auto& kAddValues = RowFunctions<AllDTypes>::kAddValues;
constexpr const auto& kReadFactor = RowFunctions<AllDTypes>::kReadFactor;
