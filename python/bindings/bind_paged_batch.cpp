// SPDX-License-Identifier: Apache-2.0
#include "kvcore/paged_batch.hpp"

#include <vector>

#include "array_args.hpp"
#include "batch_args.hpp"
#include "bindings.hpp"

namespace py = pybind11;
using kvcore::PagedRows;
using kvcore::PageTable;
using kvcore::TokenRanges;
using kvcore::TokenRows;
using kvcore::TokenShape;
using kvcore::python::BatchArgs;
using kvcore::python::check_rank;
using kvcore::python::concat;
using kvcore::python::has_dense_rows;
using kvcore::python::is_overlapping;
using kvcore::python::shape_text;
using kvcore::python::text;
using kvcore::python::threads_of;

namespace {

/// A pool [pages, page_size, heads, dim] and tokens [total, heads, dim] of the same elements.
struct Transfer {
    py::array pool;
    py::array tokens;

    void check(std::int64_t total, bool writes_pool) const {
        check_rank(pool, "pool", "(pages, page_size, heads, dim)", 4);
        check_rank(tokens, "tokens", "(tokens, heads, dim)", 3);
        const bool fits = tokens.shape(0) == total && tokens.shape(1) == pool.shape(2) &&
                          tokens.shape(2) == pool.shape(3);
        if (!fits) {
            throw py::value_error(concat("tokens have shape ", shape_text(tokens), ", must be (",
                                         total, ", ", pool.shape(2), ", ", pool.shape(3), ")"));
        }
        if (!tokens.dtype().is(pool.dtype()) && !tokens.dtype().equal(pool.dtype())) {
            throw py::type_error(concat("tokens have dtype ", text(tokens.dtype()),
                                        ", the pool has ", text(pool.dtype()),
                                        "; convert them first"));
        }
        if (pool.shape(1) < 1) throw py::value_error("the pool's pages have no tokens");
        if (!has_dense_rows(pool) || !has_dense_rows(tokens)) {
            throw py::value_error("the last axis of pool and tokens must be contiguous");
        }
        if (!(writes_pool ? pool : tokens).writeable()) {
            throw py::value_error(
                concat(writes_pool ? "the pool" : "the destination", " is read-only"));
        }
        if (is_overlapping(pool, tokens)) {
            throw py::value_error("pool and tokens overlap in memory; pass a copy of the tokens");
        }
    }
    [[nodiscard]] TokenShape shape() const {
        return {pool.shape(2), pool.shape(3) * pool.itemsize()};
    }
    template <class Byte>
    [[nodiscard]] PagedRows<Byte> rows(Byte* data) const {
        return {data, pool.strides(0), pool.strides(1), pool.strides(2), pool.shape(1), nullptr};
    }
};

std::vector<Transfer> transfers(const py::list& pools, const py::list& tokens,
                                const BatchArgs& batch, const TokenRanges& ranges,
                                bool writes_pool) {
    std::vector<Transfer> found;
    for (std::size_t i = 0; i < pools.size(); ++i) {
        found.push_back({pools[i].cast<py::array>(), tokens[i].cast<py::array>()});
        found.back().check(batch.total(), writes_pool);
        batch.check_pages(ranges, found.back().pool);
    }
    return found;
}

void append_tokens(const py::list& pools, const py::array& table, const py::array& lengths,
                   const py::array& offsets, const py::list& tokens, int threads) {
    const BatchArgs batch(table, offsets);
    const TokenRanges ranges = batch.ranges(batch.cached(lengths));
    const int workers = threads_of(threads);
    std::vector<Transfer> all = transfers(pools, tokens, batch, ranges, true);
    for (Transfer& each : all) {
        auto* pool = static_cast<std::byte*>(each.pool.mutable_data());
        const auto* source = static_cast<const std::byte*>(each.tokens.data());
        const TokenRows<const std::byte> rows{source, each.tokens.strides(0),
                                              each.tokens.strides(1)};
        const TokenShape shape = each.shape();
        const PagedRows<std::byte> paged = each.rows(pool);
        const PageTable pages = batch.table();
        const py::gil_scoped_release unlocked;
        kvcore::append_batch(shape, paged, pages, ranges, rows, workers);
    }
}

void gather_tokens(const py::list& pools, const py::array& table, const py::array& offsets,
                   const py::list& tokens, int threads) {
    const BatchArgs batch(table, offsets);
    const TokenRanges ranges = batch.ranges(nullptr);
    const int workers = threads_of(threads);
    std::vector<Transfer> all = transfers(pools, tokens, batch, ranges, false);
    for (Transfer& each : all) {
        const auto* pool = static_cast<const std::byte*>(each.pool.data());
        auto* destination = static_cast<std::byte*>(each.tokens.mutable_data());
        const TokenRows<std::byte> rows{destination, each.tokens.strides(0),
                                        each.tokens.strides(1)};
        const TokenShape shape = each.shape();
        const PagedRows<const std::byte> paged = each.rows(pool);
        const PageTable pages = batch.table();
        const py::gil_scoped_release unlocked;
        kvcore::gather_batch(shape, paged, pages, ranges, rows, workers);
    }
}

}  // namespace

void bind_paged_batch(py::module_& module) {
    module.def("append_tokens", &append_tokens, py::arg("pools"), py::arg("table"),
               py::arg("lengths"), py::arg("offsets"), py::arg("tokens"), py::arg("threads"));
    module.def("gather_tokens", &gather_tokens, py::arg("pools"), py::arg("table"),
               py::arg("offsets"), py::arg("tokens"), py::arg("threads"));
}
