// SPDX-License-Identifier: Apache-2.0
// Checks a kvcore.functional.PagedKVCache that XLA passes to a handler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "kvcore/dtype.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/layout.hpp"
#include "kvcore/paged_batch.hpp"
#include "xla/ffi/api/ffi.h"

namespace kvcore::jax {

namespace ffi = xla::ffi;
using Int32s = ffi::Buffer<ffi::S32>;

/// The error that a handler returns for bad input. Python checks shapes and dtypes when it traces a
/// function; a handler checks the values, which only the running program has.
template <class... Parts>
[[nodiscard]] ffi::Error refusal(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return ffi::Error::InvalidArgument(text.str());
}

/// The DType of a pool's elements. Throws std::invalid_argument for a dtype that has no line here.
[[nodiscard]] inline DType dtype_of(const ffi::AnyBuffer& buffer) {
    switch (buffer.element_type()) {
        case ffi::F32:
            return DType::kFloat32;
        case ffi::F16:
            return DType::kFloat16;
        case ffi::BF16:
            return DType::kBFloat16;
        case ffi::F8E4M3FN:
            return DType::kFloat8E4M3FN;
        case ffi::F8E5M2:
            return DType::kFloat8E5M2;
        case ffi::S8:
            return DType::kInt8;
        default:
            throw std::invalid_argument(
                detail::concat("XLA's data type ", static_cast<int>(buffer.element_type()),
                               " is no dtype of a pool, must be one that dtype_of in "
                               "python/bindings/jax/cache_buffers.hpp lists"));
    }
}

[[nodiscard]] inline std::byte* bytes_of(const ffi::AnyBuffer& buffer) {
    return static_cast<std::byte*>(buffer.untyped_data());
}

/// The sizes of a cache, and its block table. Owns nothing; all methods are O(1) but for `check`.
class CacheBuffers {
   public:
    CacheBuffers(const ffi::AnyBuffer& pool, const Int32s& table, const Int32s& lengths)
        : pool_(pool), table_(table.typed_data()), lengths_(lengths.typed_data()) {
        const auto shape = pool.dimensions();
        num_blocks_ = shape[0];
        block_size_ = shape[1];
        heads_ = shape[2];
        dim_ = shape[3];
        batch_ = table.dimensions()[0];
        columns_ = table.dimensions()[1];
    }

    [[nodiscard]] std::int64_t num_blocks() const noexcept { return num_blocks_; }
    [[nodiscard]] std::int64_t block_size() const noexcept { return block_size_; }
    [[nodiscard]] std::int64_t heads() const noexcept { return heads_; }
    [[nodiscard]] std::int64_t dim() const noexcept { return dim_; }
    [[nodiscard]] std::int64_t batch() const noexcept { return batch_; }
    [[nodiscard]] std::int64_t columns() const noexcept { return columns_; }
    [[nodiscard]] std::int64_t length(std::int64_t row) const noexcept { return lengths_[row]; }
    [[nodiscard]] const BlockId* blocks(std::int64_t row) const noexcept {
        return table_ + row * columns_;
    }

    [[nodiscard]] std::int64_t head_bytes() const { return dim_ * item_size(dtype_of(pool_)); }
    [[nodiscard]] TokenShape token() const { return {heads_, head_bytes()}; }

    /// The tokens of a row in a pool of these sizes; `first` is the column of the first token of
    /// `data`.
    template <class Byte>
    [[nodiscard]] PagedRows<Byte> rows(Byte* data, std::int64_t row, std::int64_t first = 0) const {
        const std::int64_t head = head_bytes();
        const std::int64_t token = heads_ * head;
        return {data, block_size_ * token, token, head, block_size_, blocks(row) + first};
    }
    template <class Byte>
    [[nodiscard]] TokenRows<Byte> tokens(Byte* data) const {
        return {data, heads_ * head_bytes(), head_bytes()};
    }

    /// Returns an error unless `row` is a row of the table whose length fits its columns.
    [[nodiscard]] ffi::Error check_row(std::int64_t row) const {
        if (row < 0 || row >= batch_) {
            return refusal("sequence_idx is ", row, ", must be 0 .. ", batch_ - 1);
        }
        const std::int64_t held = columns_ * block_size_;
        if (length(row) >= 0 && length(row) <= held) return ffi::Error::Success();
        return refusal("seq_lengths[", row, "] is ", length(row), ", must be 0 .. ", held,
                       ": the size of ", columns_, " blocks of ", block_size_, " tokens");
    }

    /// Returns an error unless columns [first, end) of a row are blocks of the pool. O(columns).
    [[nodiscard]] ffi::Error check_blocks(std::int64_t row, std::int64_t first,
                                          std::int64_t end) const {
        for (std::int64_t column = first; column < end; ++column) {
            const BlockId id = blocks(row)[column];
            if (id >= 0 && id < num_blocks_) continue;
            return refusal("block_table[", row, ", ", column, "] is ", id,
                           ", must be a block, 0 .. ", num_blocks_ - 1,
                           "; call allocate_blocks first");
        }
        return ffi::Error::Success();
    }

   private:
    ffi::AnyBuffer pool_;
    const BlockId* table_;
    const std::int32_t* lengths_;
    std::int64_t num_blocks_ = 0;
    std::int64_t block_size_ = 0;
    std::int64_t heads_ = 0;
    std::int64_t dim_ = 0;
    std::int64_t batch_ = 0;
    std::int64_t columns_ = 0;
};

/// Runs a function that may throw: no exception may reach XLA's code.
template <class Work>
[[nodiscard]] ffi::Error guarded(Work&& work) {
    try {
        return std::forward<Work>(work)();
    } catch (const std::exception& error) {
        return ffi::Error::Internal(error.what());
    }
}

}  // namespace kvcore::jax
