// SPDX-License-Identifier: Apache-2.0
#include "kvcore/page_bytes.hpp"

#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "array_args.hpp"
#include "bindings.hpp"
#include "transfer_args.hpp"

namespace py = pybind11;
using kvcore::LayerRange;
using kvcore::LayoutName;
using kvcore::PagePair;
using kvcore::PageStart;
using kvcore::python::check_alike;
using kvcore::python::count_independent;
using kvcore::python::Destination;
using kvcore::python::Ids;
using kvcore::python::layer_range;
using kvcore::python::pairs_of;
using kvcore::python::Source;
using kvcore::python::starts_of;
using kvcore::python::threads_of;

namespace {

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

void transfer(const py::list& source, bool source_is_packed, const py::list& destination,
              bool destination_is_packed, const Ids& given, std::int64_t first_layer,
              std::int64_t num_layers, const py::object& threads) {
    const Source from(source, "the source", source_is_packed);
    const Destination to(destination, "the destination", destination_is_packed);
    check_alike(from, to);
    const std::vector<PagePair> pairs = pairs_of(given, from.sizes().pages, to.sizes().pages);
    const LayerRange range = layer_range(first_layer, num_layers, from.sizes().layers);
    const int workers = threads_of(threads);
    const auto n = static_cast<std::int64_t>(pairs.size());
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

void copy_partial(const py::list& pool, const Ids& copies, const py::object& threads) {
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
               py::arg("destination"), py::arg("destination_is_packed"), py::arg("pairs"),
               py::arg("first_layer"), py::arg("num_layers"), py::arg("threads"));
    module.def("copy_partial", &copy_partial, py::arg("pool"), py::arg("copies"),
               py::arg("threads"));
}
