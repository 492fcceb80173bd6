// SPDX-License-Identifier: Apache-2.0
#include "kvcore/quantize.hpp"

#include <cstdint>
#include <vector>

#include "array_args.hpp"
#include "batch_args.hpp"
#include "bindings.hpp"
#include "nvfp4_args.hpp"
#include "slot_args.hpp"

namespace py = pybind11;
using kvcore::GlobalScale;
using kvcore::TokenRanges;
using kvcore::python::BatchArgs;
using kvcore::python::BlockArgs;
using kvcore::python::check_alike;
using kvcore::python::check_named_once;
using kvcore::python::check_slots;
using kvcore::python::host_global_scale;
using kvcore::python::nvfp4_move;
using kvcore::python::Nvfp4Move;
using kvcore::python::threads_of;
using kvcore::python::TokenTransfer;
using kvcore::python::TransferArgs;

namespace {

void quantize_nvfp4(const py::array& source, const py::array& codes, const py::array& scales,
                    const py::object& global, const py::object& threads) {
    const BlockArgs args(source, codes, scales, true);
    const GlobalScale factor = host_global_scale(global);
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    kvcore::quantize_nvfp4(args.blocks, args.wide, args.elements, factor,
                           BlockArgs::target(args.codes), BlockArgs::target(args.scales), workers);
}

void dequantize_nvfp4(const py::array& codes, const py::array& scales, const py::array& destination,
                      const py::object& global, const py::object& threads) {
    const BlockArgs args(destination, codes, scales, false);
    const GlobalScale factor = host_global_scale(global);
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    kvcore::dequantize_nvfp4(args.blocks, args.codes, args.scales, factor, args.wide,
                             BlockArgs::target(args.elements), workers);
}

/// Checks all arguments before anything moves.
std::vector<Nvfp4Move> nvfp4_moves(const py::list& transfers, const BatchArgs& batch,
                                   const TokenRanges& ranges, const py::array& cached,
                                   bool writes_pool) {
    std::vector<Nvfp4Move> moves;
    TransferArgs args(writes_pool);
    for (const py::handle each : transfers) {
        const TokenTransfer& transfer = args.add(each.cast<py::tuple>());
        moves.push_back(nvfp4_move(transfer, batch.total(), writes_pool, false,
                                   host_global_scale(transfer.factors)));
        batch.check_pages(ranges, transfer.pool);
    }
    for (const auto& [numbers, name] : batch.numbers(cached)) args.check_numbers(numbers, name);
    return moves;
}

void append_nvfp4(const py::list& transfers, const py::array& table, const py::object& lengths,
                  const py::array& offsets, const py::object& threads) {
    const BatchArgs batch(table, offsets);
    const py::array cached = lengths.is_none() ? py::array() : lengths.cast<py::array>();
    const TokenRanges ranges = batch.ranges(lengths.is_none() ? nullptr : batch.cached(cached));
    const int workers = threads_of(threads);
    const auto moves = nvfp4_moves(transfers, batch, ranges, cached, true);
    const kvcore::PageTable pages = batch.table();
    const py::gil_scoped_release unlocked;
    for (const Nvfp4Move& move : moves) {
        kvcore::append_batch(move.shape, move.pool, pages, ranges, move.source(), move.wide,
                             workers);
    }
}

void gather_nvfp4(const py::list& transfers, const py::array& table, const py::array& offsets,
                  const py::object& threads) {
    const BatchArgs batch(table, offsets);
    const TokenRanges ranges = batch.ranges(nullptr);
    const int workers = threads_of(threads);
    const auto moves = nvfp4_moves(transfers, batch, ranges, {}, false);
    const kvcore::PageTable pages = batch.table();
    const py::gil_scoped_release unlocked;
    for (const Nvfp4Move& move : moves) {
        kvcore::gather_batch(move.shape, move.readable_pool(), pages, ranges, move.tokens,
                             move.wide, workers);
    }
}

template <class Slot>
std::int64_t nvfp4_to_slots(const std::vector<Nvfp4Move>& moves, const py::array& slots,
                            int threads) {
    const Nvfp4Move& k = moves.front();
    const Nvfp4Move& v = moves.back();
    const auto* numbers = static_cast<const Slot*>(slots.data());
    check_named_once(numbers, slots.size(), k.pages * k.shape.page_size);
    const std::int64_t n = slots.size();
    const kvcore::Nvfp4Pool<std::byte> pool{k.pages, k.shape, k.pool, v.pool};
    const py::gil_scoped_release unlocked;
    return kvcore::append_slots(pool, k.source(), v.source(), k.wide, numbers, n, threads);
}

std::int64_t append_slots_nvfp4(const py::list& transfers, const py::array& slots,
                                const py::object& threads) {
    const bool is_wide = check_slots(slots, "slots");
    const int workers = threads_of(threads);
    if (transfers.size() != 2) throw py::value_error("transfers must be two, of K and of V");
    std::vector<Nvfp4Move> moves;
    TransferArgs args(true);
    for (const py::handle each : transfers) {
        const TokenTransfer& transfer = args.add(each.cast<py::tuple>());
        moves.push_back(
            nvfp4_move(transfer, slots.size(), true, true, host_global_scale(transfer.factors)));
    }
    args.check_numbers(slots, "slots");
    check_alike(moves.front(), moves.back());
    return is_wide ? nvfp4_to_slots<std::int64_t>(moves, slots, workers)
                   : nvfp4_to_slots<std::int32_t>(moves, slots, workers);
}

}  // namespace

void bind_nvfp4(py::module_& module) {
    module.def("quantize_nvfp4", &quantize_nvfp4, py::arg("source"), py::arg("codes"),
               py::arg("scales"), py::arg("global_scale"), py::arg("threads"));
    module.def("dequantize_nvfp4", &dequantize_nvfp4, py::arg("codes"), py::arg("scales"),
               py::arg("destination"), py::arg("global_scale"), py::arg("threads"));
    module.def("append_nvfp4", &append_nvfp4, py::arg("transfers"), py::arg("table"),
               py::arg("lengths"), py::arg("offsets"), py::arg("threads"));
    module.def("gather_nvfp4", &gather_nvfp4, py::arg("transfers"), py::arg("table"),
               py::arg("offsets"), py::arg("threads"));
    module.def("append_slots_nvfp4", &append_slots_nvfp4, py::arg("transfers"), py::arg("slots"),
               py::arg("threads"));
}
