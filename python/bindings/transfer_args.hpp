// SPDX-License-Identifier: Apache-2.0
// Checks transfers of pages between caches, and copies of page starts within a cache.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <vector>

#include "array_args.hpp"
#include "cache_args.hpp"
#include "kvcore/page_bytes.hpp"
#include "page_ids.hpp"

namespace kvcore::python {

using Source = CacheArg<const std::byte>;
using Destination = CacheArg<std::byte>;

/// ValueError unless the pages of both caches have the same format and the caches share no byte.
inline void check_alike(const Source& source, const Destination& destination) {
    const Source::Sizes& from = source.sizes();
    const auto& to = destination.sizes();
    const bool fits = from.layers == to.layers && from.page_size == to.page_size &&
                      from.heads == to.heads && source.row_bytes() == destination.row_bytes();
    if (!fits) {
        throw pybind11::value_error(concat(
            "the source has ", from.layers, " layers, pages of ", from.page_size, " tokens, ",
            from.heads, " heads and rows of ", source.row_bytes()[0], " bytes, the destination ",
            to.layers, ", ", to.page_size, ", ", to.heads, " and ", destination.row_bytes()[0],
            "; they must agree, and both or neither must have V"));
    }
    for (const auto& mine : source.tensors()) {
        for (const auto& theirs : destination.tensors()) mine.check_apart(theirs);
    }
}

/// Returns integers [n, 2] as pairs of pages, from a cache of `from` pages to a cache of `to`
/// pages, without the padding.
[[nodiscard]] inline std::vector<PagePair> pairs_of(const Ids& given, std::int64_t from,
                                                    std::int64_t to) {
    check_rank(given, "the pages", "(n, 2)", 2);
    if (given.shape(1) != 2) throw pybind11::value_error("the pages must have two columns");
    PageUses uses(to);
    std::vector<PagePair> pairs;
    for (pybind11::ssize_t i = 0; i < given.shape(0); ++i) {
        const PagePair pair{given.at(i, 0), given.at(i, 1)};
        if (pair.source < 0 || pair.destination < 0) continue;
        check_page(pair.source, from);
        check_page(pair.destination, to);
        uses.write(pair.destination);
        pairs.push_back(pair);
    }
    return pairs;
}

[[nodiscard]] inline std::vector<PageStart> starts_of(const Ids& copies, const Destination& pool) {
    check_rank(copies, "copies", "(n, 3)", 2);
    if (copies.shape(1) != 3) throw pybind11::value_error("copies must have three columns");
    std::vector<PageStart> all;
    for (pybind11::ssize_t i = 0; i < copies.shape(0); ++i) {
        const PageStart copy{copies.at(i, 0), copies.at(i, 1), copies.at(i, 2)};
        check_page(copy.source, pool.sizes().pages);
        check_page(copy.destination, pool.sizes().pages);
        if (copy.tokens < 0 || copy.tokens > pool.sizes().page_size) {
            throw pybind11::value_error(concat("copies[", i, "] is of ", copy.tokens,
                                               " tokens, a page holds ", pool.sizes().page_size));
        }
        if (copy.source == copy.destination) {
            throw pybind11::value_error(
                concat("copies[", i, "] copies page ", copy.source, " to itself; leave it out"));
        }
        all.push_back(copy);
    }
    return all;
}

/// Returns the number of leading copies that may run in any order.
[[nodiscard]] inline std::size_t count_independent(const PageStart* copies, std::size_t n) {
    std::unordered_set<std::int64_t> read;
    std::unordered_set<std::int64_t> written;
    for (std::size_t i = 0; i < n; ++i) {
        const PageStart& copy = copies[i];
        if (written.count(copy.source) != 0 || written.count(copy.destination) != 0 ||
            read.count(copy.destination) != 0) {
            return i;
        }
        read.insert(copy.source);
        written.insert(copy.destination);
    }
    return n;
}

/// IndexError for layers that the caches do not have.
[[nodiscard]] inline LayerRange layer_range(std::int64_t first_layer, std::int64_t num_layers,
                                            std::int64_t layers) {
    if (first_layer < 0 || num_layers < 0 || num_layers > layers ||
        first_layer > layers - num_layers) {
        throw pybind11::index_error(concat("layers ", first_layer, " .. ",
                                           first_layer + num_layers - 1,
                                           " are asked for, the caches have ", layers));
    }
    return {first_layer, num_layers};
}

}  // namespace kvcore::python
