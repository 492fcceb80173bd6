// SPDX-License-Identifier: Apache-2.0
#include "kvcore/paged_rows.hpp"

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "array_args.hpp"
#include "bindings.hpp"
#include "paged_cache_args.hpp"

namespace py = pybind11;
using kvcore::BlockId;
using kvcore::PagedRows;
using kvcore::TokenRows;
using kvcore::python::CachedSequence;
using kvcore::python::check_rank;
using kvcore::python::check_writable;
using kvcore::python::concat;
using kvcore::python::copy_of;
using kvcore::python::has_dense_rows;
using kvcore::python::Int32Arg;
using kvcore::python::integer_arg;
using kvcore::python::is_overlapping;
using kvcore::python::shape_text;
using kvcore::python::text;

namespace {

constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();
// Below this copying takes about as long as handing the GIL over.
constexpr std::int64_t kBytesToCopyUnlocked = 1 << 15;

template <class Byte, class Pointer>
PagedRows<Byte> paged_rows(const py::array& pool, Pointer data, const std::vector<BlockId>& ids) {
    return {static_cast<Byte*>(data), pool.strides(0), pool.strides(1),
            pool.strides(2),          pool.shape(1),   ids.data()};
}

template <class Byte, class Pointer>
TokenRows<Byte> token_rows(const py::array& rows, Pointer data) {
    return {static_cast<Byte*>(data), rows.strides(0), rows.strides(1)};
}

/// Runs `copy`, which moves `bytes` and touches no Python object.
template <class Copy>
void run_copy(std::int64_t bytes, Copy&& copy) {
    std::optional<py::gil_scoped_release> unlocked;
    if (bytes >= kBytesToCopyUnlocked) unlocked.emplace();
    copy();
}

// ---- allocate_blocks -------------------------------------------------------------------------
void check_room(const CachedSequence& sequence, std::int64_t first, std::int64_t count,
                std::int64_t num_free) {
    const std::int64_t end = kvcore::ceil_div(sequence.length() + count, sequence.block_size());
    if (end - first > num_free) {
        throw py::value_error(concat("free_block_ids has ", num_free, " entries, ", end - first,
                                     " are needed for ", count, " tokens after ", sequence.length(),
                                     " in blocks of ", sequence.block_size(),
                                     "; free some blocks first"));
    }
    const std::int64_t last = sequence.blocks_after(count);
    for (std::int64_t column = first; column < last; ++column) {
        if (sequence.block(column) < 0) continue;
        throw py::value_error(
            concat(sequence.cell_name(column), " is ", sequence.block(column),
                   " already; append the tokens it was allocated for before allocating again"));
    }
}

/// The ids must be blocks, each once, and the first `consumed` in no row of the table.
void check_free(const CachedSequence& sequence, const Int32Arg& ids, std::int64_t consumed) {
    enum : std::uint8_t { kAbsent, kListed, kTaken };
    std::vector<std::uint8_t> states(static_cast<std::size_t>(sequence.num_blocks()), kAbsent);
    for (std::int64_t i = 0; i < ids.size(); ++i) {
        const BlockId id = ids.data()[i];
        if (id < 0 || id >= sequence.num_blocks()) {
            throw py::value_error(concat("free_block_ids[", i, "] is ", id, ", must be 0 .. ",
                                         sequence.num_blocks() - 1));
        }
        std::uint8_t& state = states[static_cast<std::size_t>(id)];
        if (state != kAbsent) {
            throw py::value_error(
                concat("free_block_ids holds block ", id, " twice, must hold it once"));
        }
        state = i < consumed ? kTaken : kListed;
    }
    for (std::int64_t row = 0; row < sequence.table().shape(0) && consumed > 0; ++row) {
        for (std::int64_t column = 0; column < sequence.columns(); ++column) {
            const BlockId id = sequence.cell(row, column);
            if (id < 0 || id >= sequence.num_blocks()) continue;
            if (states[static_cast<std::size_t>(id)] != kTaken) continue;
            throw py::value_error(concat("free_block_ids holds block ", id,
                                         ", which is in use at block_table[", row, ", ", column,
                                         "]; pass free blocks only"));
        }
    }
}

py::tuple allocate_blocks(const py::array& key_pool, const py::array& value_pool,
                          const py::array& block_table, const py::array& seq_lengths,
                          const py::object& sequence_idx, const py::object& num_new_tokens,
                          const py::object& free_block_ids, bool donate) {
    CachedSequence sequence(key_pool, value_pool, block_table, seq_lengths, sequence_idx);
    const std::int64_t count = integer_arg(num_new_tokens, "num_new_tokens");
    if (count < 0 || count > kMaxTokens) {
        throw py::value_error(
            concat("num_new_tokens is ", text(num_new_tokens), ", must be 0 .. ", kMaxTokens));
    }
    const Int32Arg ids(free_block_ids, "free_block_ids");
    const std::int64_t first = sequence.blocks_after(0);
    check_room(sequence, first, count, ids.size());
    const std::int64_t consumed = sequence.blocks_after(count) - first;
    check_free(sequence, ids, consumed);
    if (donate) {
        check_writable(block_table, "block_table");
    } else {
        sequence.copy_table();
    }
    for (std::int64_t i = 0; i < consumed; ++i) sequence.set_block(first + i, ids.data()[i]);
    return py::make_tuple(sequence.arrays(), consumed);
}

// ---- append ----------------------------------------------------------------------------------
void check_new_rows(const py::array& rows, const char* name, const py::array& pool) {
    check_rank(rows, name, "(tokens, num_kv_heads, head_dim)", 3);
    if (rows.shape(1) != pool.shape(2) || rows.shape(2) != pool.shape(3)) {
        throw py::value_error(concat(name, " has shape ", shape_text(rows), ", must be (tokens, ",
                                     pool.shape(2), ", ", pool.shape(3), ") as the pool"));
    }
    if (!rows.dtype().equal(pool.dtype())) {
        throw py::type_error(concat(name, " has dtype ", text(rows.dtype()), ", the pool ",
                                    text(pool.dtype()), "; convert it with astype"));
    }
}

void check_new_rows(const py::array& keys, const py::array& values, const py::array& pool) {
    check_new_rows(keys, "keys_new", pool);
    check_new_rows(values, "values_new", pool);
    if (keys.shape(0) != values.shape(0)) {
        throw py::value_error(concat("keys_new has shape ", shape_text(keys), " and values_new ",
                                     shape_text(values), ", must be equal"));
    }
}

/// A block that is twice in the row would be overwritten with other tokens of it.
void check_written_once(const CachedSequence& sequence, std::int64_t first, std::int64_t end,
                        const std::vector<BlockId>& written) {
    for (std::int64_t column = 0; column < end; ++column) {
        const BlockId id = sequence.block(column);
        const auto found = std::find(written.begin(), written.end(), id);
        const bool is_itself = column >= first && found - written.begin() == column - first;
        if (found != written.end() && !is_itself) {
            throw py::value_error(concat("block ", id, " is in the row twice, at ",
                                         sequence.cell_name(column), " and ",
                                         sequence.cell_name(first + (found - written.begin())),
                                         "; each block of a row holds tokens of its own"));
        }
    }
}

py::array source_of(const py::array& rows, const CachedSequence& sequence) {
    const auto arrays = sequence.arrays();
    const bool is_copied = !has_dense_rows(rows) ||
                           is_overlapping(rows, arrays[0].cast<py::array>()) ||
                           is_overlapping(rows, arrays[1].cast<py::array>());
    return is_copied ? copy_of(rows) : rows;
}

py::tuple append_rows(const py::array& key_pool, const py::array& value_pool,
                      const py::array& block_table, const py::array& seq_lengths,
                      const py::object& sequence_idx, const py::array& keys_new,
                      const py::array& values_new, bool donate) {
    CachedSequence sequence(key_pool, value_pool, block_table, seq_lengths, sequence_idx);
    check_new_rows(keys_new, values_new, key_pool);
    const std::int64_t count = keys_new.shape(0);
    const std::int64_t first = sequence.length() / sequence.block_size();
    const std::int64_t end = sequence.blocks_after(count);
    const std::vector<BlockId> ids = sequence.blocks(first, count == 0 ? first : end);
    check_written_once(sequence, first, end, ids);
    if (donate) {
        sequence.check_pools_writable();
    } else {
        sequence.copy_all();
    }
    const py::array keys = source_of(keys_new, sequence);
    const py::array values = source_of(values_new, sequence);
    const auto to_keys =
        paged_rows<std::byte>(sequence.keys(), sequence.keys().mutable_data(), ids);
    const auto to_values =
        paged_rows<std::byte>(sequence.values(), sequence.values().mutable_data(), ids);
    const auto from_keys = token_rows<const std::byte>(keys, keys.data());
    const auto from_values = token_rows<const std::byte>(values, values.data());
    const kvcore::TokenShape shape = sequence.token_shape();
    const std::int64_t start = sequence.length() % sequence.block_size();
    run_copy(2 * keys.nbytes(), [&] {
        kvcore::append_rows(shape, to_keys, start, from_keys, count);
        kvcore::append_rows(shape, to_values, start, from_values, count);
    });
    sequence.set_length(sequence.length() + count);
    return sequence.arrays();
}

// ---- gather ----------------------------------------------------------------------------------
py::tuple gather_rows(const py::array& key_pool, const py::array& value_pool,
                      const py::array& block_table, const py::array& seq_lengths,
                      const py::object& sequence_idx) {
    const CachedSequence sequence(key_pool, value_pool, block_table, seq_lengths, sequence_idx);
    const std::int64_t count = sequence.length();
    const std::vector<BlockId> ids = sequence.blocks(0, sequence.blocks_after(0));
    const std::vector<py::ssize_t> shape = {count, key_pool.shape(2), key_pool.shape(3)};
    py::array keys(key_pool.dtype(), shape);
    py::array values(key_pool.dtype(), shape);
    const auto from_keys = paged_rows<const std::byte>(key_pool, key_pool.data(), ids);
    const auto from_values = paged_rows<const std::byte>(value_pool, value_pool.data(), ids);
    const auto to_keys = token_rows<std::byte>(keys, keys.mutable_data());
    const auto to_values = token_rows<std::byte>(values, values.mutable_data());
    const kvcore::TokenShape token = sequence.token_shape();
    run_copy(2 * keys.nbytes(), [&] {
        kvcore::gather_rows(token, from_keys, 0, to_keys, count);
        kvcore::gather_rows(token, from_values, 0, to_values, count);
    });
    return py::make_tuple(keys, values, count);
}

}  // namespace

void bind_paged_rows(py::module_& module) {
    module.def("allocate_blocks", &allocate_blocks, py::arg("key_pool"), py::arg("value_pool"),
               py::arg("block_table"), py::arg("seq_lengths"), py::arg("sequence_idx"),
               py::arg("num_new_tokens"), py::arg("free_block_ids"), py::arg("donate"),
               "Enter free blocks into a row: (the cache's arrays, blocks consumed); copies the "
               "table unless donated.");
    module.def("append_rows", &append_rows, py::arg("key_pool"), py::arg("value_pool"),
               py::arg("block_table"), py::arg("seq_lengths"), py::arg("sequence_idx"),
               py::arg("keys_new"), py::arg("values_new"), py::arg("donate"),
               "Write tokens behind those of a row: the cache's arrays, copies unless donated.");
    module.def("gather_rows", &gather_rows, py::arg("key_pool"), py::arg("value_pool"),
               py::arg("block_table"), py::arg("seq_lengths"), py::arg("sequence_idx"),
               "Copy the tokens of a row: (keys, values, tokens).");
}
