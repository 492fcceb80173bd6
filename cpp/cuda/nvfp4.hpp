// SPDX-License-Identifier: Apache-2.0
// K4, K7 and K16 in nvfp4: convert tokens of a batch, tokens at slots, or contiguous elements to
// blocks of codes and back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "atomics.hpp"
#include "batch_tokens.hpp"
#include "kvcore/cuda.hpp"
#include "launch.hpp"
#include "nvfp4_blocks.hpp"

namespace kvcore::cuda {

/// The places of a call's tokens: contiguous, in the pages of a batch, or at slots.
class TokenPlaces {
   public:
    TokenPlaces() noexcept : batch_({}, 1, nullptr), page_size_(1) {}
    TokenPlaces(const DeviceBatch& batch, std::int64_t page_size, std::int32_t* bad) noexcept
        : kind_(Kind::kBatch), batch_(batch, page_size, bad), page_size_(1) {}
    /// `slot_bytes`: bytes of a slot, 4 or 8.
    TokenPlaces(const std::byte* slots, std::int64_t slot_bytes, std::int64_t pages,
                std::int64_t page_size, std::int32_t* bad) noexcept
        : kind_(slot_bytes == 8 ? Kind::kSlots8 : Kind::kSlots4),
          batch_({}, 1, nullptr),
          slots_(slots),
          capacity_(pages * page_size),
          page_size_(page_size),
          bad_(bad) {}

    /// Returns the place of a token, or page -1 if it has no place. A bad token is counted if
    /// `counts`.
    [[nodiscard]] KVCORE_HOST_DEVICE TokenPlace find(std::int64_t at, bool counts) const noexcept {
        if (kind_ == Kind::kBatch) return batch_.find(at, counts);
        if (kind_ == Kind::kLine) return {0, at};
        const std::int64_t slot = kind_ == Kind::kSlots8 ? load_unit<std::int64_t>(slots_ + at * 8)
                                                         : load_unit<std::int32_t>(slots_ + at * 4);
        if (slot < 0) return {};
        if (slot >= capacity_) {
            if (counts && bad_ != nullptr) atomic_add(bad_, 1);
            return {};
        }
        const std::int64_t page = page_size_.quotient(slot);
        return {page, page_size_.remainder(slot, page)};
    }

   private:
    enum class Kind : std::uint8_t { kLine, kBatch, kSlots4, kSlots8 };

    Kind kind_ = Kind::kLine;
    BatchTokens batch_;
    const std::byte* slots_ = nullptr;
    std::int64_t capacity_ = 0;
    Divider page_size_;
    std::int32_t* bad_ = nullptr;
};

/// Some blocks of a head: the work of a lane.
struct HeadBlocks {
    TokenPlace place;
    std::int64_t token = 0;
    std::int64_t head = 0;
    std::int64_t first = 0;  // block
    std::int64_t count = 0;  // 0: nothing to do
};

/// Returns the number of blocks that a lane holds in registers, in 64 bytes.
[[nodiscard]] constexpr int blocks_of_lane(DType wide) noexcept {
    return item_size(wide) == 4 ? 1 : 2;
}

/// Cuts the heads of tokens into numbered pieces of `each` blocks.
class BlockItems {
   public:
    BlockItems(const TokenPlaces& places, std::int64_t tokens, std::int64_t heads,
               std::int64_t blocks, int each) noexcept
        : places_(places),
          blocks_(blocks),
          each_(each),
          of_head_((blocks + each - 1) / each),
          of_token_(of_head_.divisor() * heads),
          count_(tokens * of_token_.divisor()) {}

    [[nodiscard]] KVCORE_HOST_DEVICE std::int64_t count() const noexcept { return count_; }
    [[nodiscard]] KVCORE_HOST_DEVICE HeadBlocks find(std::int64_t i) const noexcept {
        HeadBlocks found;
        if (count_ < Divider::kSmall) {
            const auto item = static_cast<std::uint32_t>(i);
            const std::uint32_t token = of_token_.small_quotient(item);
            const std::uint32_t in_token =
                item - token * static_cast<std::uint32_t>(of_token_.divisor());
            const std::uint32_t head = of_head_.small_quotient(in_token);
            found.token = token;
            found.head = head;
            const std::uint32_t first =
                (in_token - head * static_cast<std::uint32_t>(of_head_.divisor())) *
                static_cast<std::uint32_t>(each_);
            found.first = first;
        } else {
            found.token = of_token_.quotient(i);
            const std::int64_t in_token = of_token_.remainder(i, found.token);
            found.head = of_head_.quotient(in_token);
            found.first = of_head_.remainder(in_token, found.head) * each_;
        }
        found.place = places_.find(found.token, found.head + found.first == 0);
        if (found.place.page < 0) return {};
        const std::int64_t left = blocks_ - found.first;
        found.count = left < each_ ? left : each_;
        return found;
    }

