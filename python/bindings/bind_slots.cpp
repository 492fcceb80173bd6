// SPDX-License-Identifier: Apache-2.0
#include "kvcore/slots.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "array_args.hpp"
#include "batch_args.hpp"
#include "bindings.hpp"

namespace py = pybind11;
using kvcore::PoolView;
using kvcore::TokenRows;
using kvcore::python::BatchArgs;
using kvcore::python::check_aligned;
using kvcore::python::check_rank;
using kvcore::python::check_uint32;
using kvcore::python::concat;
using kvcore::python::has_dense_rows;
using kvcore::python::is_overlapping;
using kvcore::python::shape_text;
using kvcore::python::text;
using kvcore::python::threads_of;

namespace {

// ---- building ----------------------------------------------------------------------------------

/// A vector of slots; true where they are int64.
bool check_slots(const py::array& slots, const char* name) {
    check_rank(slots, name, "(tokens,)", 1);
    const bool is_wide = py::isinstance<py::array_t<std::int64_t>>(slots);
    if (!is_wide && !py::isinstance<py::array_t<std::int32_t>>(slots)) {
        throw py::type_error(
            concat(name, " has dtype ", text(slots.dtype()), ", must be int64 or int32"));
    }
    if (!has_dense_rows(slots)) {
        throw py::value_error(concat(name, " is strided; make it contiguous"));
    }
    check_aligned(slots, name);
    return is_wide;
}

/// ValueError for too few entries, or where they do not hold the slots of all pages.
void check_room(const py::array& out, bool is_wide, std::int64_t tokens, std::int64_t pages,
                std::int64_t page_size) {
    if (out.size() < tokens) {
        throw py::value_error(concat("out has ", out.size(), " entries for ", tokens, " tokens"));
    }
    if (!is_wide && pages > (std::int64_t{1} << 31) / page_size) {
        throw py::value_error(concat("out has dtype int32, which does not hold the slots of ",
                                     pages, " pages of ", page_size, " tokens; pass int64"));
    }
}

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

/// ValueError for a slot of the pool that is named twice: a set with room for twice the slots.
template <class Slot>
void check_named_once(const Slot* slots, std::int64_t n, std::int64_t capacity) {
    std::size_t size = 4;
    while (size < 2 * static_cast<std::size_t>(n)) size *= 2;
    std::vector<Slot> seen(size, Slot{-1});
    for (std::int64_t i = 0; i < n; ++i) {
        const Slot slot = slots[i];
        if (slot < 0 || slot >= capacity) continue;
        std::size_t at = static_cast<std::uint64_t>(slot) * 0x9e3779b97f4a7c15ULL >> 20;
        for (at %= size; seen[at] != -1; at = (at + 1) % size) {
            if (seen[at] != slot) continue;
            throw py::value_error(
                concat("slots[", i, "] is ", slot, ", which is named before; name each once"));
        }
        seen[at] = slot;
    }
}

/// Tokens [tokens, heads, dim] and the pool [pages, page_size, heads, dim] that they go to.
struct Target {
    py::array pool;
    py::array tokens;

