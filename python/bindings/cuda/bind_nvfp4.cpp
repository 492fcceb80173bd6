// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <vector>

#include "batch_args.hpp"
#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"
#include "kvcore/cuda.hpp"
#include "nvfp4_args.hpp"
#include "slot_args.hpp"

namespace py = pybind11;
namespace cuda = kvcore::cuda;
using kvcore::GlobalScale;
using kvcore::python::are_alike;
using kvcore::python::BatchArgs;
using kvcore::python::BlockArgs;
using kvcore::python::check_alike;
using kvcore::python::check_named_once;
using kvcore::python::check_slots;
using kvcore::python::check_status;
using kvcore::python::DeviceNumbers;
using kvcore::python::global_scale;
using kvcore::python::nvfp4_move;
using kvcore::python::Nvfp4Move;
using kvcore::python::seen;
using kvcore::python::seen_all;
using kvcore::python::stream_of;
using kvcore::python::TokenTransfer;
using kvcore::python::TransferArgs;

namespace {

void quantize_nvfp4(const py::object& source, const py::object& codes, const py::object& scales,
                    const py::object& global, int device, std::uintptr_t stream) {
    const BlockArgs args(seen(source), seen(codes), seen(scales), true);
    const GlobalScale factor = global_scale(seen_all(global));
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        status = cuda::quantize_nvfp4(args.blocks, args.wide, args.elements, factor,
                                      BlockArgs::target(args.codes), BlockArgs::target(args.scales),
                                      stream_of(device, stream));
    }
    check_status(status, "quantising ", args.blocks, " blocks of nvfp4 on cuda:", device);
}

void dequantize_nvfp4(const py::object& codes, const py::object& scales,
                      const py::object& destination, const py::object& global, int device,
                      std::uintptr_t stream) {
    const BlockArgs args(seen(destination), seen(codes), seen(scales), false);
    const GlobalScale factor = global_scale(seen_all(global));
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        status =
            cuda::dequantize_nvfp4(args.blocks, args.codes, args.scales, factor, args.wide,
                                   BlockArgs::target(args.elements), stream_of(device, stream));
    }
    check_status(status, "dequantising ", args.blocks, " blocks of nvfp4 on cuda:", device);
}

/// K and V of a call, and the number of tokens.
struct Nvfp4Parts {
    std::vector<Nvfp4Move> moves;
    std::int64_t num_tokens = 0;

    [[nodiscard]] const Nvfp4Move& k() const { return moves.front(); }
    [[nodiscard]] const Nvfp4Move& v() const { return moves.back(); }

    /// Calls move(k, v) for both in one launch, or move(k, empty) and move(v, empty) in two.
    template <class Move>
    [[nodiscard]] cuda::Status for_each(const Move& move) const {
        if (are_alike(k(), v())) return move(k(), v());
        const cuda::Status status = move(k(), Nvfp4Move{});
        return status == cuda::kSuccess ? move(v(), Nvfp4Move{}) : status;
    }
};

/// Checks all arguments before anything is enqueued. Offsets on the device may end before the
/// tokens; the remaining tokens are padding.
Nvfp4Parts nvfp4_parts(const py::list& transfers, const BatchArgs& batch, bool is_readable,
                       bool writes_pool) {
    if (transfers.size() != 2) throw py::value_error("transfers must be two, of K and of V");
    Nvfp4Parts parts;
    TransferArgs args(writes_pool);
    for (const py::handle each : transfers) {
        const TokenTransfer& transfer = args.add(seen_all(each).cast<py::tuple>());
        const std::int64_t tokens = transfer.tokens.ndim() > 0 ? transfer.tokens.shape(0) : 0;
        if (parts.moves.empty()) parts.num_tokens = is_readable ? batch.total() : tokens;
        parts.moves.push_back(nvfp4_move(transfer, parts.num_tokens, writes_pool, false,
                                         global_scale(transfer.factors)));
    }
    for (const auto& [numbers, name] : batch.numbers()) args.check_numbers(numbers, name);
    return parts;
}

void append_nvfp4(const py::list& transfers, const py::object& table, const py::object& lengths,
                  const py::object& offsets, int device, std::uintptr_t stream) {
    const py::array pages = seen(table);
    const DeviceNumbers ends(offsets);
    const BatchArgs batch(pages, ends.checked(), ends.is_readable());
    const py::array cached = lengths.is_none() ? py::array() : seen(lengths);
    const std::uint32_t* begin = lengths.is_none() ? nullptr : batch.cached(cached);
    const Nvfp4Parts parts = nvfp4_parts(transfers, batch, ends.is_readable(), true);
    const kvcore::TokenRanges ranges{begin, ends.data<std::uint32_t>()};
    const cuda::Stream queue = stream_of(device, stream);
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        status = parts.for_each([&](const Nvfp4Move& k, const Nvfp4Move& v) {
            const cuda::DeviceBatch on_device{batch.table(), ranges, parts.num_tokens, k.pages};
            return cuda::append_batch(k.shape, {k.pool, v.pool}, on_device,
                                      {k.source(), v.source()}, k.wide, nullptr, queue);
        });
    }
    check_status(status, "appending tokens in nvfp4 on cuda:", device);
}