   private:
    TokenPlaces places_;
    std::int64_t blocks_;
    std::int64_t each_;
    Divider of_head_;
    Divider of_token_;
    std::int64_t count_;
};

/// K or V: rows of wide elements, and the pool of their codes.
template <class RowByte, class PoolByte>
struct BlockTensor {
    TokenRows<RowByte> rows;
    HeadBytes<PoolByte> codes;
    HeadBytes<PoolByte> scales;
    GlobalScale global;
    bool has_units;  // rows allow units of 16 bytes, codes units of 8

    template <DType kWide>
    [[nodiscard]] KVCORE_HOST_DEVICE RowByte* row(const HeadBlocks& at) const noexcept {
        return rows.data + at.token * rows.token_stride + at.head * rows.head_stride +
               at.first * BlockOf<kWide>::kBytes;
    }
    [[nodiscard]] KVCORE_HOST_DEVICE PoolByte* code(const HeadBlocks& at) const noexcept {
        return codes.at(at.place.page, at.place.entry, at.head) + at.first * kNvfp4BlockBytes;
    }
    [[nodiscard]] KVCORE_HOST_DEVICE PoolByte* scale(const HeadBlocks& at) const noexcept {
        return scales.at(at.place.page, at.place.entry, at.head) + at.first;
    }
};

/// Each lane codes some blocks of a head, of K and then of V.
template <DType kWide>
struct CodeBlocksBody {
    using Tensor = BlockTensor<const std::byte, std::byte>;
    static constexpr int kEach = blocks_of_lane(kWide);

    BlockItems items;
    Tensor tensors[2];
    int num_tensors;

    KVCORE_HOST_DEVICE void operator()(Lane lane) const noexcept {
        for (std::int64_t i = lane.index(); i < items.count(); i += lane.count()) {
            const HeadBlocks found = items.find(i);
            if (found.count == 0) continue;
            KVCORE_KEEP_LOOP
            for (int tensor = 0; tensor < num_tensors; ++tensor) code(tensors[tensor], found);
        }
    }

   private:
    using Block = BlockOf<kWide>;

    KVCORE_HOST_DEVICE static void code(const Tensor& tensor, const HeadBlocks& at) noexcept {
        const std::byte* from = tensor.row<kWide>(at);
        std::byte* to = tensor.code(at);
        std::byte* scales = tensor.scale(at);
        const float global = tensor.global.get();
        if (!tensor.has_units) {
            KVCORE_KEEP_LOOP
            for (int i = 0; i < at.count; ++i) {
                code_one_by_one<kWide>(from + i * Block::kBytes, global, to + i * kNvfp4BlockBytes,
                                       scales + i);
            }
            return;
        }
        Block blocks[kEach];
        KVCORE_UNROLL
        for (int i = 0; i < kEach; ++i) {
            blocks[i] = {};
            if (i < at.count) blocks[i].load(from + i * Block::kBytes);
        }
        KVCORE_UNROLL
        for (int i = 0; i < kEach; ++i) {
            if (i == at.count) return;
            code_block<kWide>(blocks[i], from + i * Block::kBytes, global,
                              to + i * kNvfp4BlockBytes, scales + i);
        }
    }
};

/// Each lane reads some blocks of a head, of K and then of V.
template <DType kWide>
struct ReadBlocksBody {
    using Tensor = BlockTensor<std::byte, const std::byte>;

    BlockItems items;
    Tensor tensors[2];
    int num_tensors;

    KVCORE_HOST_DEVICE void operator()(Lane lane) const noexcept {
        for (std::int64_t i = lane.index(); i < items.count(); i += lane.count()) {
            const HeadBlocks found = items.find(i);
            if (found.count == 0) continue;
            KVCORE_KEEP_LOOP
            for (int tensor = 0; tensor < num_tensors; ++tensor) read(tensors[tensor], found);
        }
    }

