// SPDX-License-Identifier: Apache-2.0
// Checks that arrays that are written share no memory.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/errors.hpp"

namespace kvcore::python {

/// The memory from the first to the last byte of an array.
struct Extent {
    explicit Extent(const pybind11::array& array) {
        low = high = reinterpret_cast<std::intptr_t>(array.data());
        if (array.size() == 0) return;
        for (pybind11::ssize_t axis = 0; axis < array.ndim(); ++axis) {
            const auto reach = (array.shape(axis) - 1) * array.strides(axis);
            (reach < 0 ? low : high) += reach;
        }
        high += array.itemsize();
    }
    [[nodiscard]] bool overlaps(const Extent& other) const noexcept {
        return low < other.high && other.low < high && low < high && other.low < other.high;
    }

    std::intptr_t low;
    std::intptr_t high;
};

/// Returns true if the memory from first to last byte of two arrays overlaps.
[[nodiscard]] inline bool is_overlapping(const pybind11::array& a, const pybind11::array& b) {
    return Extent(a).overlaps(Extent(b));
}

/// Returns true if two arrays have a byte in common. numpy computes the answer. It is exact except
/// for unusual strides, for which the function returns true.
[[nodiscard]] inline bool is_sharing(const pybind11::array& a, const pybind11::array& b) {
    namespace py = pybind11;
    if (!is_overlapping(a, b)) return false;
    constexpr int kMostWork = 100'000;
    const py::object sharing = py::module_::import("numpy").attr("may_share_memory");
    return sharing(a, b, py::arg("max_work") = kMostWork).cast<bool>();
}

/// Lengths and absolute strides of the axes with more than one element.
using Steps = std::vector<std::pair<std::int64_t, std::int64_t>>;  // (stride, length)

[[nodiscard]] inline Steps steps_of(const pybind11::array& array) {
    Steps steps;
    for (pybind11::ssize_t axis = 0; axis < array.ndim(); ++axis) {
        if (array.shape(axis) > 1) {
            steps.emplace_back(std::abs(array.strides(axis)), array.shape(axis));
        }
    }
    return steps;
}

/// Returns true if each axis steps over all bytes of the finer axes: no two elements share memory.
[[nodiscard]] inline bool is_nested(Steps steps, std::int64_t item_size) {
    std::sort(steps.begin(), steps.end());
    std::int64_t reached = item_size;
    for (const auto& [stride, length] : steps) {
        if (stride < reached) return false;
        reached += (length - 1) * stride;
    }
    return true;
}

/// Returns the elements [begin, end) of an array along an axis, with index 0 along the axes before
/// it.
[[nodiscard]] inline pybind11::array slab(const pybind11::array& array, pybind11::ssize_t axis,
                                          pybind11::ssize_t begin, pybind11::ssize_t end) {
    std::vector<pybind11::ssize_t> shape(array.shape(), array.shape() + array.ndim());
    const std::vector<pybind11::ssize_t> strides(array.strides(), array.strides() + array.ndim());
    for (pybind11::ssize_t i = 0; i < axis; ++i) shape[static_cast<std::size_t>(i)] = 1;
    shape[static_cast<std::size_t>(axis)] = end - begin;
    const char* from = static_cast<const char*>(array.data()) + begin * array.strides(axis);
    return pybind11::array(array.dtype(), shape, strides, from, array);
}

/// Returns true if two elements of an array have a byte in common, as in a broadcast array.
[[nodiscard]] inline bool is_self_sharing(const pybind11::array& array) {
    if (array.size() < 2 || is_nested(steps_of(array), array.itemsize())) return false;
    // Two such elements differ first along some axis. The test may assume that the nearer element
    // has index 0 on this axis.
    for (pybind11::ssize_t axis = 0; axis < array.ndim(); ++axis) {
        const pybind11::ssize_t length = array.shape(axis);
        if (length > 1 && is_sharing(slab(array, axis, 0, 1), slab(array, axis, 1, length))) {
            return true;
        }
    }
    return false;
}

/// ValueError if elements of an array that is written share memory.
inline void check_own_memory(const pybind11::array& array, const std::string& name) {
    if (!is_self_sharing(array)) return;
    throw pybind11::value_error(detail::concat(
        name, " has strides ", pybind11::str(array.attr("strides")).cast<std::string>(),
        ", so its elements share memory; pass an array that is not broadcast, or a copy"));
}

/// The strides of all axes and the bytes of an element. If the last axis is contiguous: the strides
/// of the other axes and the bytes of a row.
struct ByteRows {
    explicit ByteRows(const pybind11::array& array) : bytes(array.itemsize()), rank(array.ndim()) {
        const pybind11::ssize_t last = rank - 1;
        if (rank == 0 || (array.shape(last) > 1 && array.strides(last) != bytes)) return;
        bytes *= array.shape(last);
        rank = last;
    }

    std::int64_t bytes;
    pybind11::ssize_t rank;
};

/// Returns true if each of two arrays with equal strides fits into the gaps of the other, as K and
/// V of a pool do. The second array begins after the bytes that the finer axes of the first array
/// span, and the coarser axes step over both.
[[nodiscard]] inline bool is_interleaved(const pybind11::array& a, const pybind11::array& b) {
    if (reinterpret_cast<std::intptr_t>(b.data()) < reinterpret_cast<std::intptr_t>(a.data())) {
        return is_interleaved(b, a);
    }
    const ByteRows first(a);
    const ByteRows second(b);
    if (first.rank != second.rank ||
        !std::equal(a.strides(), a.strides() + first.rank, b.strides())) {
        return false;
    }
    Steps steps;
    for (pybind11::ssize_t axis = 0; axis < first.rank; ++axis) {
        const std::int64_t length = std::max(a.shape(axis), b.shape(axis));
        if (a.strides(axis) < 0) return false;
        if (length > 1) steps.emplace_back(a.strides(axis), length);
    }
    std::sort(steps.begin(), steps.end());
    const auto distance =
        reinterpret_cast<std::intptr_t>(b.data()) - reinterpret_cast<std::intptr_t>(a.data());
    std::int64_t inner = 0;  // bytes that the finer axes span beyond a row
    for (auto at = steps.begin();; ++at) {
        const bool is_behind = distance >= first.bytes + inner;
        if (is_behind && is_nested({at, steps.end()}, distance + second.bytes + inner)) return true;
        if (at == steps.end()) return false;
        if (at->first < std::max(first.bytes, second.bytes) + inner) return false;
        inner += (at->second - 1) * at->first;
    }
}

/// ValueError if `written`, an array that the call writes to, shares memory with `other`.
inline void check_no_common_memory(const pybind11::array& written, const std::string& name,
                                   const pybind11::array& other, const std::string& other_name) {
    if (!is_overlapping(written, other) || is_interleaved(written, other)) return;
    if (!is_sharing(written, other)) return;
    throw pybind11::value_error(
        detail::concat(name, " and ", other_name, " share memory; pass separate arrays"));
}

}  // namespace kvcore::python
