// SPDX-License-Identifier: Apache-2.0
// kvcore.functional: tables and lengths are on the host; of pools and tokens only the shapes are
// checked.
#include <cstdint>

#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"
#include "paged_cache_calls.hpp"

namespace py = pybind11;
using kvcore::python::blocks_to_append;
using kvcore::python::CachedSequence;
using kvcore::python::NewBlocks;
using kvcore::python::seen;

namespace {

/// Enters blocks into the table in place. Returns the number of blocks.
std::int64_t allocate_blocks(const py::object& key_pool, const py::object& value_pool,
                             const py::array& block_table, const py::array& seq_lengths,
                             const py::object& sequence_idx, const py::object& num_new_tokens,
                             const py::object& free_block_ids) {
    CachedSequence sequence(seen(key_pool), seen(value_pool), block_table, seq_lengths,
                            sequence_idx);
    const NewBlocks added(sequence, num_new_tokens, free_block_ids);
    added.enter(sequence);
    return added.consumed();
}

/// Checks an append. Returns the number of tokens of the row before the append.
std::int64_t check_append(const py::object& key_pool, const py::object& value_pool,
                          const py::array& block_table, const py::array& seq_lengths,
                          const py::object& sequence_idx, const py::object& keys_new,
                          const py::object& values_new) {
    const CachedSequence sequence(seen(key_pool), seen(value_pool), block_table, seq_lengths,
                                  sequence_idx);
    (void)blocks_to_append(sequence, seen(keys_new), seen(values_new));
    return sequence.length();
}

/// Checks that all tokens of a row are in blocks of the pools. Returns their number.
std::int64_t check_gather(const py::object& key_pool, const py::object& value_pool,
                          const py::array& block_table, const py::array& seq_lengths,
                          const py::object& sequence_idx) {
    const CachedSequence sequence(seen(key_pool), seen(value_pool), block_table, seq_lengths,
                                  sequence_idx);
    (void)sequence.blocks(0, sequence.blocks_after(0));
    return sequence.length();
}

}  // namespace

void bind_cuda_rows(py::module_& module) {
    module.def("allocate_blocks", &allocate_blocks, py::arg("key_pool"), py::arg("value_pool"),
               py::arg("block_table"), py::arg("seq_lengths"), py::arg("sequence_idx"),
               py::arg("num_new_tokens"), py::arg("free_block_ids"));
    module.def("check_append", &check_append, py::arg("key_pool"), py::arg("value_pool"),
               py::arg("block_table"), py::arg("seq_lengths"), py::arg("sequence_idx"),
               py::arg("keys_new"), py::arg("values_new"));
    module.def("check_gather", &check_gather, py::arg("key_pool"), py::arg("value_pool"),
               py::arg("block_table"), py::arg("seq_lengths"), py::arg("sequence_idx"));
}