   private:
    using Block = BlockOf<kWide>;

    KVCORE_HOST_DEVICE static void read(const Tensor& tensor, const HeadBlocks& at) noexcept {
        const std::byte* from = tensor.code(at);
        const std::byte* scales = tensor.scale(at);
        std::byte* to = tensor.row<kWide>(at);
        const float global = tensor.global.get();
        KVCORE_KEEP_LOOP
        for (int i = 0; i < at.count; ++i) {
            const std::uint32_t scale = load_word<1>(scales + i);
            const float factor = product(widened<DType::kFloat8E4M3FN>(scale), global);
            if (tensor.has_units) {
                read_block<kWide>(load_unit<std::uint64_t>(from), from, factor, to);
            } else {
                read_one_by_one<kWide>(from, factor, to);
            }
            from += kNvfp4BlockBytes;
            to += Block::kBytes;
        }
    }
};

// ---- the verbs ----------------------------------------------------------------------------------

namespace {

template <class RowByte, class PoolByte>
[[nodiscard]] BlockTensor<RowByte, PoolByte> block_tensor(
    const TokenRows<RowByte>& rows, const Nvfp4Tensor<PoolByte>& pool) noexcept {
    const HeadBytes<PoolByte>& codes = pool.codes;
    const bool has_units =
        alignment_of(rows.data, rows.token_stride, rows.head_stride) == 16 &&
        alignment_of(codes.data, codes.page_stride, codes.token_stride, codes.head_stride) >= 8;
    return {rows, codes, pool.scales, pool.global, has_units};
}

// Contiguous blocks as rows with one head. A row has the number of blocks that a lane holds if that
// number divides all blocks; otherwise it has one block.
template <class RowByte, class PoolByte>
struct BlockLine {
    std::int64_t blocks;
    std::int64_t tokens;
    TokenRows<RowByte> rows;
    Nvfp4Tensor<PoolByte> pool;

