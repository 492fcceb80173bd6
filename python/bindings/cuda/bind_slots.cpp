// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <vector>

#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"
#include "kvcore/cuda.hpp"
#include "slot_args.hpp"

namespace py = pybind11;
namespace cuda = kvcore::cuda;
using kvcore::PoolView;
using kvcore::python::active_rows;
using kvcore::python::BatchArgs;
using kvcore::python::BatchRowsArgs;
using kvcore::python::check_apart;
using kvcore::python::check_named_once;
using kvcore::python::check_rank;
using kvcore::python::check_room;
using kvcore::python::check_slots;
using kvcore::python::check_status;
using kvcore::python::DeviceNumbers;
using kvcore::python::seen;
using kvcore::python::seen_all;
using kvcore::python::slot_targets;
using kvcore::python::SlotTarget;
using kvcore::python::stream_of;
using kvcore::python::uint32_data;
using kvcore::python::without_gil;

namespace {

void build_slots(const py::object& given_pool, const py::object& given_table,
                 const py::object& given_lengths, const py::object& offsets,
                 const py::object& given_out, int device, std::uintptr_t stream) {
    const py::array pool = seen(given_pool);
    const py::array table = seen(given_table);
    const py::array lengths = seen(given_lengths);
    const DeviceNumbers ends(offsets);
    const BatchArgs batch(table, ends.checked(), ends.is_readable());
    const kvcore::TokenRanges ranges{batch.cached(lengths), ends.data<std::uint32_t>()};
    check_rank(pool, "pool", "(pages, page_size, heads, dim)", 4);
    const std::int64_t pages = pool.shape(0);
    const std::int64_t page_size = pool.shape(1);
    if (page_size < 1) throw py::value_error("the pool's pages have no tokens");
    py::array out = seen(given_out);
    const bool is_wide = check_slots(out, "out");
    check_room(out, is_wide, ends.is_readable() ? batch.total() : 0, pages, page_size);
    void* slots = out.mutable_data();
    const std::int64_t capacity = out.size();
    const kvcore::PageTable rows = batch.table();
    const cuda::Stream queue = stream_of(device, stream);
    const cuda::Status status = without_gil([&] {
        return is_wide ? cuda::build_slots(rows, ranges, page_size, pages,
                                           static_cast<std::int64_t*>(slots), capacity, queue)
                       : cuda::build_slots(rows, ranges, page_size, pages,
                                           static_cast<std::int32_t*>(slots), capacity, queue);
    });
    check_status(status, "building ", capacity, " slots on cuda:", device);
}

/// A counter on the device.
std::int32_t* counter_of(py::array& bad) {
    if (py::isinstance<py::array_t<std::int32_t>>(bad) && bad.size() == 1) {
        return static_cast<std::int32_t*>(bad.mutable_data());
    }
    throw py::value_error("bad must be int32 (1,)");
}

/// Slots of either width.
template <class Slot>
void append_to(std::vector<SlotTarget>& targets, const DeviceNumbers& slots, std::int32_t* bad,
               cuda::Stream stream) {
    const py::array& pool = targets.front().pool;
    PoolView<std::byte> view{pool.shape(0), pool.shape(1), pool.shape(2), {}, {}, {}};
    const std::int64_t n = slots.checked().size();
    if (slots.is_readable()) {
        check_named_once(static_cast<const Slot*>(slots.checked().data()), n,
                         view.pages * view.page_size);
    }
    view.k = targets.front().tensor();
    if (targets.size() == 2) view.v = targets.back().tensor();
    const auto k = targets.front().rows();
    const auto v = targets.back().rows();
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        status = cuda::append_slots(view, k, v, slots.data<Slot>(), n, bad, stream);
    }
    check_status(status, "appending ", n, " tokens on cuda:", stream.device);
}

void append_slots(const py::list& pools, const py::object& given, const py::list& tokens,
                  const py::object& given_bad, int device, std::uintptr_t stream) {
    const DeviceNumbers slots(given);
    const bool is_wide = check_slots(slots.checked(), "slots");
    std::vector<SlotTarget> targets =
        slot_targets(seen_all(pools), seen_all(tokens), slots.checked().size());
    py::array bad = seen(given_bad);
    std::int32_t* counter = counter_of(bad);
    if (is_wide) {
        append_to<std::int64_t>(targets, slots, counter, stream_of(device, stream));
    } else {
        append_to<std::int32_t>(targets, slots, counter, stream_of(device, stream));
    }
}

void advance_lengths(const py::object& given_lengths, const py::object& offsets,
                     const py::object& active, const py::object& given_out, int device,
                     std::uintptr_t stream) {
    const py::array lengths = seen(given_lengths);
    const py::ssize_t batch = lengths.ndim() == 1 ? lengths.shape(0) : 0;
    const std::uint32_t* from = uint32_data(lengths, "lengths", batch);
    const DeviceNumbers ends(offsets);
    uint32_data(ends.checked(), "row_offsets", batch + 1);
    const py::object flags = seen_all(active);
    const std::uint8_t* is_active = active_rows(flags, batch);
    py::array out = seen(given_out);
    uint32_data(out, "out", batch);
    check_apart(lengths, ends.checked(), out);
    const auto* steps = ends.data<std::uint32_t>();
    auto* to = static_cast<std::uint32_t*>(out.mutable_data());
    const cuda::Status status = without_gil([&] {
        return cuda::advance_lengths(from, steps, is_active, to, batch, stream_of(device, stream));
    });
    check_status(status, "advancing ", batch, " lengths on cuda:", device);
}

void compact_table(const py::object& table, const py::object& lengths, const py::object& offsets,
                   const py::object& given_kept, int device, std::uintptr_t stream) {
    const BatchRowsArgs batch(seen(table), seen_all(lengths), seen_all(offsets));
    const DeviceNumbers kept(given_kept);
    const std::int64_t n = batch.check_kept(kept.checked(), kept.is_readable());
    const auto* rows = kept.data<std::uint32_t>();
    const cuda::Status status = without_gil(
        [&] { return cuda::compact_table(batch.rows(), rows, n, stream_of(device, stream)); });
    check_status(status, "compacting ", batch.rows().rows, " rows on cuda:", device);
}

}  // namespace

void bind_cuda_slots(py::module_& module) {
    module.def("build_slots", &build_slots, py::arg("pool"), py::arg("table"), py::arg("lengths"),
               py::arg("offsets"), py::arg("out"), py::arg("device"), py::arg("stream"));
    module.def("append_slots", &append_slots, py::arg("pools"), py::arg("slots"), py::arg("tokens"),
               py::arg("bad"), py::arg("device"), py::arg("stream"));
    module.def("advance_lengths", &advance_lengths, py::arg("lengths"), py::arg("offsets"),
               py::arg("active"), py::arg("out"), py::arg("device"), py::arg("stream"));
    module.def("compact_table", &compact_table, py::arg("table"), py::arg("lengths"),
               py::arg("offsets"), py::arg("kept"), py::arg("device"), py::arg("stream"));
}
