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

/// Everything is checked before anything moves.
std::vector<Move> moves_of(const py::list& transfers, const BatchArgs& batch,
                           const TokenRanges& ranges, bool writes_pool) {
    std::vector<Move> moves;
    for (const py::handle each : transfers) {
        const auto parts = each.cast<py::tuple>();
        const TokenTransfer transfer{parts[0].cast<std::string>(), parts[1].cast<py::array>(),
                                     parts[2], parts[3], parts[4].cast<py::array>()};
        moves.push_back(transfer.checked(batch.total(), writes_pool));
        batch.check_pages(ranges, transfer.pool);
    }
    return moves;
}

void append_tokens(const py::list& transfers, const py::array& table, const py::object& lengths,
                   const py::array& offsets, int threads) {
    const BatchArgs batch(table, offsets);
    const TokenRanges ranges =
        batch.ranges(lengths.is_none() ? nullptr : batch.cached(lengths.cast<py::array>()));
    const int workers = threads_of(threads);
    const std::vector<Move> moves = moves_of(transfers, batch, ranges, true);
    const PageTable pages = batch.table();
    const py::gil_scoped_release unlocked;
    for (const Move& move : moves) append(move, pages, ranges, workers);
}

void gather_tokens(const py::list& transfers, const py::array& table, const py::array& offsets,
                   int threads) {
    const BatchArgs batch(table, offsets);
    const TokenRanges ranges = batch.ranges(nullptr);
    const int workers = threads_of(threads);
    const std::vector<Move> moves = moves_of(transfers, batch, ranges, false);
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
