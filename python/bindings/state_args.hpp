// SPDX-License-Identifier: Apache-2.0
// Checks partial results of attention that are merged.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "array_args.hpp"
#include "kvcore/attention.hpp"
#include "pool_args.hpp"

namespace kvcore::python {

/// Results [..., dim] and the logarithms of their sums [...], in C order.
struct StatesArgs {
    StatesArgs(const pybind11::array& values, const char* name, const pybind11::array& lse,
               const char* lse_name)
        : values(values), lse(lse), name(name), dtype(dtype_of(values, name)) {
        check_wide(values, name);
        if (!pybind11::isinstance<pybind11::array_t<float>>(lse)) {
            throw pybind11::type_error(
                concat(lse_name, " has dtype ", text(lse.dtype()), ", must be float32"));
        }
        check_aligned(lse, lse_name);
        const bool fits = values.ndim() == lse.ndim() + 1 &&
                          std::equal(lse.shape(), lse.shape() + lse.ndim(), values.shape());
        if (!fits) {
            throw pybind11::value_error(concat(lse_name, " has shape ", shape_text(lse), " for ",
                                               name, " of shape ", shape_text(values),
                                               ", must be this shape without its last axis"));
        }
        const bool is_dense = (values.flags() & lse.flags() & pybind11::array::c_style) != 0;
        if (is_dense) return;
        throw pybind11::value_error(concat(name, " and ", lse_name, " must be in C order"));
    }
    void check_like(const StatesArgs& first) const {
        const bool fits =
            values.ndim() == first.values.ndim() &&
            std::equal(values.shape(), values.shape() + values.ndim(), first.values.shape());
        if (!fits) {
            throw pybind11::value_error(concat(name, " has shape ", shape_text(values),
                                               ", must be that of ", first.name, ", ",
                                               shape_text(first.values)));
        }
        if (dtype == first.dtype) return;
        throw pybind11::type_error(concat(name, " has dtype ", text(values.dtype()),
                                          ", must be that of ", first.name, ", ",
                                          text(first.values.dtype())));
    }
    [[nodiscard]] AttentionStates states() const {
        return {static_cast<const std::byte*>(values.data()),
                static_cast<const float*>(lse.data())};
    }

    const pybind11::array& values;
    const pybind11::array& lse;
    const char* name;
    DType dtype;
};

/// Returns true if two arrays start at the same address or do not overlap.
[[nodiscard]] inline bool is_same_or_apart(const pybind11::array& a, const pybind11::array& b) {
    return a.data() == b.data() || !is_overlapping(a, b);
}

/// Two partial results and the arrays for the merged result, which may be the first partial result.
struct MergeArgs {
    MergeArgs(const pybind11::array& o_a, const pybind11::array& lse_a, const pybind11::array& o_b,
              const pybind11::array& lse_b, const pybind11::array& out,
              const pybind11::array& out_lse)
        : n(lse_a.size()) {
        const StatesArgs first(o_a, "o_a", lse_a, "lse_a");
        const StatesArgs second(o_b, "o_b", lse_b, "lse_b");
        const StatesArgs target(out, "out[0]", out_lse, "out[1]");
        second.check_like(first);
        target.check_like(first);
        if (!out.writeable() || !out_lse.writeable())
            throw pybind11::value_error("out is read-only; pass writable arrays");
        const bool is_safe = is_same_or_apart(out, o_a) && is_same_or_apart(out_lse, lse_a) &&
                             !is_overlapping(out, o_b) && !is_overlapping(out_lse, lse_b) &&
                             !is_overlapping(out, out_lse) && !is_overlapping(out, lse_a) &&
                             !is_overlapping(out, lse_b) && !is_overlapping(out_lse, o_a) &&
                             !is_overlapping(out_lse, o_b);
        if (!is_safe) {
            throw pybind11::value_error(
                "out overlaps its sources in memory; pass (o_a, lse_a), or separate arrays");
        }
        dim = o_a.shape(o_a.ndim() - 1);
        dtype = first.dtype;
        a = first.states();
        b = second.states();
        values = static_cast<std::byte*>(const_cast<void*>(out.data()));
        lse = static_cast<float*>(const_cast<void*>(out_lse.data()));
    }

    std::int64_t n;
    std::int64_t dim;
    DType dtype;
    AttentionStates a{};
    AttentionStates b{};
    std::byte* values;
    float* lse;
};

}  // namespace kvcore::python