void gather_nvfp4(const py::list& transfers, const py::object& table, const py::object& offsets,
                  int device, std::uintptr_t stream) {
    const py::array pages = seen(table);
    const DeviceNumbers ends(offsets);
    const BatchArgs batch(pages, ends.checked(), ends.is_readable());
    const Nvfp4Parts parts = nvfp4_parts(transfers, batch, ends.is_readable(), false);
    const kvcore::TokenRanges ranges{nullptr, ends.data<std::uint32_t>()};
    const cuda::Stream queue = stream_of(device, stream);
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        status = parts.for_each([&](const Nvfp4Move& k, const Nvfp4Move& v) {
            const cuda::DeviceBatch on_device{batch.table(), ranges, parts.num_tokens, k.pages};
            return cuda::gather_batch(k.shape, {k.readable_pool(), v.readable_pool()}, on_device,
                                      {k.tokens, v.tokens}, k.wide, nullptr, queue);
        });
    }
    check_status(status, "gathering tokens of nvfp4 on cuda:", device);
}

template <class Slot>
cuda::Status nvfp4_to_slots(const Nvfp4Parts& parts, const DeviceNumbers& slots, std::int32_t* bad,
                            cuda::Stream stream) {
    const Nvfp4Move& k = parts.k();
    const std::int64_t n = slots.checked().size();
    if (slots.is_readable()) {
        check_named_once(static_cast<const Slot*>(slots.checked().data()), n,
                         k.pages * k.shape.page_size);
    }
    const kvcore::Nvfp4Pool<std::byte> pool{k.pages, k.shape, k.pool, parts.v().pool};
    const py::gil_scoped_release unlocked;
    return cuda::append_slots(pool, k.source(), parts.v().source(), k.wide, slots.data<Slot>(), n,
                              bad, stream);
}

void append_slots_nvfp4(const py::list& transfers, const py::object& given,
                        const py::object& given_bad, int device, std::uintptr_t handle) {
    const DeviceNumbers slots(given);
    const bool is_wide = check_slots(slots.checked(), "slots");
    if (transfers.size() != 2) throw py::value_error("transfers must be two, of K and of V");
    Nvfp4Parts parts;
    TransferArgs args(true);
    for (const py::handle each : transfers) {
        const TokenTransfer& transfer = args.add(seen_all(each).cast<py::tuple>());
        parts.moves.push_back(nvfp4_move(transfer, slots.checked().size(), true, true,
                                         global_scale(transfer.factors)));
    }
    check_alike(parts.k(), parts.v());
    py::array bad = seen(given_bad);
    if (!py::isinstance<py::array_t<std::int32_t>>(bad) || bad.size() != 1) {
        throw py::value_error("bad must be int32 (1,)");
    }
    auto* counter = static_cast<std::int32_t*>(bad.mutable_data());
    const cuda::Stream stream = stream_of(device, handle);
    const cuda::Status status = is_wide
                                    ? nvfp4_to_slots<std::int64_t>(parts, slots, counter, stream)
                                    : nvfp4_to_slots<std::int32_t>(parts, slots, counter, stream);
    check_status(status, "appending ", slots.checked().size(), " tokens on cuda:", device);
}

}  // namespace

void bind_cuda_nvfp4(py::module_& module) {
    module.def("quantize_nvfp4", &quantize_nvfp4, py::arg("source"), py::arg("codes"),
               py::arg("scales"), py::arg("global_scale"), py::arg("device"), py::arg("stream"));
    module.def("dequantize_nvfp4", &dequantize_nvfp4, py::arg("codes"), py::arg("scales"),
               py::arg("destination"), py::arg("global_scale"), py::arg("device"),
               py::arg("stream"));
    module.def("append_nvfp4", &append_nvfp4, py::arg("transfers"), py::arg("table"),
               py::arg("lengths"), py::arg("offsets"), py::arg("device"), py::arg("stream"));
    module.def("gather_nvfp4", &gather_nvfp4, py::arg("transfers"), py::arg("table"),
               py::arg("offsets"), py::arg("device"), py::arg("stream"));
    module.def("append_slots_nvfp4", &append_slots_nvfp4, py::arg("transfers"), py::arg("slots"),
               py::arg("bad"), py::arg("device"), py::arg("stream"));
}
