// SPDX-License-Identifier: Apache-2.0
#include "kvcore/paged_batch.hpp"

#include <string>
#include <vector>

#include "array_args.hpp"
#include "batch_args.hpp"
#include "bindings.hpp"
#include "paged_batch_args.hpp"

namespace py = pybind11;
using kvcore::PageTable;
using kvcore::TokenRanges;
using kvcore::python::BatchArgs;
using kvcore::python::Move;
using kvcore::python::threads_of;
using kvcore::python::TokenTransfer;
using kvcore::python::TransferArgs;

namespace {

void append(const Move& move, const PageTable& table, const TokenRanges& ranges, int threads) {
    if (move.is_copy) {
        kvcore::append_batch(move.row, move.rows<std::byte>(), table, ranges, move.source(),
                             threads);
    } else {
        kvcore::append_batch(move.shape, move.pool, table, ranges, move.source(), move.wide,
                             move.scales, threads);
    }
}

void gather(const Move& move, const PageTable& table, const TokenRanges& ranges, int threads) {
    if (move.is_copy) {
        kvcore::gather_batch(move.row, move.rows<const std::byte>(), table, ranges, move.tokens,
                             threads);
    } else {
        kvcore::gather_batch(move.shape, move.readable_pool(), table, ranges, move.tokens,
                             move.wide, threads);
    }
}

/// Checks all arguments before anything moves.
std::vector<Move> moves_of(const py::list& transfers, const BatchArgs& batch,
                           const TokenRanges& ranges, const py::array& cached, bool writes_pool) {
    std::vector<Move> moves;
    TransferArgs args(writes_pool);
    for (const py::handle each : transfers) {
        const TokenTransfer& transfer = args.add(each.cast<py::tuple>());
        moves.push_back(transfer.checked(batch.total(), writes_pool));
        batch.check_pages(ranges, transfer.pool);
    }
    for (const auto& [numbers, name] : batch.numbers(cached)) args.check_numbers(numbers, name);
    return moves;
}

void append_tokens(const py::list& transfers, const py::array& table, const py::object& lengths,
                   const py::array& offsets, const py::object& threads) {
    const BatchArgs batch(table, offsets);
    const py::array cached = lengths.is_none() ? py::array() : lengths.cast<py::array>();
    const TokenRanges ranges = batch.ranges(lengths.is_none() ? nullptr : batch.cached(cached));
    const int workers = threads_of(threads);
    const std::vector<Move> moves = moves_of(transfers, batch, ranges, cached, true);
    const PageTable pages = batch.table();
    const py::gil_scoped_release unlocked;
    for (const Move& move : moves) append(move, pages, ranges, workers);
}

void gather_tokens(const py::list& transfers, const py::array& table, const py::array& offsets,
                   const py::object& threads) {
    const BatchArgs batch(table, offsets);
    const TokenRanges ranges = batch.ranges(nullptr);
    const int workers = threads_of(threads);
    const std::vector<Move> moves = moves_of(transfers, batch, ranges, {}, false);
    const PageTable pages = batch.table();
    const py::gil_scoped_release unlocked;
    for (const Move& move : moves) gather(move, pages, ranges, workers);
}

}  // namespace

void bind_paged_batch(py::module_& module) {
    module.def("append_tokens", &append_tokens, py::arg("transfers"), py::arg("table"),
               py::arg("lengths"), py::arg("offsets"), py::arg("threads"));
    module.def("gather_tokens", &gather_tokens, py::arg("transfers"), py::arg("table"),
               py::arg("offsets"), py::arg("threads"));
}
