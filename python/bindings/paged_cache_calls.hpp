// SPDX-License-Identifier: Apache-2.0
// Checks the blocks allocated for a kvcore.functional.PagedKVCache, and the tokens appended to it.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "array_args.hpp"
#include "paged_cache_args.hpp"

namespace kvcore::python {

inline void check_room(const CachedSequence& sequence, std::int64_t first, std::int64_t count,
                       std::int64_t num_free) {
    const std::int64_t end = kvcore::ceil_div(sequence.length() + count, sequence.block_size());
    if (end - first > num_free) {
        throw pybind11::value_error(concat("free_block_ids has ", num_free, " entries, ",
                                           end - first, " are needed for ", count, " tokens after ",
                                           sequence.length(), " in blocks of ",
                                           sequence.block_size(), "; free some blocks first"));
    }
    const std::int64_t last = sequence.blocks_after(count);
    for (std::int64_t column = first; column < last; ++column) {
        if (sequence.block(column) < 0) continue;
        throw pybind11::value_error(
            concat(sequence.cell_name(column), " is ", sequence.block(column),
                   " already; append the tokens it was allocated for before allocating again"));
    }
}

/// Checks free block ids. Each id must be a block, listed once; the first `consumed` must be in no
/// row of the table.
inline void check_free(const CachedSequence& sequence, const Int32Arg& ids, std::int64_t consumed) {
    enum : std::uint8_t { kAbsent, kListed, kTaken };
    std::vector<std::uint8_t> states(static_cast<std::size_t>(sequence.num_blocks()), kAbsent);
    for (std::int64_t i = 0; i < ids.size(); ++i) {
        const BlockId id = ids.data()[i];
        if (id < 0 || id >= sequence.num_blocks()) {
            throw pybind11::value_error(concat("free_block_ids[", i, "] is ", id, ", must be 0 .. ",
                                               sequence.num_blocks() - 1));
        }
        std::uint8_t& state = states[static_cast<std::size_t>(id)];
        if (state != kAbsent) {
            throw pybind11::value_error(
                concat("free_block_ids holds block ", id, " twice, must hold it once"));
        }
        state = i < consumed ? kTaken : kListed;
    }
    for (std::int64_t row = 0; row < sequence.table().shape(0) && consumed > 0; ++row) {
        for (std::int64_t column = 0; column < sequence.columns(); ++column) {
            const BlockId id = sequence.cell(row, column);
            if (id < 0 || id >= sequence.num_blocks()) continue;
            if (states[static_cast<std::size_t>(id)] != kTaken) continue;
            throw pybind11::value_error(concat("free_block_ids holds block ", id,
                                               ", which is in use at block_table[", row, ", ",
                                               column, "]; pass free blocks only"));
        }
    }
}

/// The checked blocks that a row needs for more tokens.
class NewBlocks {
   public:
    NewBlocks(const CachedSequence& sequence, const pybind11::object& num_new_tokens,
              const pybind11::object& free_block_ids)
        : ids_(free_block_ids, "free_block_ids"), first_(sequence.blocks_after(0)) {
        constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();
        const std::int64_t count = integer_arg(num_new_tokens, "num_new_tokens");
        if (count < 0 || count > kMaxTokens) {
            throw pybind11::value_error(
                concat("num_new_tokens is ", text(num_new_tokens), ", must be 0 .. ", kMaxTokens));
        }
        check_room(sequence, first_, count, ids_.size());
        consumed_ = sequence.blocks_after(count) - first_;
        check_free(sequence, ids_, consumed_);
    }

    [[nodiscard]] std::int64_t consumed() const noexcept { return consumed_; }
    void enter(CachedSequence& sequence) const {
        for (std::int64_t i = 0; i < consumed_; ++i) {
            sequence.set_block(first_ + i, ids_.data()[i]);
        }
    }

   private:
    Int32Arg ids_;
    std::int64_t first_;
    std::int64_t consumed_ = 0;
};

inline void check_new_rows(const pybind11::array& rows, const char* name,
                           const pybind11::array& pool) {
    check_rank(rows, name, "(tokens, num_kv_heads, head_dim)", 3);
    if (rows.shape(1) != pool.shape(2) || rows.shape(2) != pool.shape(3)) {
        throw pybind11::value_error(concat(name, " has shape ", shape_text(rows),
                                           ", must be (tokens, ", pool.shape(2), ", ",
                                           pool.shape(3), ") as the pool"));
    }
    if (!rows.dtype().equal(pool.dtype())) {
        throw pybind11::type_error(concat(name, " has dtype ", text(rows.dtype()), ", the pool ",
                                          text(pool.dtype()), "; convert it with astype"));
    }
}

inline void check_new_rows(const pybind11::array& keys, const pybind11::array& values,
                           const pybind11::array& pool) {
    check_new_rows(keys, "keys_new", pool);
    check_new_rows(values, "values_new", pool);
    if (keys.shape(0) != values.shape(0)) {
        throw pybind11::value_error(concat("keys_new has shape ", shape_text(keys),
                                           " and values_new ", shape_text(values),
                                           ", must be equal"));
    }
}

/// Refuses a block that is twice in the row: other tokens of the row would overwrite it.
inline void check_written_once(const CachedSequence& sequence, std::int64_t first, std::int64_t end,
                               const std::vector<BlockId>& written) {
    for (std::int64_t column = 0; column < end; ++column) {
        const BlockId id = sequence.block(column);
        const auto found = std::find(written.begin(), written.end(), id);
        const bool is_itself = column >= first && found - written.begin() == column - first;
        if (found != written.end() && !is_itself) {
            throw pybind11::value_error(
                concat("block ", id, " is in the row twice, at ", sequence.cell_name(column),
                       " and ", sequence.cell_name(first + (found - written.begin())),
                       "; use each block once in a row"));
        }
    }
}

/// Returns the blocks to which new tokens are written. They are allocated, and each block is once
/// in the row.
[[nodiscard]] inline std::vector<BlockId> blocks_to_append(const CachedSequence& sequence,
                                                           const pybind11::array& keys,
                                                           const pybind11::array& values) {
    check_new_rows(keys, values, sequence.keys());
    const std::int64_t count = keys.shape(0);
    const std::int64_t first = sequence.length() / sequence.block_size();
    const std::int64_t end = sequence.blocks_after(count);
    std::vector<BlockId> ids = sequence.blocks(first, count == 0 ? first : end);
    check_written_once(sequence, first, end, ids);
    return ids;
}

}  // namespace kvcore::python
