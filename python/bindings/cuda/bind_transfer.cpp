// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"
#include "kvcore/cuda.hpp"
#include "transfer_args.hpp"

namespace py = pybind11;
namespace cuda = kvcore::cuda;
using kvcore::CacheView;
using kvcore::LayerRange;
using kvcore::PagePair;
using kvcore::PageStart;
using kvcore::python::check_alike;
using kvcore::python::check_rank;
using kvcore::python::check_status;
using kvcore::python::concat;
using kvcore::python::count_independent;
using kvcore::python::Destination;
using kvcore::python::DeviceNumbers;
using kvcore::python::Ids;
using kvcore::python::layer_range;
using kvcore::python::pairs_of;
using kvcore::python::seen;
using kvcore::python::seen_all;
using kvcore::python::Source;
using kvcore::python::starts_of;
using kvcore::python::stream_of;

namespace {

static_assert(sizeof(PageStart) == 3 * sizeof(std::int64_t), "rows of an array are starts");

/// The view with its pointers of layers where kernels can read them: uint64 [layers] for each
/// tensor that is a list of them, None for others.
template <class Byte>
CacheView<Byte> with_tables(CacheView<Byte> view, const py::list& tables) {
    kvcore::CacheTensor<Byte>* tensors[] = {&view.k, &view.v};
    for (std::size_t i = 0; i < tables.size() && i < 2; ++i) {
        if (tensors[i]->layers == nullptr) continue;
        const py::array table = seen(tables[i]);
        if (!py::isinstance<py::array_t<std::uint64_t, py::array::c_style>>(table) ||
            table.size() != view.layers) {
            throw py::value_error(concat("tables[", i, "] must be uint64 (", view.layers, ",)"));
        }
        tensors[i]->layers = static_cast<Byte* const*>(table.data());
    }
    return view;
}

py::ssize_t count_rows(const Ids& numbers, const char* name, py::ssize_t columns) {
    check_rank(numbers, name, concat("(n, ", columns, ")").c_str(), 2);
    if (numbers.shape(1) == columns) return numbers.shape(0);
    throw py::value_error(concat(name, " must have ", columns, " columns"));
}

/// A cache as [K] or [K, V] of arrays and, of its lists of layers, their addresses on the device.
struct Cache {
    py::list tensors;
    py::list tables;
};

Cache cache_of(const py::tuple& given) {
    return {seen_all(given[0]).cast<py::list>(), given[1].cast<py::list>()};
}

void transfer(const py::tuple& source, const py::tuple& destination, const py::object& pairs,
              std::int64_t first_layer, std::int64_t num_layers, std::int64_t max_blocks,
              int device, std::uintptr_t stream) {
    const Cache from_arrays = cache_of(source);
    const Cache to_arrays = cache_of(destination);
    const Source from(from_arrays.tensors, "the source", false);
    const Destination to(to_arrays.tensors, "the destination", false);
    check_alike(from, to);
    const DeviceNumbers numbers(pairs);
    const Ids checked = numbers.ids("the pages");
    const py::ssize_t n = count_rows(checked, "the pages", 2);
    if (numbers.is_readable()) {
        (void)pairs_of(checked, from.sizes().pages, to.sizes().pages);
    }
    const LayerRange range = layer_range(first_layer, num_layers, from.sizes().layers);
    if (max_blocks < 0) {
        throw py::value_error(concat("max_blocks is ", max_blocks, ", must be at least 0"));
    }
    const auto source_view = with_tables(from.view(), from_arrays.tables);
    const auto destination_view = with_tables(to.view(), to_arrays.tables);
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        status = cuda::transfer(source_view, destination_view, numbers.data<PagePair>(), n, range,
                                max_blocks, stream_of(device, stream));
    }
    check_status(status, "moving ", n, " pages on cuda:", device);
}

/// Copies whose values are readable are enqueued as if in their order; of others all at once.
void copy_partial(const py::tuple& given, const py::object& copies, int device,
                  std::uintptr_t stream) {
    const Cache arrays = cache_of(given);
    const Destination pool(arrays.tensors, "the pool", false);
    const DeviceNumbers numbers(copies);
    const Ids checked = numbers.ids("copies");
    const auto n = static_cast<std::size_t>(count_rows(checked, "copies", 3));
    std::vector<PageStart> all;
    if (numbers.is_readable()) all = starts_of(checked, pool);
    const auto view = with_tables(pool.view(), arrays.tables);
    const auto* starts = numbers.data<PageStart>();
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        for (std::size_t done = 0; done < n && status == cuda::kSuccess;) {
            const std::size_t count =
                all.empty() ? n : count_independent(all.data() + done, n - done);
            status = cuda::copy_partial(view, starts + done, static_cast<std::int64_t>(count),
                                        stream_of(device, stream));
            done += count;
        }
    }
    check_status(status, "copying ", n, " starts of pages on cuda:", device);
}

}  // namespace

void bind_cuda_transfer(py::module_& module) {
    module.def("transfer", &transfer, py::arg("source"), py::arg("destination"), py::arg("pairs"),
               py::arg("first_layer"), py::arg("num_layers"), py::arg("max_blocks"),
               py::arg("device"), py::arg("stream"));
    module.def("copy_partial", &copy_partial, py::arg("pool"), py::arg("copies"), py::arg("device"),
               py::arg("stream"));
}
