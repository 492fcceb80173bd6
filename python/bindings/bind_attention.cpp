// SPDX-License-Identifier: Apache-2.0
#include "kvcore/attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "array_args.hpp"
#include "batch_args.hpp"
#include "bindings.hpp"
#include "nvfp4_args.hpp"
#include "pool_args.hpp"
#include "shared_args.hpp"
#include "state_args.hpp"

namespace py = pybind11;
using kvcore::AttentionInput;
using kvcore::AttentionOutput;
using kvcore::AttentionRule;
using kvcore::PageTable;
using kvcore::PoolView;
using kvcore::python::BatchArgs;
using kvcore::python::check_aligned;
using kvcore::python::check_own_memory;
using kvcore::python::check_rank;
using kvcore::python::check_wide;
using kvcore::python::coded_tensor;
using kvcore::python::concat;
using kvcore::python::flag_arg;
using kvcore::python::head_vectors;
using kvcore::python::host_global_scale;
using kvcore::python::integer_arg;
using kvcore::python::is_overlapping;
using kvcore::python::MergeArgs;
using kvcore::python::paged_tensor;
using kvcore::python::scale_view;
using kvcore::python::shape_text;
using kvcore::python::SharedArgs;
using kvcore::python::text;
using kvcore::python::threads_of;

namespace {

// Every position is below this bound: a position is the sum of two counts of 32 bits.
constexpr std::int64_t kFarthest = std::int64_t{1} << 33;

/// (keys, values, rope, key_scales, value_scales): arrays; all but the keys may be None. Without
/// values, the values are the first elements of the keys. With `globals`, a pair, the pools are in
/// nvfp4.
struct PoolArgs {
    PoolArgs(const py::tuple& given, const py::object& globals, const py::object& v_head_dim)
        : keys(given[0].cast<py::array>()) {
        if (!globals.is_none()) {
            take_nvfp4(given, globals.cast<py::tuple>());
        } else {
            take(given);
        }
        if (!v_head_dim.is_none()) narrow_values(integer_arg(v_head_dim, "v_head_dim"));
    }

    void take(const py::tuple& given) {
        view.k = paged_tensor(keys, "the pool of keys");
        view.pages = keys.shape(0);
        view.page_size = keys.shape(1);
        view.heads = keys.shape(2);
        if (!given[3].is_none()) {
            view.k.scales = scale_view(given[3].cast<py::array>(), "key_scales", keys);
        }
        view.v = view.k;
        if (!given[1].is_none()) {
            const auto values = part(given[1], "the pool of values");
            view.v = paged_tensor(values, "the pool of values");
            if (!given[4].is_none()) {
                view.v.scales = scale_view(given[4].cast<py::array>(), "value_scales", values);
            }
        }
        if (!given[2].is_none()) {
            view.rope = paged_tensor(part(given[2], "the pool of rope"), "the pool of rope");
        }
    }

    void take_nvfp4(const py::tuple& given, const py::tuple& globals) {
        const auto values = part(given[1], "the pool of values");
        view.k = coded_tensor(keys, given[3].cast<py::array>());
        view.v = coded_tensor(values, given[4].cast<py::array>());
        view.pages = keys.shape(0);
        view.page_size = keys.shape(1);
        view.heads = keys.shape(2);
        nvfp4 = {true, host_global_scale(globals[0]).value, host_global_scale(globals[1]).value};
    }

    [[nodiscard]] py::array part(const py::handle& given, const char* name) const {
        auto array = given.cast<py::array>();
        if (array.ndim() == 4 && std::equal(array.shape(), array.shape() + 3, keys.shape())) {
            return array;
        }
        throw py::value_error(concat(name, " has shape ", shape_text(array), ", keys have ",
                                     shape_text(keys), "; all axes but the last must agree"));
    }
    void narrow_values(std::int64_t dim) {
        const std::int64_t group = view.v.scales.data == nullptr ? 1 : view.v.scales.group;
        if (dim < 1 || dim > view.v.dim || dim % group != 0) {
            throw py::value_error(
                concat("v_head_dim is ", dim, ", must be 1 to ", view.v.dim,
                       ", the elements of a value", group > 1 ? " and a multiple of " : "",
                       group > 1 ? concat(group, ", the elements of a scale") : ""));
        }
        view.v.dim = dim;
    }

