// SPDX-License-Identifier: Apache-2.0
// K4 to K7: append tokens of a batch to pools of another dtype, and gather them; latent rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "convert_runs.hpp"

namespace kvcore::cuda {

/// The strides of a pool and of its tokens, for both directions.
struct PagedSides {
    RunStrides pool;
    RunStrides tokens;
    Runs runs;
};

template <class Byte>
[[nodiscard]] PagedSides paged_sides(PageShape shape, const PagedTensor<Byte>& pool,
                                     const DeviceBatch& batch, std::int64_t token_stride,
                                     std::int64_t head_stride, DType wide,
                                     std::int32_t* bad) noexcept {
    const bool is_scaled = !is_wide(pool.dtype) && pool.scales.data != nullptr;
    const std::int64_t group = is_scaled ? pool.scales.group : pool.dim;
    Runs runs;
    runs.tokens = batch.num_tokens;
    runs.heads = shape.heads;
    runs.groups = pool.dim == 0 ? 0 : pool.dim / group;
    runs.group = group;
    runs.of_scales = {pool.scales.page_stride,
                      pool.scales.token_stride,
                      0,
                      pool.scales.head_stride,
                      sizeof(float),
                      true};
    if (is_scaled) runs.scales = pool.scales.data;
    runs.places = BatchTokens(batch, shape.page_size, bad);
    runs.is_paged = true;
    return {{pool.page_stride, pool.token_stride, 0, pool.head_stride,
             group * item_size(pool.dtype), true},
            {0, 0, token_stride, head_stride, group * item_size(wide)},
            runs};
}

/// Returns the runs that write tokens to a pool of another dtype.
[[nodiscard]] inline Runs runs_into(PageShape shape, const PagedTensor<std::byte>& pool,
                                    const DeviceBatch& batch,
                                    const TokenRows<const std::byte>& source, DType wide,
                                    std::int32_t* bad) noexcept {
    PagedSides sides =
        paged_sides(shape, pool, batch, source.token_stride, source.head_stride, wide, bad);
    Runs& runs = sides.runs;
    runs.source = source.data;
    runs.from = sides.tokens;
    runs.destination = pool.data;
    runs.to = sides.pool;
    return runs;
}

/// Returns the runs that read tokens from a pool of another dtype.
[[nodiscard]] inline Runs runs_out_of(PageShape shape, const PagedTensor<const std::byte>& pool,
                                      const DeviceBatch& batch,
                                      const TokenRows<std::byte>& destination, DType wide,
                                      std::int32_t* bad) noexcept {
    PagedSides sides = paged_sides(shape, pool, batch, destination.token_stride,
                                   destination.head_stride, wide, bad);
    Runs& runs = sides.runs;
    runs.source = pool.data;
    runs.from = sides.pool;
    runs.destination = destination.data;
    runs.to = sides.tokens;
    return runs;
}

Status append_batch(PageShape shape, const PagedTensor<std::byte>& pool, const DeviceBatch& batch,
                    const TokenRows<const std::byte>& source, DType wide, Scales scales,
                    std::int32_t* bad, Stream stream) noexcept {
    if (wide == pool.dtype) {
        return append_batch({shape.heads, pool.dim * item_size(wide)},
                            {pool.data, pool.page_stride, pool.token_stride, pool.head_stride,
                             shape.page_size, nullptr},
                            batch, source, bad, stream);
    }
    Runs runs = runs_into(shape, pool, batch, source, wide, bad);
    if (is_wide(pool.dtype)) return widen_runs(runs, wide, pool.dtype, stream);
    if (scales == Scales::kFound) runs.new_scales = pool.scales.data;
    return quantize_runs(runs, wide, pool.dtype, stream);
}

Status append_batch(PageShape shape, const PagedTensor<std::byte>& pool, const DeviceBatch& batch,
                    const TokenRows<const std::byte>& source, DType wide, float scale,
                    std::int32_t* bad, Stream stream) noexcept {
    if (is_wide(pool.dtype) || pool.scales.data != nullptr) return kInvalidCall;
    Runs runs = runs_into(shape, pool, batch, source, wide, bad);
    runs.scale = scale;
    return quantize_runs(runs, wide, pool.dtype, stream);
}

Status gather_batch(PageShape shape, const PagedTensor<const std::byte>& pool,
                    const DeviceBatch& batch, const TokenRows<std::byte>& destination, DType wide,
                    std::int32_t* bad, Stream stream) noexcept {
    if (wide == pool.dtype) {
        return gather_batch({shape.heads, pool.dim * item_size(wide)},
                            {pool.data, pool.page_stride, pool.token_stride, pool.head_stride,
                             shape.page_size, nullptr},
                            batch, destination, bad, stream);
    }
    return widen_runs(runs_out_of(shape, pool, batch, destination, wide, bad), pool.dtype, wide,
                      stream);
}

// K and V, in one launch if possible. A token is counted once.

Status append_batch(PageShape shape, const TensorPair<PagedTensor<std::byte>>& pools,
                    const DeviceBatch& batch, const TensorPair<TokenRows<const std::byte>>& sources,
                    DType wide, Scales scales, std::int32_t* bad, Stream stream) noexcept {
    const auto& [k, v] = pools;
    if (k.dtype != v.dtype || is_wide(k.dtype)) {
        const Status status = append_batch(shape, k, batch, sources.k, wide, scales, bad, stream);
        if (status != kSuccess) return status;
        return append_batch(shape, v, batch, sources.v, wide, scales, nullptr, stream);
    }
    Runs of_k = runs_into(shape, k, batch, sources.k, wide, bad);
    Runs of_v = runs_into(shape, v, batch, sources.v, wide, nullptr);
    if (scales == Scales::kFound) {
        of_k.new_scales = k.scales.data;
        of_v.new_scales = v.scales.data;
    }
    return quantize_runs(of_k, of_v, wide, k.dtype, stream);
}

Status append_batch(PageShape shape, const TensorPair<PagedTensor<std::byte>>& pools,
                    const DeviceBatch& batch, const TensorPair<TokenRows<const std::byte>>& sources,
                    DType wide, TensorPair<float> scales, std::int32_t* bad,
                    Stream stream) noexcept {
    const auto& [k, v] = pools;
    if (k.dtype != v.dtype) {
        const Status status = append_batch(shape, k, batch, sources.k, wide, scales.k, bad, stream);
        if (status != kSuccess) return status;
        return append_batch(shape, v, batch, sources.v, wide, scales.v, nullptr, stream);
    }
    if (is_wide(k.dtype) || k.scales.data != nullptr || v.scales.data != nullptr) {
        return kInvalidCall;
    }
    Runs of_k = runs_into(shape, k, batch, sources.k, wide, bad);
    Runs of_v = runs_into(shape, v, batch, sources.v, wide, nullptr);
    of_k.scale = scales.k;
    of_v.scale = scales.v;
    return quantize_runs(of_k, of_v, wide, k.dtype, stream);
}

Status gather_batch(PageShape shape, const TensorPair<PagedTensor<const std::byte>>& pools,
                    const DeviceBatch& batch, const TensorPair<TokenRows<std::byte>>& destinations,
                    DType wide, std::int32_t* bad, Stream stream) noexcept {
    const auto& [k, v] = pools;
    if (k.dtype != v.dtype || is_wide(k.dtype)) {
        const Status status = gather_batch(shape, k, batch, destinations.k, wide, bad, stream);
        if (status != kSuccess) return status;
        return gather_batch(shape, v, batch, destinations.v, wide, nullptr, stream);
    }
    return widen_runs(runs_out_of(shape, k, batch, destinations.k, wide, bad),
                      runs_out_of(shape, v, batch, destinations.v, wide, nullptr), k.dtype, wide,
                      stream);
}

// A token that has no page is counted once, by the first part of its row.

Status append_latent(const PoolView<std::byte>& pool, const DeviceBatch& batch,
                     const TokenRows<const std::byte>& source, DType wide, std::int32_t* bad,
                     Stream stream) noexcept {
    const PageShape shape{pool.page_size, 1};
    const Status status =
        append_batch(shape, pool.k, batch, source, wide, Scales::kFound, bad, stream);
    if (status != kSuccess) return status;
    const TokenRows<const std::byte> ends{source.data + pool.k.dim * item_size(wide),
                                          source.token_stride, source.head_stride};
    return append_batch(shape, pool.rope, batch, ends, wide, Scales::kGiven, nullptr, stream);
}

Status gather_latent(const PoolView<const std::byte>& pool, const DeviceBatch& batch,
                     const TokenRows<std::byte>& destination, DType wide, std::int32_t* bad,
                     Stream stream) noexcept {
    const PageShape shape{pool.page_size, 1};
    const Status status = gather_batch(shape, pool.k, batch, destination, wide, bad, stream);
    if (status != kSuccess) return status;
    const TokenRows<std::byte> ends{destination.data + pool.k.dim * item_size(wide),
                                    destination.token_stride, destination.head_stride};
    return gather_batch(shape, pool.rope, batch, ends, wide, nullptr, stream);
}

}  // namespace kvcore::cuda
