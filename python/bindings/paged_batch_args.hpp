// SPDX-License-Identifier: Apache-2.0
// Checks the pools and tokens of a call that moves tokens between them.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "array_args.hpp"
#include "kvcore/paged_batch.hpp"
#include "pool_args.hpp"

namespace kvcore::python {

/// The part of a call for a pool, without Python objects. Tokens of the pool's dtype move as bytes.
struct Move {
    bool is_copy = false;
    TokenShape row{};
    PageShape shape{};
    PagedTensor<std::byte> pool;
    TokenRows<std::byte> tokens{};
    DType wide = DType::kFloat32;
    Scales scales = Scales::kGiven;
    bool has_scale = false;  // a scale for all codes of a pool without scales
    float scale = 1.0F;

    /// The tokens as a source, the pool as bytes and as a source.
    [[nodiscard]] TokenRows<const std::byte> source() const {
        return {tokens.data, tokens.token_stride, tokens.head_stride};
    }
    template <class Byte>
    [[nodiscard]] PagedRows<Byte> rows() const {
        return {pool.data,        pool.page_stride, pool.token_stride,
                pool.head_stride, shape.page_size,  nullptr};
    }
    [[nodiscard]] PagedTensor<const std::byte> readable_pool() const {
        const ScaleView<std::byte>& with = pool.scales;
        return {pool.data,
                pool.dtype,
                pool.dim,
                pool.page_stride,
                pool.token_stride,
                pool.head_stride,
                {with.data, with.page_stride, with.token_stride, with.head_stride, with.group}};
    }
};

[[nodiscard]] inline std::byte* data_of(const pybind11::array& array) {
    return static_cast<std::byte*>(const_cast<void*>(array.data()));
}

/// A pool [pages, page_size, heads, dim], its scales and tokens [total, heads, dim]. The scales are
/// [pages, page_size, heads, groups], or [heads], or None.
struct TokenTransfer {
    std::string name;  // of the tokens
    pybind11::array pool;
    pybind11::object scales;
    pybind11::object factors;
    pybind11::array tokens;

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
        check_written(writes_pool ? pool : tokens, writes_pool ? "the pool" : name);
        check_apart(pool, "the pool");
        return move;
    }

   private:
    static void check_written(const pybind11::array& array, const std::string& what) {
        if (!array.writeable()) {
            throw pybind11::value_error(concat(what, " is read-only; pass a writable array"));
        }
        check_own_memory(array, what);
    }
    void check_apart(const pybind11::array& array, const char* what) const {
        if (!is_overlapping(array, tokens)) return;
        throw pybind11::value_error(concat(name, " and ", what, " overlap in memory; pass a copy"));
    }

    void check_shapes(std::int64_t total) const {
        check_rank(pool, "pool", "(pages, page_size, heads, dim)", 4);
        kvcore::python::check_numbers(pool, "the pool");
        check_rank(tokens, name.c_str(), "(tokens, heads, dim)", 3);
        const bool fits = tokens.shape(0) == total && tokens.shape(1) == pool.shape(2) &&
                          tokens.shape(2) == pool.shape(3);
        if (!fits) {
            throw pybind11::value_error(concat(name, " has shape ", shape_text(tokens),
                                               ", must be (", total, ", ", pool.shape(2), ", ",
                                               pool.shape(3), ")"));
        }
        if (pool.shape(1) < 1) throw pybind11::value_error("the pool's pages have no tokens");
        if (!has_dense_rows(pool) || !has_dense_rows(tokens)) {
            throw pybind11::value_error(
                concat("the last axis of the pool and of ", name, " must be contiguous"));
        }
    }

    void add_conversion(Move& move, bool writes_pool) const {
        const auto source = paged_tensor(pool, "the pool");
        move.pool.dtype = source.dtype;
        move.wide = dtype_of(tokens, name.c_str());
        const bool fits = is_wide(move.wide);
        if (!fits) {
            throw pybind11::type_error(concat(
                name, " has dtype ", text(tokens.dtype()), ", the pool has ", text(pool.dtype()),
                scales.is_none() ? "" : " with scales", "; convert them first"));
        }
        if (!factors.is_none()) {
            add_factors(move);
        } else if (!scales.is_none()) {
            add_scales(move, pybind11::cast<pybind11::array>(scales), writes_pool);
        }
    }

    // Takes a scale for each head, for all tokens; or a single scale, as a number.
    void add_factors(Move& move) const {
        if (pybind11::isinstance<pybind11::float_>(factors)) {
            move.has_scale = true;
            move.scale = factors.cast<float>();
            return;
        }
        const auto given = pybind11::cast<pybind11::array>(factors);
        const bool fits = dtype_of(given, "scale") == DType::kFloat32 && given.ndim() == 1 &&
                          given.shape(0) == pool.shape(2) && !is_wide(move.pool.dtype);
        if (!fits || !scales.is_none()) {
            throw pybind11::value_error(concat("scale has shape ", shape_text(given), " and dtype ",
                                               text(given.dtype()), " for a pool of ",
                                               pool.shape(2),
                                               " heads, must be float32, one for each head, of a "
                                               "float8 or int8 pool without scales"));
        }
        move.pool.scales = {data_of(given), 0, 0, given.strides(0), pool.shape(3)};
    }

    void add_scales(Move& move, const pybind11::array& given, bool writes_pool) const {
        const auto view = scale_view(given, "scales", pool);
        move.pool.scales = {data_of(given), view.page_stride, view.token_stride, view.head_stride,
                            view.group};
        move.scales = Scales::kFound;
        if (writes_pool) check_written(given, "the array of scales");
        check_apart(given, "the scales");
    }
};

/// The transfers of a call. The arrays that they write share no memory with each other, nor with
/// the numbers that select pages and tokens.
class TransferArgs {
   public:
    explicit TransferArgs(bool writes_pool) : writes_pool_(writes_pool) {}

    /// Takes (name, pool, scales, factors, tokens) as arrays.
    const TokenTransfer& add(const pybind11::tuple& parts) {
        using pybind11::array;
        all_.push_back({parts[0].cast<std::string>(), parts[1].cast<array>(), parts[2], parts[3],
                        parts[4].cast<array>()});
        const TokenTransfer& added = all_.back();
        const bool has_scales = !added.scales.is_none();
        take(writes_pool_ ? added.pool : added.tokens, writes_pool_ ? "a pool" : added.name);
        if (writes_pool_ && has_scales) take(added.scales.cast<array>(), "an array of scales");
        return added;
    }
    /// ValueError if an array that is written overlaps numbers that are read.
    void check_numbers(const pybind11::array& numbers, const char* name) const {
        for (const auto& [array, what] : written_) {
            check_no_common_memory(array, what, numbers, name);
        }
    }

   private:
    void take(const pybind11::array& array, const std::string& name) {
        for (const auto& [other, what] : written_) {
            check_no_common_memory(array, name, other, concat("another, ", what));
        }
        written_.emplace_back(array, name);
    }

    bool writes_pool_;
    std::vector<TokenTransfer> all_;
    std::vector<std::pair<pybind11::array, std::string>> written_;
};

}  // namespace kvcore::python
