// SPDX-License-Identifier: Apache-2.0
// Checks the arrays of a kvcore.functional.PagedKVCache and the tokens appended to it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "array_args.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/paged_batch.hpp"

namespace kvcore::python {

inline void check_writable(const pybind11::array& array, const char* name) {
    if (!array.writeable()) {
        throw pybind11::value_error(
            concat(name, " is read-only and cannot be updated in place; pass donate=False"));
    }
    check_own_memory(array, name);
}

/// A sequence of a cache. The constructor throws ValueError, TypeError or IndexError for arrays
/// that do not match and for an index that is not a row of the block table.
class CachedSequence {
   public:
    CachedSequence(const pybind11::array& key_pool, const pybind11::array& value_pool,
                   const pybind11::array& block_table, const pybind11::array& seq_lengths,
                   const pybind11::object& index)
        : keys_(key_pool), values_(value_pool), table_(block_table), lengths_(seq_lengths) {
        check_pools();
        check_rank(table_, "block_table", "(batch, max_blocks)", 2);
        check_rank(lengths_, "seq_lengths", "(batch,)", 1);
        check_int32(table_, "block_table");
        check_int32(lengths_, "seq_lengths");
        if (table_.shape(0) != lengths_.shape(0)) {
            throw pybind11::value_error(concat("block_table has ", table_.shape(0),
                                               " rows and seq_lengths ", lengths_.shape(0),
                                               ", both must be the number of sequences"));
        }
        set_index(index);
        std::int32_t length;
        std::memcpy(&length, lengths_.data(index_), sizeof length);
        length_ = length;
        if (length_ < 0 || ceil_div(length_, block_size()) > columns()) {
            throw pybind11::value_error(concat("seq_lengths[", index_, "] is ", length_,
                                               ", must fit in ", columns(), " blocks of ",
                                               block_size(), " tokens"));
        }
    }

    [[nodiscard]] pybind11::array& keys() noexcept { return keys_; }
    [[nodiscard]] const pybind11::array& keys() const noexcept { return keys_; }
    [[nodiscard]] pybind11::array& values() noexcept { return values_; }
    [[nodiscard]] const pybind11::array& table() const noexcept { return table_; }
    [[nodiscard]] std::int64_t num_blocks() const { return keys_.shape(0); }
    [[nodiscard]] std::int64_t block_size() const { return keys_.shape(1); }
    [[nodiscard]] std::int64_t columns() const { return table_.shape(1); }
    [[nodiscard]] std::int64_t length() const noexcept { return length_; }
    [[nodiscard]] BlockId block(std::int64_t column) const { return cell(index_, column); }
    [[nodiscard]] BlockId cell(std::int64_t row, std::int64_t column) const {
        BlockId id;
        std::memcpy(&id, cell_address(row, column), sizeof id);
        return id;
    }
    [[nodiscard]] std::string cell_name(std::int64_t column) const {
        return concat("block_table[", index_, ", ", column, "]");
    }
    [[nodiscard]] TokenShape token_shape() const {
        return {keys_.shape(2), keys_.shape(3) * keys_.itemsize()};
    }
    /// Returns the four arrays to the caller.
    [[nodiscard]] pybind11::tuple arrays() const {
        return pybind11::make_tuple(keys_, values_, table_, lengths_);
    }

    /// Returns ceil((length + count) / block_size); ValueError past the width of the table.
    [[nodiscard]] std::int64_t blocks_after(std::int64_t count) const {
        const std::int64_t blocks = ceil_div(length_ + count, block_size());
        const bool is_int32 = length_ + count <= std::numeric_limits<std::int32_t>::max();
        if (blocks <= columns() && is_int32) return blocks;
        throw pybind11::value_error(concat("row ", index_, " of the block table would hold ",
                                           length_ + count, " tokens, needs ", blocks,
                                           " blocks of ", block_size(), " and has ", columns(),
                                           " columns; raise max_blocks_per_seq or append fewer"));
    }

    /// Returns the blocks in columns [first, end), in a copy that no other thread can change.
    [[nodiscard]] std::vector<BlockId> blocks(std::int64_t first, std::int64_t end) const {
        std::vector<BlockId> ids;
        for (std::int64_t column = first; column < end; ++column) {
            const BlockId id = block(column);
            if (id < 0) {
                throw pybind11::value_error(concat(cell_name(column), " is ", id,
                                                   ", unallocated; call allocate_blocks before "
                                                   "append_kv"));
            }
            if (id >= num_blocks()) {
                throw pybind11::value_error(concat(cell_name(column), " is ", id,
                                                   ", the pool has blocks 0 .. ",
                                                   num_blocks() - 1));
            }
            ids.push_back(id);
        }
        return ids;
    }

    /// Replaces the caller's arrays by copies.
    void copy_table() {
        table_ = copy_of(table_);
        lengths_ = copy_of(lengths_);
    }
    void copy_all() {
        keys_ = copy_of(keys_);
        values_ = copy_of(values_);
        copy_table();
    }
    void check_pools_writable() const {
        check_writable(keys_, "key_pool");
        check_writable(values_, "value_pool");
        check_writable(lengths_, "seq_lengths");
        if (keys_.data() == values_.data() && keys_.size() > 0) {
            throw pybind11::value_error(
                "key_pool and value_pool are the same memory, must be two arrays");
        }
        check_no_common_memory(values_, "value_pool", keys_, "key_pool");
    }
    void set_block(std::int64_t column, BlockId id) {
        std::memcpy(table_.mutable_data(index_, column), &id, sizeof id);
    }
    void set_length(std::int64_t length) {
        const auto value = static_cast<std::int32_t>(length);
        std::memcpy(lengths_.mutable_data(index_), &value, sizeof value);
    }

   private:
    [[nodiscard]] const char* cell_address(std::int64_t row, std::int64_t column) const {
        return static_cast<const char*>(table_.data()) + row * table_.strides(0) +
               column * table_.strides(1);
    }

    void check_pools() const {
        constexpr const char* kAxes = "(num_blocks, block_size, num_kv_heads, head_dim)";
        check_rank(keys_, "key_pool", kAxes, 4);
        check_rank(values_, "value_pool", kAxes, 4);
        const bool is_same_shape = std::equal(keys_.shape(), keys_.shape() + 4, values_.shape());
        if (!is_same_shape || !keys_.dtype().equal(values_.dtype())) {
            throw pybind11::value_error(concat(
                "key_pool is ", text(keys_.dtype()), " ", shape_text(keys_), " and value_pool ",
                text(values_.dtype()), " ", shape_text(values_), ", must be alike"));
        }
        check_numbers(keys_, "key_pool");
        if (block_size() < 1) {
            throw pybind11::value_error(
                concat("key_pool has shape ", shape_text(keys_), ", block_size must be above 0"));
        }
        if (!has_dense_rows(keys_) || !has_dense_rows(values_)) {
            throw pybind11::value_error(
                "the last axis of key_pool or value_pool is strided, must be contiguous; "
                "make it so with np.ascontiguousarray");
        }
    }

    void set_index(const pybind11::object& index) {
        index_ = integer_arg(index, "sequence_idx");
        if (index_ >= 0 && index_ < table_.shape(0)) return;
        throw pybind11::index_error(concat("sequence_idx is ", text(index), ", must be 0 .. ",
                                           table_.shape(0) - 1, ", a row of the block table"));
    }

    pybind11::array keys_;
    pybind11::array values_;
    pybind11::array table_;
    pybind11::array lengths_;
    std::int64_t index_ = 0;
    std::int64_t length_ = 0;
};

}  // namespace kvcore::python
