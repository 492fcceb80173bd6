// SPDX-License-Identifier: Apache-2.0
// Checks pools whose pages are copied whole, and the page ids of a call.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "array_args.hpp"
#include "kvcore/page_bytes.hpp"
#include "page_ids.hpp"

namespace kvcore::python {

/// Checks a pool: its first axis is the page, and each page is one run of bytes.
[[nodiscard]] inline PageBytes<const std::byte> pages_of(const pybind11::array& pool) {
    if (pool.ndim() < 1)
        throw pybind11::value_error("the pool has no axes, its first axis must be the page");
    check_numbers(pool, "the pool");
    pybind11::ssize_t bytes = pool.itemsize();
    for (pybind11::ssize_t axis = pool.ndim() - 1; axis > 0; --axis) {
        if (pool.shape(axis) > 1 && pool.strides(axis) != bytes) {
            throw pybind11::value_error(
                concat("the pool's axis ", axis, " is strided; a page must be one run of bytes"));
        }
        bytes *= pool.shape(axis);
    }
    return {static_cast<const std::byte*>(pool.data()), pool.strides(0), bytes};
}

[[nodiscard]] inline PageBytes<std::byte> writable_pages_of(pybind11::array& pool) {
    const PageBytes<const std::byte> pages = pages_of(pool);
    if (!pool.writeable()) {
        throw pybind11::value_error("the pool is read-only; pass a writable array");
    }
    check_own_memory(pool, "the pool");
    return {static_cast<std::byte*>(pool.mutable_data()), pages.page_stride, pages.page_bytes};
}

/// Checks the pools of a call that writes pages, each pool and all pools together.
[[nodiscard]] inline std::vector<PageBytes<std::byte>> writable_pages_of(
    std::vector<pybind11::array>& pools) {
    std::vector<PageBytes<std::byte>> all;
    for (std::size_t i = 0; i < pools.size(); ++i) {
        all.push_back(writable_pages_of(pools[i]));
        for (std::size_t before = 0; before < i; ++before) {
            check_no_common_memory(pools[i], "the pool of V", pools[before], "the pool of K");
        }
    }
    return all;
}

/// The arrays of a list.
[[nodiscard]] inline std::vector<pybind11::array> arrays_in(const pybind11::list& given) {
    std::vector<pybind11::array> arrays;
    for (const pybind11::handle each : given) arrays.push_back(each.cast<pybind11::array>());
    return arrays;
}

/// Checks page ids. ValueError for another rank, IndexError for a page outside the pool.
inline void check_ids(const Ids& ids, const pybind11::array& pool) {
    check_rank(ids, "ids", "(n,)", 1);
    for (pybind11::ssize_t i = 0; i < ids.size(); ++i) check_page(ids.data()[i], pool.shape(0));
}

/// Returns integers [n, 2] as copies that may run in any order; ValueError if the order matters.
[[nodiscard]] inline std::vector<PagePair> page_pairs(const Ids& pairs,
                                                      const pybind11::array& pool) {
    check_rank(pairs, "pairs", "(n, 2)", 2);
    if (pairs.shape(1) != 2) throw pybind11::value_error("pairs must have two columns");
    PageUses uses(pool.shape(0));
    std::vector<PagePair> all;
    for (pybind11::ssize_t i = 0; i < pairs.shape(0); ++i) {
        const PagePair pair{pairs.at(i, 0), pairs.at(i, 1)};
        check_page(pair.source, pool.shape(0));
        check_page(pair.destination, pool.shape(0));
        uses.read(pair.source);
        uses.write(pair.destination);
        all.push_back(pair);
    }
    uses.check_apart();
    return all;
}

}  // namespace kvcore::python