    py::array keys;
    PoolView<const std::byte> view;
    kvcore::Nvfp4Globals nvfp4;
};

/// (lookup_table, cache_lengths, row_offsets), checked against each other and the pool.
struct StepArgs {
    explicit StepArgs(const py::tuple& given)
        : table(given[0].cast<py::array>()),
          lengths(given[1].cast<py::array>()),
          offsets(given[2].cast<py::array>()),
          batch(table, offsets),
          cached(batch.cached(lengths)) {}

    // Returns the first token of each row that a query reads: no query of row b reads tokens [0,
    // first[b]). For a row without queries, first[b] is its number of cached tokens.
    [[nodiscard]] std::vector<std::uint32_t> first_seen(const AttentionRule& rule) const {
        std::vector<std::uint32_t> first(cached, cached + table.shape(0));
        const std::uint32_t* ends = batch.offsets_data();
        for (std::size_t row = 0; row < first.size(); ++row) {
            if (ends[row + 1] == ends[row]) continue;
            first[row] = static_cast<std::uint32_t>(kvcore::first_seen(rule, first[row]));
        }
        return first;
    }
    void check_pages(const std::vector<std::uint32_t>& first, const py::array& pool) const {
        batch.check_cached_pages(first, cached, pool);
        batch.check_pages(batch.ranges(cached), pool);
    }

    py::array table;
    py::array lengths;
    py::array offsets;
    BatchArgs batch;
    const std::uint32_t* cached;
};

/// The arguments (scale, causal, window, chunk, soft_cap, sinks), None by default except `causal`.
struct RuleArgs {
    RuleArgs(const py::tuple& given, std::int64_t head_dim, std::int64_t heads) {
        rule.scale = given[0].is_none()
                         ? static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)))
                         : finite(given[0], "scale");
        rule.is_causal = flag_arg(given[1], "causal");
        if (!given[2].is_none()) rule.window = tokens(given[2], "window");
        if (!given[3].is_none()) rule.chunk = tokens(given[3], "chunk");
        if (!given[4].is_none()) {
            rule.soft_cap = finite(given[4], "soft_cap");
            if (!(rule.soft_cap > 0)) {
                throw py::value_error(
                    concat("soft_cap is ", text(given[4]), ", must be above 0; None for no cap"));
            }
        }
        if (!given[5].is_none()) take_sinks(given[5].cast<py::array>(), heads);
    }

    static std::int64_t tokens(const py::handle& given, const char* name) {
        const std::int64_t n = integer_arg(given, name);
        if (n >= 1) return std::min(n, kFarthest);
        throw py::value_error(concat(name, " is ", n, ", must be at least 1: the token itself; ",
                                     "None for no ", name));
    }

    static float finite(const py::handle& given, const char* name) {
        if (PyBool_Check(given.ptr()) || PyNumber_Check(given.ptr()) == 0) {
            throw py::type_error(
                concat(name, " must be real number, not ", Py_TYPE(given.ptr())->tp_name));
        }
        double value = PyFloat_AsDouble(given.ptr());
        if (value == -1.0 && PyErr_Occurred() != nullptr) {
            if (PyErr_ExceptionMatches(PyExc_OverflowError) == 0) throw py::error_already_set();
            PyErr_Clear();
            value = std::numeric_limits<double>::infinity();
        }
        if (std::isfinite(static_cast<float>(value))) return static_cast<float>(value);
        throw py::value_error(concat(name, " is ", text(given), ", must be finite in float32"));
    }
    void take_sinks(const py::array& given, std::int64_t heads) {
        check_rank(given, "sinks", "(q_heads,)", 1);
        check_wide(given, "sinks");
        if (given.shape(0) != heads) {
            throw py::value_error(concat("sinks has ", given.shape(0), " entries, must have ",
                                         heads, ": one for each head of q"));
        }
        const py::array_t<float> floats(given.attr("astype")("float32"));
        for (py::ssize_t head = 0; head < heads; ++head) {
            sinks.push_back(floats.at(head));
            if (sinks.back() < std::numeric_limits<float>::infinity()) continue;
            throw py::value_error(
                concat("sinks[", head, "] is ", sinks.back(), ", must be below infinity"));
        }
        rule.sinks = sinks.data();
    }

    AttentionRule rule;
    std::vector<float> sinks;
};

