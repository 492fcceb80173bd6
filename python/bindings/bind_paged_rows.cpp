// SPDX-License-Identifier: Apache-2.0
#include "kvcore/paged_batch.hpp"

#include <optional>
#include <vector>

#include "array_args.hpp"
#include "bindings.hpp"
#include "paged_cache_calls.hpp"

namespace py = pybind11;
using kvcore::BlockId;
using kvcore::PagedRows;
using kvcore::TokenRows;
using kvcore::python::blocks_to_append;
using kvcore::python::CachedSequence;
using kvcore::python::check_writable;
using kvcore::python::copy_of;
using kvcore::python::flag_arg;
using kvcore::python::has_dense_rows;
using kvcore::python::is_overlapping;
using kvcore::python::NewBlocks;

namespace {

// For fewer bytes, a copy takes about as long as a release of the GIL.
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
py::tuple allocate_blocks(const py::array& key_pool, const py::array& value_pool,
                          const py::array& block_table, const py::array& seq_lengths,
                          const py::object& sequence_idx, const py::object& num_new_tokens,
                          const py::object& free_block_ids, const py::object& donate) {
    CachedSequence sequence(key_pool, value_pool, block_table, seq_lengths, sequence_idx);
    const NewBlocks added(sequence, num_new_tokens, free_block_ids);
    if (flag_arg(donate, "donate")) {
        check_writable(block_table, "block_table");
    } else {
        sequence.copy_table();
    }
    added.enter(sequence);
    return py::make_tuple(sequence.arrays(), added.consumed());
}

// ---- append ----------------------------------------------------------------------------------
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
                      const py::array& values_new, const py::object& donate) {
    CachedSequence sequence(key_pool, value_pool, block_table, seq_lengths, sequence_idx);
    const std::vector<BlockId> ids = blocks_to_append(sequence, keys_new, values_new);
    const std::int64_t count = keys_new.shape(0);
    if (flag_arg(donate, "donate")) {
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
               "Enter free blocks into a row; return (the cache's arrays, blocks consumed). Copies "
               "the table unless donated.");
    module.def("append_rows", &append_rows, py::arg("key_pool"), py::arg("value_pool"),
               py::arg("block_table"), py::arg("seq_lengths"), py::arg("sequence_idx"),
               py::arg("keys_new"), py::arg("values_new"), py::arg("donate"),
               "Append tokens to a row; return the cache's arrays, copies unless donated.");
    module.def("gather_rows", &gather_rows, py::arg("key_pool"), py::arg("value_pool"),
               py::arg("block_table"), py::arg("seq_lengths"), py::arg("sequence_idx"),
               "Copy the tokens of a row; return (keys, values, tokens).");
}
