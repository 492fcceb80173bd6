// SPDX-License-Identifier: Apache-2.0
#include "kvcore/transfer.hpp"

#include <cstdint>
#include <iterator>
#include <unordered_set>
#include <utility>
#include <vector>

#include "array_args.hpp"
#include "bindings.hpp"
#include "cache_args.hpp"
#include "page_ids.hpp"

namespace py = pybind11;
using kvcore::LayerRange;
using kvcore::LayoutName;
using kvcore::PagePair;
using kvcore::PageStart;
using kvcore::python::CacheArg;
using kvcore::python::check_page;
using kvcore::python::check_rank;
using kvcore::python::concat;
using kvcore::python::Ids;
using kvcore::python::PageUses;
using kvcore::python::threads_of;

namespace {

using Source = CacheArg<const std::byte>;
using Destination = CacheArg<std::byte>;

// ---- layouts -----------------------------------------------------------------------------------

constexpr std::pair<const char*, LayoutName> kNames[] = {
    {"max", LayoutName::kMax},
    {"layer_first_nhd", LayoutName::kLayerFirstNhd},
    {"layer_first_nhd_paired", LayoutName::kLayerFirstNhdPaired},
    {"layer_first_hnd", LayoutName::kLayerFirstHnd},
    {"layer_first_hnd_paired", LayoutName::kLayerFirstHndPaired},
    {"page_first", LayoutName::kPageFirst},
    {"page_first_direct", LayoutName::kPageFirstDirect},
    {"page_head", LayoutName::kPageHead},
    {"page_unified", LayoutName::kPageUnified},
};
static_assert(std::size(kNames) == kvcore::kNumLayouts);

py::dict layout_axes() {
    constexpr const char* kAxes[] = {"page", "kv", "layer", "token", "head"};
    py::dict found;
    for (const auto& [name, layout] : kNames) {
        py::list axes;
        for (const kvcore::CacheAxis axis : kvcore::axes_of(layout)) {
            axes.append(kAxes[static_cast<int>(axis)]);
        }
        found[name] = py::tuple(axes);
    }
    return found;
}

// ---- transfer ----------------------------------------------------------------------------------

void check_alike(const Source& source, const Destination& destination) {
    const Source::Sizes& from = source.sizes();
    const auto& to = destination.sizes();
    const bool fits = from.layers == to.layers && from.page_size == to.page_size &&
                      from.heads == to.heads && source.row_bytes() == destination.row_bytes();
    if (!fits) {
        throw py::value_error(concat(
            "the source has ", from.layers, " layers, pages of ", from.page_size, " tokens, ",
            from.heads, " heads and rows of ", source.row_bytes()[0], " bytes, the destination ",
            to.layers, ", ", to.page_size, ", ", to.heads, " and ", destination.row_bytes()[0],
            "; they must agree, and both have V or not"));
    }
    for (const auto& mine : source.tensors()) {
        for (const auto& theirs : destination.tensors()) mine.check_apart(theirs);
    }
}

std::vector<PagePair> pairs_of(const Ids& sources, const Ids& destinations, std::int64_t from,
                               std::int64_t to) {
    check_rank(sources, "source_ids", "(n,)", 1);
    check_rank(destinations, "destination_ids", "(n,)", 1);
    if (sources.size() != destinations.size()) {
        throw py::value_error(concat("source_ids has ", sources.size(),
                                     " entries and destination_ids ", destinations.size(),
                                     ", must be as many"));
    }
    PageUses uses(to);
    std::vector<PagePair> pairs;
    for (py::ssize_t i = 0; i < sources.size(); ++i) {
        const PagePair pair{sources.data()[i], destinations.data()[i]};
        if (pair.source < 0 || pair.destination < 0) continue;
        check_page(pair.source, from);
        check_page(pair.destination, to);
        uses.write(pair.destination);
        pairs.push_back(pair);
    }
    return pairs;
}

void transfer(const py::list& source, bool source_is_packed, const py::list& destination,
              bool destination_is_packed, const Ids& source_ids, const Ids& destination_ids,
              std::int64_t first_layer, std::int64_t num_layers, int threads) {
    const Source from(source, "the source", source_is_packed);
    const Destination to(destination, "the destination", destination_is_packed);
    check_alike(from, to);
    const std::vector<PagePair> pairs =
        pairs_of(source_ids, destination_ids, from.sizes().pages, to.sizes().pages);
    const std::int64_t layers = from.sizes().layers;
    if (first_layer < 0 || num_layers < 0 || num_layers > layers ||
        first_layer > layers - num_layers) {
        throw py::index_error(concat("layers ", first_layer, " .. ", first_layer + num_layers - 1,
                                     " are asked for, the caches have ", layers));
    }
    const int workers = threads_of(threads);
    const auto n = static_cast<std::int64_t>(pairs.size());
    const LayerRange range{first_layer, num_layers};
    const py::gil_scoped_release unlocked;
    if (source_is_packed && destination_is_packed) {
        kvcore::transfer(from.head_view(), to.head_view(), pairs.data(), n, range, workers);
    } else if (destination_is_packed) {
        kvcore::transfer_to_packed(from.view(), to.packed_view(), pairs.data(), n, range, workers);
    } else if (source_is_packed) {
        kvcore::transfer_from_packed(from.packed_view(), to.view(), pairs.data(), n, range,
                                     workers);
    } else {
        kvcore::transfer(from.view(), to.view(), pairs.data(), n, range, workers);
    }
}

// ---- starts of pages ---------------------------------------------------------------------------

std::vector<PageStart> starts_of(const Ids& copies, const Destination& pool) {
    check_rank(copies, "copies", "(n, 3)", 2);
    if (copies.shape(1) != 3) throw py::value_error("copies must have three columns");
    std::vector<PageStart> all;
    for (py::ssize_t i = 0; i < copies.shape(0); ++i) {
        const PageStart copy{copies.at(i, 0), copies.at(i, 1), copies.at(i, 2)};
        check_page(copy.source, pool.sizes().pages);
        check_page(copy.destination, pool.sizes().pages);
        if (copy.tokens < 0 || copy.tokens > pool.sizes().page_size) {
            throw py::value_error(concat("copies[", i, "] is of ", copy.tokens,
                                         " tokens, a page holds ", pool.sizes().page_size));
        }
        if (copy.source == copy.destination) {
            throw py::value_error(
                concat("copies[", i, "] copies page ", copy.source, " to itself; leave it out"));
        }
        all.push_back(copy);
    }
    return all;
}

// How many copies from the first one on may be done in any order.
std::size_t count_independent(const PageStart* copies, std::size_t n) {
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

void copy_partial(const py::list& pool, const Ids& copies, int threads) {
    const Destination target(pool, "the pool", false);
    const std::vector<PageStart> all = starts_of(copies, target);
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    for (std::size_t done = 0; done < all.size();) {
        const std::size_t count = count_independent(all.data() + done, all.size() - done);
        kvcore::copy_partial(target.view(), all.data() + done, static_cast<std::int64_t>(count),
                             workers);
        done += count;
    }
}

}  // namespace

void bind_transfer(py::module_& module) {
    module.def("layout_axes", &layout_axes);
    module.def("transfer", &transfer, py::arg("source"), py::arg("source_is_packed"),
               py::arg("destination"), py::arg("destination_is_packed"), py::arg("source_ids"),
               py::arg("destination_ids"), py::arg("first_layer"), py::arg("num_layers"),
               py::arg("threads"));
    module.def("copy_partial", &copy_partial, py::arg("pool"), py::arg("copies"),
               py::arg("threads"));
}
