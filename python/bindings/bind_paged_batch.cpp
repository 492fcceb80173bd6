// SPDX-License-Identifier: Apache-2.0
#include "kvcore/paged_batch.hpp"

#include <string>
#include <vector>

#include "array_args.hpp"
#include "batch_args.hpp"
#include "bindings.hpp"
#include "pool_args.hpp"

namespace py = pybind11;
using kvcore::DType;
using kvcore::PagedRows;
using kvcore::PagedTensor;
using kvcore::PageShape;
using kvcore::PageTable;
using kvcore::ScaleView;
using kvcore::TokenRanges;
using kvcore::TokenRows;
using kvcore::TokenShape;
using kvcore::python::BatchArgs;
using kvcore::python::check_rank;
using kvcore::python::concat;
using kvcore::python::dtype_of;
using kvcore::python::has_dense_rows;
using kvcore::python::is_overlapping;
using kvcore::python::shape_text;
using kvcore::python::text;
using kvcore::python::threads_of;

namespace {

/// One pool's part of a call, without Python in it. Tokens of the pool's dtype move as bytes.
struct Move {
    bool is_copy = false;
    TokenShape row{};
    PageShape shape{};
    PagedTensor<std::byte> pool;
    TokenRows<std::byte> tokens{};
    DType wide = DType::kFloat32;
    kvcore::Scales scales = kvcore::Scales::kGiven;

    void append(const PageTable& table, const TokenRanges& ranges, int threads) const {
        const TokenRows<const std::byte> source{tokens.data, tokens.token_stride,
                                                tokens.head_stride};
        if (is_copy) {
            kvcore::append_batch(row, rows(pool.data), table, ranges, source, threads);
        } else {
            kvcore::append_batch(shape, pool, table, ranges, source, wide, scales, threads);
        }
    }
    void gather(const PageTable& table, const TokenRanges& ranges, int threads) const {
        if (is_copy) {
            kvcore::gather_batch(row, rows<const std::byte>(pool.data), table, ranges, tokens,
                                 threads);
            return;
        }
        const ScaleView<std::byte>& with = pool.scales;
        const PagedTensor<const std::byte> source{
            pool.data,
            pool.dtype,
            pool.dim,
            pool.page_stride,
            pool.token_stride,
            pool.head_stride,
            {with.data, with.page_stride, with.token_stride, with.head_stride, with.group}};
        kvcore::gather_batch(shape, source, table, ranges, tokens, wide, threads);
    }

   private:
    template <class Byte>
    [[nodiscard]] PagedRows<Byte> rows(Byte* data) const {
        return {data,   pool.page_stride, pool.token_stride, pool.head_stride, shape.page_size,
                nullptr};
    }
};

std::byte* data_of(const py::array& array) {
    return static_cast<std::byte*>(const_cast<void*>(array.data()));
}

/// A pool [pages, page_size, heads, dim], its scales [pages, page_size, heads, groups], or those of
/// its heads [heads], or none, and tokens [total, heads, dim].
struct Transfer {
    std::string name;  // of the tokens
    py::array pool;
    py::object scales;
    py::object factors;
    py::array tokens;

    [[nodiscard]] Move checked(std::int64_t total, bool writes_pool) const {
        check_shapes(total);
        Move move;
        move.row = {pool.shape(2), pool.shape(3) * pool.itemsize()};
        move.shape = {pool.shape(1), pool.shape(2)};
        move.pool.data = data_of(pool);
        move.pool.dim = pool.shape(3);
        move.pool.page_stride = pool.strides(0);
        move.pool.token_stride = pool.strides(1);
        move.pool.head_stride = pool.strides(2);
        move.tokens = {data_of(tokens), tokens.strides(0), tokens.strides(1)};
        const bool is_same = tokens.dtype().is(pool.dtype()) || tokens.dtype().equal(pool.dtype());
        move.is_copy = is_same && scales.is_none() && factors.is_none();
        if (!move.is_copy) add_conversion(move, writes_pool);
        check_writable(writes_pool ? pool : tokens, writes_pool ? "the pool" : name);
        check_apart(pool, "the pool");
        return move;
    }

   private:
    static void check_writable(const py::array& array, const std::string& what) {
        if (!array.writeable()) throw py::value_error(concat(what, " is read-only"));
    }
    void check_apart(const py::array& array, const char* what) const {
        if (!is_overlapping(array, tokens)) return;
        throw py::value_error(concat(name, " and ", what, " overlap in memory; pass a copy"));
    }

