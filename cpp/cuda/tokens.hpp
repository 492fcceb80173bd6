// SPDX-License-Identifier: Apache-2.0
// K1 and K7: the bytes of tokens into pages and out of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "atomics.hpp"
#include "batch_tokens.hpp"
#include "copy_body.hpp"
#include "kvcore/cuda.hpp"

namespace kvcore::cuda {

/// Tokens by their slots: an item is K or V of one.
template <class Slot>
struct SlotItems {
    struct Tensor {
        std::byte* pool;  // of page 0
        std::int64_t page_stride;
        std::int64_t token_stride;
        const std::byte* rows;  // of token 0
        std::int64_t row_stride;
    };
    Tensor tensors[2];
    const Slot* slots;  // [items]
    std::int64_t capacity;
    Divider page_size;
    std::int32_t* bad;

    [[nodiscard]] bool counts() const noexcept { return bad != nullptr; }
    [[nodiscard]] KVCORE_HOST_DEVICE Place find(int part, std::int64_t item, bool counts) const {
        const std::int64_t slot = slots[item];
        if (slot < 0) return {};
        if (slot >= capacity) {
            if (counts && bad != nullptr) atomic_add(bad, 1);
            return {};
        }
        const std::int64_t page = page_size.quotient(slot);
        const std::int64_t entry = page_size.remainder(slot, page);
        const Tensor& tensor = tensors[part];
        return {tensor.pool + page * tensor.page_stride + entry * tensor.token_stride,
                tensor.rows + item * tensor.row_stride};
    }
};

/// Tokens of a batch, which are written to pages or, where these are const, read.
template <class PoolByte, class RowByte>
struct BatchItems {
    BatchTokens tokens;
    PoolByte* pool;  // of page 0
    std::int64_t page_stride;
    std::int64_t token_stride;
    TokenRows<RowByte> rows;
    std::int32_t* bad;

    [[nodiscard]] bool counts() const noexcept { return bad != nullptr; }
    [[nodiscard]] KVCORE_HOST_DEVICE Place find(int /*part*/, std::int64_t item,
                                                bool counts) const {
        const TokenPlace place = tokens.find(item, counts);
        if (place.page < 0) return {};
        PoolByte* in_pool = pool + place.page * page_stride + place.entry * token_stride;
        RowByte* in_rows = rows.data + item * rows.token_stride;
        if constexpr (std::is_const_v<PoolByte>) {
            return {in_rows, in_pool};
        } else {
            return {in_pool, in_rows};
        }
    }
};

namespace {

/// Tokens are items: what is left of them are heads.
[[nodiscard]] CopyShape token_shape(std::int64_t head_bytes, const CopyAxis& heads) noexcept {
    return CopyShape{head_bytes, {}, heads}.merged();
}

template <class Slot>
[[nodiscard]] typename SlotItems<Slot>::Tensor slot_tensor(
    const PagedTensor<std::byte>& tensor, const TokenRows<const std::byte>& rows) noexcept {
    return {tensor.data, tensor.page_stride, tensor.token_stride, rows.data, rows.token_stride};
}

[[nodiscard]] CopyShape slot_shape(const PoolView<std::byte>& pool,
                                   const PagedTensor<std::byte>& tensor,
                                   const TokenRows<const std::byte>& rows) noexcept {
    if (tensor.dim == 0) return {};
    return token_shape(tensor.dim * item_size(tensor.dtype),
                       {pool.heads, tensor.head_stride, rows.head_stride});
}

template <class Slot>
[[nodiscard]] Status append_to(const PoolView<std::byte>& pool, const TokenRows<const std::byte>& k,
                               const TokenRows<const std::byte>& v, const Slot* slots,
                               std::int64_t n, std::int32_t* bad, Stream stream) noexcept {
    const auto of_k = slot_tensor<Slot>(pool.k, k);
    const auto of_v = slot_tensor<Slot>(pool.v, v);
    const auto aligned = [](const typename SlotItems<Slot>::Tensor& tensor) {
        return alignment_of(tensor.pool, tensor.page_stride, tensor.token_stride, tensor.rows,
                            tensor.row_stride);
    };
    const std::int64_t alignment =
        pool.v.dim == 0 ? aligned(of_k) : alignment_of(aligned(of_k), aligned(of_v));
    return launch_copy(
        SlotItems<Slot>{
            {of_k, of_v}, slots, pool.pages * pool.page_size, Divider(pool.page_size), bad},
        n, slot_shape(pool, pool.k, k), slot_shape(pool, pool.v, v), alignment, stream);
}

template <class PoolByte, class RowByte>
[[nodiscard]] Status move_batch(const PagedRows<PoolByte>& pool, const DeviceBatch& batch,
                                const TokenRows<RowByte>& rows, const CopyShape& shape,
                                std::int32_t* bad, Stream stream) noexcept {
    if (batch.table.batch == 0) return kSuccess;
    const BatchItems<PoolByte, RowByte> items{BatchTokens(batch, pool.block_size, bad),
                                              pool.data,
                                              pool.block_stride,
                                              pool.token_stride,
                                              rows,
                                              bad};
    return launch_copy(
        items, batch.num_tokens, shape, {},
        alignment_of(pool.data, pool.block_stride, pool.token_stride, rows.data, rows.token_stride),
        stream);
}

}  // namespace

Status append_slots(const PoolView<std::byte>& pool, const TokenRows<const std::byte>& k,
                    const TokenRows<const std::byte>& v, const std::int64_t* slots, std::int64_t n,
                    std::int32_t* bad, Stream stream) noexcept {
    return append_to(pool, k, v, slots, n, bad, stream);
}

Status append_slots(const PoolView<std::byte>& pool, const TokenRows<const std::byte>& k,
                    const TokenRows<const std::byte>& v, const std::int32_t* slots, std::int64_t n,
                    std::int32_t* bad, Stream stream) noexcept {
    return append_to(pool, k, v, slots, n, bad, stream);
}

Status append_batch(TokenShape shape, const PagedRows<std::byte>& pool, const DeviceBatch& batch,
                    const TokenRows<const std::byte>& source, std::int32_t* bad,
                    Stream stream) noexcept {
    return move_batch(
        pool, batch, source,
        token_shape(shape.head_bytes, {shape.heads, pool.head_stride, source.head_stride}), bad,
        stream);
}

Status gather_batch(TokenShape shape, const PagedRows<const std::byte>& pool,
                    const DeviceBatch& batch, const TokenRows<std::byte>& destination,
                    std::int32_t* bad, Stream stream) noexcept {
    return move_batch(
        pool, batch, destination,
        token_shape(shape.head_bytes, {shape.heads, destination.head_stride, pool.head_stride}),
        bad, stream);
}

}  // namespace kvcore::cuda
