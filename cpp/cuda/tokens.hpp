// SPDX-License-Identifier: Apache-2.0
// K1 and K7: copy the bytes of tokens into pages and out of pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "atomics.hpp"
#include "batch_tokens.hpp"
#include "copy_body.hpp"
#include "kvcore/cuda.hpp"

namespace kvcore::cuda {

/// K or V of tokens, in pages and as rows.
template <class PoolByte, class RowByte>
struct TokenTensor {
    PoolByte* pool = nullptr;  // of page 0
    std::int64_t page_stride = 0;
    std::int64_t token_stride = 0;
    RowByte* rows = nullptr;  // of token 0
    std::int64_t row_stride = 0;

    [[nodiscard]] KVCORE_HOST_DEVICE PoolByte* in_pool(std::int64_t page,
                                                       std::int64_t entry) const noexcept {
        return pool + page * page_stride + entry * token_stride;
    }
    [[nodiscard]] KVCORE_HOST_DEVICE RowByte* row(std::int64_t token) const noexcept {
        return rows + token * row_stride;
    }
    [[nodiscard]] std::int64_t alignment() const noexcept {
        return alignment_of(pool, page_stride, token_stride, rows, row_stride);
    }
};

/// Tokens at slots; an item is K or V of one token.
template <class Slot>
struct SlotItems {
    using Tensor = TokenTensor<std::byte, const std::byte>;
    static constexpr bool kKnowsSource = true;

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
        return {tensors[part].in_pool(page, entry), source(part, item)};
    }
    [[nodiscard]] KVCORE_HOST_DEVICE const std::byte* source(int part, std::int64_t item) const {
        return tensors[part].row(item);
    }
};

/// Tokens of a batch; an item is K or V of one token. Tokens are written to pages, or read from
/// pages if PoolByte is const.
template <class PoolByte, class RowByte>
struct BatchItems {
    using Tensor = TokenTensor<PoolByte, RowByte>;
    static constexpr bool kKnowsSource = !std::is_const_v<PoolByte>;

    Tensor tensors[2];
    BatchTokens tokens;
    std::int32_t* bad;

    [[nodiscard]] bool counts() const noexcept { return bad != nullptr; }
    [[nodiscard]] KVCORE_HOST_DEVICE Place find(int part, std::int64_t item, bool counts) const {
        const TokenPlace place = tokens.find(item, counts);
        if (place.page < 0) return {};
        PoolByte* in_pool = tensors[part].in_pool(place.page, place.entry);
        if constexpr (kKnowsSource) {
            return {in_pool, source(part, item)};
        } else {
            return {tensors[part].row(item), in_pool};
        }
    }
    [[nodiscard]] KVCORE_HOST_DEVICE const std::byte* source(int part, std::int64_t item) const {
        return tensors[part].row(item);
    }
};

namespace {

/// Returns the shape of an item, which is a token: the axis of its heads.
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
    const std::int64_t alignment =
        pool.v.dim == 0 ? of_k.alignment() : alignment_of(of_k.alignment(), of_v.alignment());
    return launch_copy(
        SlotItems<Slot>{
            {of_k, of_v}, slots, pool.pages * pool.page_size, Divider(pool.page_size), bad},
        n, slot_shape(pool, pool.k, k), slot_shape(pool, pool.v, v), alignment, stream);
}

template <class PoolByte, class RowByte>
[[nodiscard]] CopyShape batch_shape(const TokenMove<PoolByte, RowByte>& move) noexcept {
    const std::int64_t in_pool = move.pool.head_stride;
    const std::int64_t in_rows = move.rows.head_stride;
    const std::int64_t heads = move.shape.heads;
    return token_shape(move.shape.head_bytes, std::is_const_v<PoolByte>
                                                  ? CopyAxis{heads, in_rows, in_pool}
                                                  : CopyAxis{heads, in_pool, in_rows});
}

template <class PoolByte, class RowByte>
[[nodiscard]] Status move_batch(const TokenMove<PoolByte, RowByte>& first,
                                const TokenMove<PoolByte, RowByte>& second,
                                const DeviceBatch& batch, std::int32_t* bad,
                                Stream stream) noexcept {
    if (batch.table.batch == 0) return kSuccess;
    const auto tensor_of = [](const TokenMove<PoolByte, RowByte>& move) {
        return TokenTensor<PoolByte, RowByte>{move.pool.data, move.pool.block_stride,
                                              move.pool.token_stride, move.rows.data,
                                              move.rows.token_stride};
    };
    const BatchItems<PoolByte, RowByte> items{
        {tensor_of(first), tensor_of(second)}, BatchTokens(batch, first.pool.block_size, bad), bad};
    const std::int64_t alignment =
        alignment_of(items.tensors[0].alignment(), items.tensors[1].alignment());
    return launch_copy(items, batch.num_tokens, batch_shape(first), batch_shape(second), alignment,
                       stream);
}

// Moves two tensors in one launch, unless the other tensor would force smaller units on one tensor.
template <class PoolByte, class RowByte>
[[nodiscard]] Status move_pair(const TokenMove<PoolByte, RowByte>& k,
                               const TokenMove<PoolByte, RowByte>& v, const DeviceBatch& batch,
                               std::int32_t* bad, Stream stream) noexcept {
    if (k.pool.block_size != v.pool.block_size) return kInvalidCall;
    const auto alignment = [](const TokenMove<PoolByte, RowByte>& move) {
        return alignment_of(batch_shape(move).alignment(), move.pool.data, move.pool.block_stride,
                            move.pool.token_stride, move.rows.data, move.rows.token_stride);
    };
    if (alignment(k) == alignment(v)) return move_batch(k, v, batch, bad, stream);
    const Status status = move_batch(k, {}, batch, bad, stream);
    return status == kSuccess ? move_batch(v, {}, batch, nullptr, stream) : status;
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
    return move_batch<std::byte, const std::byte>({shape, pool, source}, {}, batch, bad, stream);
}

Status append_batch(const TokenMove<std::byte, const std::byte>& k,
                    const TokenMove<std::byte, const std::byte>& v, const DeviceBatch& batch,
                    std::int32_t* bad, Stream stream) noexcept {
    return move_pair(k, v, batch, bad, stream);
}

Status gather_batch(TokenShape shape, const PagedRows<const std::byte>& pool,
                    const DeviceBatch& batch, const TokenRows<std::byte>& destination,
                    std::int32_t* bad, Stream stream) noexcept {
    return move_batch<const std::byte, std::byte>({shape, pool, destination}, {}, batch, bad,
                                                  stream);
}

Status gather_batch(const TokenMove<const std::byte, std::byte>& k,
                    const TokenMove<const std::byte, std::byte>& v, const DeviceBatch& batch,
                    std::int32_t* bad, Stream stream) noexcept {
    return move_pair(k, v, batch, bad, stream);
}

}  // namespace kvcore::cuda