    void check_shapes(std::int64_t total) const {
        check_rank(pool, "pool", "(pages, page_size, heads, dim)", 4);
        check_rank(tokens, name.c_str(), "(tokens, heads, dim)", 3);
        const bool fits = tokens.shape(0) == total && tokens.shape(1) == pool.shape(2) &&
                          tokens.shape(2) == pool.shape(3);
        if (!fits) {
            throw py::value_error(concat(name, " has shape ", shape_text(tokens), ", must be (",
                                         total, ", ", pool.shape(2), ", ", pool.shape(3), ")"));
        }
        if (pool.shape(1) < 1) throw py::value_error("the pool's pages have no tokens");
        if (!has_dense_rows(pool) || !has_dense_rows(tokens)) {
            throw py::value_error(
                concat("the last axis of the pool and of ", name, " must be contiguous"));
        }
    }

    void add_conversion(Move& move, bool writes_pool) const {
        const auto source = kvcore::python::paged_tensor(pool, "the pool");
        move.pool.dtype = source.dtype;
        move.wide = dtype_of(tokens, name.c_str());
        const bool fits = is_wide(move.wide);
        if (!fits) {
            throw py::type_error(concat(
                name, " has dtype ", text(tokens.dtype()), ", the pool has ", text(pool.dtype()),
                scales.is_none() ? "" : " with scales", "; convert them first"));
        }
        if (!factors.is_none()) {
            add_factors(move, py::cast<py::array>(factors));
        } else if (!scales.is_none()) {
            add_scales(move, py::cast<py::array>(scales), writes_pool);
        }
    }

    // One scale for each head, for all tokens.
    void add_factors(Move& move, const py::array& given) const {
        const bool fits = dtype_of(given, "scale") == DType::kFloat32 && given.ndim() == 1 &&
                          given.shape(0) == pool.shape(2) && !is_wide(move.pool.dtype);
        if (!fits || !scales.is_none()) {
            throw py::value_error(concat("scale has shape ", shape_text(given), " and dtype ",
                                         text(given.dtype()), " for a pool of ", pool.shape(2),
                                         " heads, must be float32, one for each head, of a "
                                         "float8 or int8 pool without scales"));
        }
        move.pool.scales = {data_of(given), 0, 0, given.strides(0), pool.shape(3)};
    }

    void add_scales(Move& move, const py::array& given, bool writes_pool) const {
        const auto view = kvcore::python::scale_view(given, "scales", pool);
        move.pool.scales = {data_of(given), view.page_stride, view.token_stride, view.head_stride,
                            view.group};
        move.scales = kvcore::Scales::kFound;
        if (writes_pool) check_writable(given, "the array of scales");
        check_apart(given, "the scales");
    }
};

/// Everything is checked before anything moves.
std::vector<Move> moves_of(const py::list& transfers, const BatchArgs& batch,
                           const TokenRanges& ranges, bool writes_pool) {
    std::vector<Move> moves;
    for (const py::handle each : transfers) {
        const auto parts = each.cast<py::tuple>();
        const Transfer transfer{parts[0].cast<std::string>(), parts[1].cast<py::array>(), parts[2],
                                parts[3], parts[4].cast<py::array>()};
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
    for (const Move& move : moves) move.append(pages, ranges, workers);
}

void gather_tokens(const py::list& transfers, const py::array& table, const py::array& offsets,
                   int threads) {
    const BatchArgs batch(table, offsets);
    const TokenRanges ranges = batch.ranges(nullptr);
    const int workers = threads_of(threads);
    const std::vector<Move> moves = moves_of(transfers, batch, ranges, false);
    const PageTable pages = batch.table();
    const py::gil_scoped_release unlocked;
    for (const Move& move : moves) move.gather(pages, ranges, workers);
}

}  // namespace

void bind_paged_batch(py::module_& module) {
    module.def("append_tokens", &append_tokens, py::arg("transfers"), py::arg("table"),
               py::arg("lengths"), py::arg("offsets"), py::arg("threads"));
    module.def("gather_tokens", &gather_tokens, py::arg("transfers"), py::arg("table"),
               py::arg("offsets"), py::arg("threads"));
}