void check_queries(const py::array& q, const PoolView<const std::byte>& pool, std::int64_t total) {
    check_rank(q, "q", "(tokens, q_heads, head_dim)", 3);
    if (q.shape(0) != total) {
        throw py::value_error(concat("q has ", q.shape(0), " tokens, row_offsets ends at ", total));
    }
    if (q.shape(1) < 1 || q.shape(1) % pool.heads != 0) {
        throw py::value_error(concat("q has ", q.shape(1), " heads, must have a multiple of the ",
                                     pool.heads, " heads of the pool"));
    }
    if (q.shape(2) != pool.k.dim + pool.rope.dim) {
        throw py::value_error(
            concat("q has a head_dim of ", q.shape(2), ", keys have ", pool.k.dim + pool.rope.dim));
    }
}

/// Returns the array for results: the caller's array, or a new array.
py::array results(const py::object& out, const py::array& q, std::int64_t dim,
                  const std::vector<py::array>& read) {
    const std::vector<py::ssize_t> shape{q.shape(0), q.shape(1), dim};
    if (out.is_none()) return py::array(q.dtype(), shape);
    auto array = out.cast<py::array>();
    if (array.ndim() != 3 || !std::equal(shape.begin(), shape.end(), array.shape())) {
        throw py::value_error(concat("out has shape ", shape_text(array), ", must be (", shape[0],
                                     ", ", shape[1], ", ", shape[2], ")"));
    }
    if (!array.dtype().equal(q.dtype())) {
        throw py::type_error(concat("out has dtype ", text(array.dtype()), ", must be that of q, ",
                                    text(q.dtype())));
    }
    if (!array.writeable()) throw py::value_error("out is read-only; pass a writable array");
    check_own_memory(array, "out");
    for (const py::array& other : read) {
        if (!is_overlapping(array, other)) continue;
        throw py::value_error("out overlaps what is read in memory; pass a separate array");
    }
    return array;
}

/// Returns the array for logarithms: the caller's array, or a new array.
py::array sums_of(const py::object& given, const py::array& q, const py::array& values,
                  const std::vector<py::array>& read) {
    if (given.is_none()) return py::array_t<float>({q.shape(0), q.shape(1)});
    auto array = given.cast<py::array>();
    if (array.ndim() != 2 || !std::equal(array.shape(), array.shape() + 2, q.shape())) {
        throw py::value_error(concat("out[1] has shape ", shape_text(array), ", must be (",
                                     q.shape(0), ", ", q.shape(1), "): one for each head of q"));
    }
    if (!py::isinstance<py::array_t<float>>(array)) {
        throw py::type_error(concat("out[1] has dtype ", text(array.dtype()), ", must be float32"));
    }
    if ((array.flags() & py::array::c_style) == 0) {
        throw py::value_error("out[1] is strided, must be in C order");
    }
    check_aligned(array, "out[1]");
    if (!array.writeable()) {
        throw py::value_error("out[1] is read-only; pass a writable array");
    }
    for (const py::array& other : read) {
        if (!is_overlapping(array, other)) continue;
        throw py::value_error("out[1] overlaps what is read in memory; pass a separate array");
    }
    if (is_overlapping(array, values)) {
        throw py::value_error("out[1] overlaps out[0] in memory; pass a separate array");
    }
    return array;
}