    BlockLine(std::int64_t count, DType wide, RowByte* elements, GlobalScale global,
              PoolByte* codes, PoolByte* scales) noexcept
        : blocks(count % blocks_of_lane(wide) == 0 ? blocks_of_lane(wide) : 1),
          tokens(count / blocks),
          rows{elements, blocks * kNvfp4Block * item_size(wide), 0},
          pool{blocks * kNvfp4Block,
               {codes, 0, blocks * kNvfp4BlockBytes, 0},
               {scales, 0, blocks, 0},
               global} {}
};

template <template <DType> class Body, DType kWide, class Tensor>
[[nodiscard]] Status launch_blocks(const BlockItems& items, const Tensor& first,
                                   const Tensor* second, Stream stream) noexcept {
    const Body<kWide> body{
        items, {first, second == nullptr ? first : *second}, second == nullptr ? 1 : 2};
    return launch(body, grid_for(items.count()), stream);
}

template <template <DType> class Body, class Tensor>
[[nodiscard]] Status launch_blocks(DType wide, const BlockItems& items, const Tensor& first,
                                   const Tensor* second, Stream stream) noexcept {
    switch (wide) {
        case DType::kFloat32:
            return launch_blocks<Body, DType::kFloat32>(items, first, second, stream);
        case DType::kFloat16:
            return launch_blocks<Body, DType::kFloat16>(items, first, second, stream);
        default:
            return launch_blocks<Body, DType::kBFloat16>(items, first, second, stream);
    }
}

// Moves K and V, or only K. One launch moves both if their heads have the same size. `places(bad)`
// returns the places of tokens.
template <template <DType> class Body, class RowByte, class PoolByte, class Places>
[[nodiscard]] Status move_blocks(std::int64_t tokens, std::int64_t heads,
                                 const TensorPair<Nvfp4Tensor<PoolByte>>& pools,
                                 const TensorPair<TokenRows<RowByte>>& rows, DType wide,
                                 std::int32_t* bad, const Places& places, Stream stream) noexcept {
    if (heads == 0 || pools.k.dim == 0) return kSuccess;
    const auto items_of = [&](const Nvfp4Tensor<PoolByte>& pool, std::int32_t* counter) {
        return BlockItems(places(counter), tokens, heads, pool.dim / kNvfp4Block,
                          blocks_of_lane(wide));
    };
    const auto k = block_tensor(rows.k, pools.k);
    const auto v = block_tensor(rows.v, pools.v);
    const BlockItems items = items_of(pools.k, bad);
    if (pools.v.dim == pools.k.dim) return launch_blocks<Body>(wide, items, k, &v, stream);
    const Status status =
        launch_blocks<Body>(wide, items, k, static_cast<decltype(&k)>(nullptr), stream);
    if (status != kSuccess || pools.v.dim == 0) return status;
    return launch_blocks<Body>(wide, items_of(pools.v, nullptr), v,
                               static_cast<decltype(&v)>(nullptr), stream);
}

template <class Slot>
[[nodiscard]] Status code_slots(const Nvfp4Pool<std::byte>& pool,
                                const TokenRows<const std::byte>& k,
                                const TokenRows<const std::byte>& v, DType wide, const Slot* slots,
                                std::int64_t n, std::int32_t* bad, Stream stream) noexcept {
    const auto places = [&](std::int32_t* counter) {
        return TokenPlaces(reinterpret_cast<const std::byte*>(slots), sizeof(Slot), pool.pages,
                           pool.shape.page_size, counter);
    };
    return move_blocks<CodeBlocksBody, const std::byte, std::byte>(
        n, pool.shape.heads, {pool.k, pool.v}, {k, v}, wide, bad, places, stream);
}

}  // namespace

Status quantize_nvfp4(std::int64_t blocks, DType wide, const std::byte* source, GlobalScale global,
                      std::byte* codes, std::byte* scales, Stream stream) noexcept {
    const BlockLine<const std::byte, std::byte> line(blocks, wide, source, global, codes, scales);
    const auto tensor = block_tensor(line.rows, line.pool);
    const BlockItems items({}, line.tokens, 1, line.blocks, blocks_of_lane(wide));
    return launch_blocks<CodeBlocksBody>(wide, items, tensor,
                                         static_cast<decltype(&tensor)>(nullptr), stream);
}

Status dequantize_nvfp4(std::int64_t blocks, const std::byte* codes, const std::byte* scales,
                        GlobalScale global, DType wide, std::byte* destination,
                        Stream stream) noexcept {
    const BlockLine<std::byte, const std::byte> line(blocks, wide, destination, global, codes,
                                                     scales);
    const auto tensor = block_tensor(line.rows, line.pool);
    const BlockItems items({}, line.tokens, 1, line.blocks, blocks_of_lane(wide));
    return launch_blocks<ReadBlocksBody>(wide, items, tensor,
                                         static_cast<decltype(&tensor)>(nullptr), stream);
}

Status append_batch(PageShape shape, const TensorPair<Nvfp4Tensor<std::byte>>& pools,
                    const DeviceBatch& batch, const TensorPair<TokenRows<const std::byte>>& sources,
                    DType wide, std::int32_t* bad, Stream stream) noexcept {
    const auto places = [&](std::int32_t* counter) {
        return TokenPlaces(batch, shape.page_size, counter);
    };
    return move_blocks<CodeBlocksBody>(batch.num_tokens, shape.heads, pools, sources, wide, bad,
                                       places, stream);
}

Status gather_batch(PageShape shape, const TensorPair<Nvfp4Tensor<const std::byte>>& pools,
                    const DeviceBatch& batch, const TensorPair<TokenRows<std::byte>>& destinations,
                    DType wide, std::int32_t* bad, Stream stream) noexcept {
    const auto places = [&](std::int32_t* counter) {
        return TokenPlaces(batch, shape.page_size, counter);
    };
    return move_blocks<ReadBlocksBody>(batch.num_tokens, shape.heads, pools, destinations, wide,
                                       bad, places, stream);
}

Status append_slots(const Nvfp4Pool<std::byte>& pool, const TokenRows<const std::byte>& k,
                    const TokenRows<const std::byte>& v, DType wide, const std::int64_t* slots,
                    std::int64_t n, std::int32_t* bad, Stream stream) noexcept {
    return code_slots(pool, k, v, wide, slots, n, bad, stream);
}

Status append_slots(const Nvfp4Pool<std::byte>& pool, const TokenRows<const std::byte>& k,
                    const TokenRows<const std::byte>& v, DType wide, const std::int32_t* slots,
                    std::int64_t n, std::int32_t* bad, Stream stream) noexcept {
    return code_slots(pool, k, v, wide, slots, n, bad, stream);
}

}  // namespace kvcore::cuda