    void check(std::int64_t n) const {
        check_rank(pool, "pool", "(pages, page_size, heads, dim)", 4);
        check_rank(tokens, "tokens", "(tokens, heads, dim)", 3);
        if (tokens.shape(0) < n || tokens.shape(1) != pool.shape(2) ||
            tokens.shape(2) != pool.shape(3)) {
            throw py::value_error(concat("tokens have shape ", shape_text(tokens),
                                         ", must be at least (", n, ", ", pool.shape(2), ", ",
                                         pool.shape(3), ")"));
        }
        if (!tokens.dtype().equal(pool.dtype())) {
            throw py::type_error(concat("tokens have dtype ", text(tokens.dtype()),
                                        ", the pool has ", text(pool.dtype()),
                                        "; convert them first"));
        }
        if (pool.shape(1) < 1) throw py::value_error("the pool's pages have no tokens");
        if (!has_dense_rows(pool) || !has_dense_rows(tokens)) {
            throw py::value_error("the last axis of pool and tokens must be contiguous");
        }
        if (!pool.writeable()) throw py::value_error("the pool is read-only");
        if (is_overlapping(pool, tokens)) {
            throw py::value_error("pool and tokens overlap in memory; pass a copy of the tokens");
        }
    }
    /// As one-byte elements.
    [[nodiscard]] kvcore::PagedTensor<std::byte> tensor() {
        return {static_cast<std::byte*>(pool.mutable_data()),
                kvcore::DType::kInt8,
                pool.shape(3) * pool.itemsize(),
                pool.strides(0),
                pool.strides(1),
                pool.strides(2),
                {}};
    }
    [[nodiscard]] TokenRows<const std::byte> rows() const {
        return {static_cast<const std::byte*>(tokens.data()), tokens.strides(0), tokens.strides(1)};
    }
};

template <class Slot>
std::int64_t append_to(std::vector<Target>& targets, const Slot* slots, std::int64_t n,
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
                          int threads) {
    const bool is_wide = check_slots(slots, "slots");
    const int workers = threads_of(threads);
    if (pools.empty() || pools.size() > 2 || pools.size() != tokens.size()) {
        throw py::value_error("pools and tokens must be those of K, or of K and V");
    }
    std::vector<Target> targets;
    for (std::size_t i = 0; i < pools.size(); ++i) {
        targets.push_back({pools[i].cast<py::array>(), tokens[i].cast<py::array>()});
        targets.back().check(slots.size());
        const py::array& pool = targets.back().pool;
        const py::array& first = targets.front().pool;
        if (!std::equal(pool.shape(), pool.shape() + 3, first.shape())) {
            throw py::value_error("the pools of K and V differ in pages, page size or heads");
        }
    }
    if (is_wide) {
        return append_to(targets, static_cast<const std::int64_t*>(slots.data()), slots.size(),
                         workers);
    }
    return append_to(targets, static_cast<const std::int32_t*>(slots.data()), slots.size(),
                     workers);
}

// ---- lengths -----------------------------------------------------------------------------------

const std::uint32_t* uint32_data(const py::array& array, const char* name, py::ssize_t size) {
    check_rank(array, name, "(rows,)", 1);
    check_uint32(array, name);
    if (array.size() == size) return static_cast<const std::uint32_t*>(array.data());
    throw py::value_error(concat(name, " has ", array.size(), " entries, must have ", size));
}

void advance_lengths(const py::array& lengths, const py::array& offsets, const py::object& active,
                     py::array out) {
    const py::ssize_t batch = lengths.ndim() == 1 ? lengths.shape(0) : 0;
    const std::uint32_t* from = uint32_data(lengths, "lengths", batch);
    const std::uint32_t* ends = uint32_data(offsets, "row_offsets", batch + 1);
    uint32_data(out, "out", batch);
    const std::uint8_t* is_active = nullptr;
    if (!active.is_none()) {
        const auto flags = active.cast<py::array>();
        if (!py::isinstance<py::array_t<bool>>(flags) || flags.ndim() != 1 ||
            flags.size() != batch || !has_dense_rows(flags)) {
            throw py::value_error(concat("active is ", text(flags.dtype()), " ", shape_text(flags),
                                         ", must be bool (", batch, ",) and contiguous"));
        }
        is_active = static_cast<const std::uint8_t*>(flags.data());
    }
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
    const bool is_shifted = out.data() != lengths.data() && is_overlapping(out, lengths);
    if (is_shifted || is_overlapping(out, offsets)) {
        throw py::value_error("out overlaps lengths or row_offsets; pass lengths itself or others");
    }
    kvcore::advance_lengths(from, ends, is_active, static_cast<std::uint32_t*>(out.mutable_data()),
                            batch);
}

}  // namespace

void bind_slots(py::module_& module) {
    module.def("build_slots", &build_slots, py::arg("pool"), py::arg("table"), py::arg("lengths"),
               py::arg("offsets"), py::arg("out"));
    module.def("append_slots", &append_slots, py::arg("pools"), py::arg("slots"), py::arg("tokens"),
               py::arg("threads"));
    module.def("advance_lengths", &advance_lengths, py::arg("lengths"), py::arg("offsets"),
               py::arg("active"), py::arg("out"));
}