std::vector<py::array> arrays_of(const py::tuple& given) {
    std::vector<py::array> found;
    for (const py::handle item : given) {
        if (!item.is_none()) found.push_back(item.cast<py::array>());
    }
    return found;
}

py::tuple attention(const py::tuple& pools, const py::object& globals, const py::object& v_head_dim,
                    const py::tuple& step, const py::array& q, const py::tuple& rule,
                    const py::tuple& shared, const py::object& out, const py::object& out_lse,
                    const py::object& return_lse, const py::object& threads) {
    const int workers = threads_of(threads);
    const bool has_lse = flag_arg(return_lse, "return_lse");
    const PoolArgs pool(pools, globals, v_head_dim);
    const StepArgs batch(step);
    const PageTable table = batch.batch.table();
    check_queries(q, pool.view, batch.batch.total());
    const auto queries = head_vectors<const std::byte>(q, "q");
    const RuleArgs rules(rule, q.shape(2), q.shape(1));
    const std::vector<std::uint32_t> first = batch.first_seen(rules.rule);
    batch.check_pages(first, pool.keys);
    const SharedArgs groups(shared[0], integer_arg(shared[1], "replica"), table, first,
                            batch.cached, pool.view.page_size);
    std::vector<py::array> read = arrays_of(pools);
    read.insert(read.end(), {batch.table, batch.lengths, batch.offsets, q});
    const py::array values = results(out, q, pool.view.v.dim, read);
    py::object lse = py::none();
    float* sums = nullptr;
    if (has_lse) {
        py::array target = sums_of(out_lse, q, values, read);
        sums = static_cast<float*>(target.mutable_data());
        lse = std::move(target);
    }
    const AttentionInput input{pool.view, table,      batch.cached,  batch.batch.offsets_data(),
                               queries,   rules.rule, groups.data(), groups.size(),
                               pool.nvfp4};
    const AttentionOutput output{head_vectors<std::byte>(values, "out"), sums};
    {
        const py::gil_scoped_release unlocked;
        const std::int64_t bytes = kvcore::attention_workspace_bytes(input, workers);
        // Not zeroed, unlike a vector. After the first calls malloc reuses this memory, so a step
        // waits for no fresh pages and kvcore keeps no scratch.
        const std::unique_ptr<std::byte[]> scratch(new std::byte[static_cast<std::size_t>(bytes)]);
        kvcore::attention(input, output, scratch.get(), workers);
    }
    return py::make_tuple(values, lse);
}

void merge_states(const py::array& o_a, const py::array& lse_a, const py::array& o_b,
                  const py::array& lse_b, const py::array& out, const py::array& out_lse,
                  const py::object& threads) {
    const int workers = threads_of(threads);
    const MergeArgs args(o_a, lse_a, o_b, lse_b, out, out_lse);
    const py::gil_scoped_release unlocked;
    kvcore::merge_states(args.n, args.dim, args.dtype, args.a, args.b, args.values, args.lse,
                         workers);
}

}  // namespace

void bind_attention(py::module_& module) {
    module.def("attention", &attention, py::arg("pools"), py::arg("global_scales"),
               py::arg("v_head_dim"), py::arg("step"), py::arg("q"), py::arg("rule"),
               py::arg("shared"), py::arg("out"), py::arg("out_lse"), py::arg("return_lse"),
               py::arg("threads"));
    module.def("merge_states", &merge_states, py::arg("o_a"), py::arg("lse_a"), py::arg("o_b"),
               py::arg("lse_b"), py::arg("out"), py::arg("out_lse"), py::arg("threads"));
}
