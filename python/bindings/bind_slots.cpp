// SPDX-License-Identifier: Apache-2.0
#include "kvcore/paged_batch.hpp"

#include <cstdint>
#include <limits>
#include <vector>

#include "array_args.hpp"
#include "batch_args.hpp"
#include "bindings.hpp"
#include "slot_args.hpp"

namespace py = pybind11;
using kvcore::PoolView;
using kvcore::TokenRows;
using kvcore::python::active_rows;
using kvcore::python::BatchArgs;
using kvcore::python::BatchRowsArgs;
using kvcore::python::check_apart;
using kvcore::python::check_named_once;
using kvcore::python::check_no_common_memory;
using kvcore::python::check_rank;
using kvcore::python::check_room;
using kvcore::python::check_slots;
using kvcore::python::concat;
using kvcore::python::slot_targets;
using kvcore::python::SlotTarget;
using kvcore::python::threads_of;
using kvcore::python::uint32_data;

namespace {

// ---- building ----------------------------------------------------------------------------------

py::array build_slots(const py::array& pool, const py::array& table, const py::array& lengths,
                      const py::array& offsets, const py::object& given) {
    const BatchArgs batch(table, offsets);
    const kvcore::TokenRanges ranges = batch.ranges(batch.cached(lengths));
    check_rank(pool, "pool", "(pages, page_size, heads, dim)", 4);
    const std::int64_t pages = pool.shape(0);
    const std::int64_t page_size = pool.shape(1);
    if (page_size < 1) throw py::value_error("the pool's pages have no tokens");
    bool is_wide = true;
    if (!given.is_none()) {
        const auto array = given.cast<py::array>();
        is_wide = check_slots(array, "out");
        check_room(array, is_wide, batch.total(), pages, page_size);
        for (const auto& [numbers, name] : batch.numbers(lengths)) {
            check_no_common_memory(array, "out", numbers, name);
        }
    }
    batch.check_pages(ranges, pool);
    py::array out =
        given.is_none() ? py::array_t<std::int64_t>(batch.total()) : given.cast<py::array>();
    if (is_wide) {
        kvcore::build_slots(batch.table(), ranges, page_size, pages,
                            static_cast<std::int64_t*>(out.mutable_data()), out.size());
    } else {
        kvcore::build_slots(batch.table(), ranges, page_size, pages,
                            static_cast<std::int32_t*>(out.mutable_data()), out.size());
    }
    return out;
}

// ---- appending ---------------------------------------------------------------------------------

template <class Slot>
std::int64_t append_to(std::vector<SlotTarget>& targets, const Slot* slots, std::int64_t n,
                       int threads) {
    const py::array& pool = targets.front().pool;
    PoolView<std::byte> view{pool.shape(0), pool.shape(1), pool.shape(2), {}, {}, {}};
    check_named_once(slots, n, view.pages * view.page_size);
    view.k = targets.front().tensor();
    if (targets.size() == 2) view.v = targets.back().tensor();
    const TokenRows<const std::byte> k = targets.front().rows();
    const TokenRows<const std::byte> v = targets.back().rows();
    const py::gil_scoped_release unlocked;
    return kvcore::append_slots(view, k, v, slots, n, threads);
}

std::int64_t append_slots(const py::list& pools, const py::array& slots, const py::list& tokens,
                          const py::object& threads) {
    const bool is_wide = check_slots(slots, "slots");
    const int workers = threads_of(threads);
    std::vector<SlotTarget> targets = slot_targets(pools, tokens, slots.size());
    for (const SlotTarget& target : targets) {
        check_no_common_memory(target.pool, "the pool", slots, "slots");
    }
    if (is_wide) {
        return append_to(targets, static_cast<const std::int64_t*>(slots.data()), slots.size(),
                         workers);
    }
    return append_to(targets, static_cast<const std::int32_t*>(slots.data()), slots.size(),
                     workers);
}

// ---- lengths -----------------------------------------------------------------------------------

void advance_lengths(const py::array& lengths, const py::array& offsets, const py::object& active,
                     py::array out) {
    const py::ssize_t batch = lengths.ndim() == 1 ? lengths.shape(0) : 0;
    const std::uint32_t* from = uint32_data(lengths, "lengths", batch);
    const std::uint32_t* ends = uint32_data(offsets, "row_offsets", batch + 1);
    uint32_data(out, "out", batch);
    const std::uint8_t* is_active = active_rows(active, batch);
    for (py::ssize_t row = 0; row < batch; ++row) {
        if (ends[row + 1] < ends[row]) {
            throw py::value_error(concat("row_offsets[", row + 1, "] is ", ends[row + 1],
                                         ", must not be below the one before, ", ends[row]));
        }
        if (ends[row + 1] - ends[row] > std::numeric_limits<std::uint32_t>::max() - from[row]) {
            throw py::value_error(concat("lengths[", row, "] is ", from[row], " and would grow by ",
                                         ends[row + 1] - ends[row], ", beyond uint32"));
        }
    }
    check_apart(lengths, offsets, out);
    kvcore::advance_lengths(from, ends, is_active, static_cast<std::uint32_t*>(out.mutable_data()),
                            batch);
}

// ---- rows that stay ----------------------------------------------------------------------------

void compact_table(const py::array& table, const py::object& lengths, const py::object& offsets,
                   const py::array& kept, const py::object& threads) {
    const BatchRowsArgs batch(table, lengths, offsets);
    const std::int64_t n = batch.check_kept(kept, true);
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    kvcore::compact_table(batch.rows(), static_cast<const std::uint32_t*>(kept.data()), n, workers);
}

}  // namespace

void bind_slots(py::module_& module) {
    module.def("build_slots", &build_slots, py::arg("pool"), py::arg("table"), py::arg("lengths"),
               py::arg("offsets"), py::arg("out"));
    module.def("append_slots", &append_slots, py::arg("pools"), py::arg("slots"), py::arg("tokens"),
               py::arg("threads"));
    module.def("advance_lengths", &advance_lengths, py::arg("lengths"), py::arg("offsets"),
               py::arg("active"), py::arg("out"));
    module.def("compact_table", &compact_table, py::arg("table"), py::arg("lengths"),
               py::arg("offsets"), py::arg("kept"), py::arg("threads"));
}
