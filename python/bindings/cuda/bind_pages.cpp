// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"
#include "kvcore/cuda.hpp"
#include "page_args.hpp"

namespace py = pybind11;
namespace cuda = kvcore::cuda;
using kvcore::PageBytes;
using kvcore::PagePair;
using kvcore::python::arrays_in;
using kvcore::python::check_ids;
using kvcore::python::check_rank;
using kvcore::python::check_status;
using kvcore::python::concat;
using kvcore::python::DeviceNumbers;
using kvcore::python::Ids;
using kvcore::python::page_pairs;
using kvcore::python::pages_of;
using kvcore::python::seen;
using kvcore::python::seen_all;
using kvcore::python::stream_of;
using kvcore::python::writable_pages_of;

namespace {

static_assert(sizeof(PagePair) == 2 * sizeof(std::int64_t), "rows of an array are pairs");

// Checks all arguments before anything is enqueued: a list of pools is one cache.
void copy_pages(const py::list& given, const py::object& pairs, int device, std::uintptr_t stream) {
    std::vector<py::array> pools = arrays_in(seen_all(given));
    const std::vector<PageBytes<std::byte>> all = writable_pages_of(pools);
    const DeviceNumbers numbers(pairs);
    const Ids checked = numbers.ids("pairs");
    check_rank(checked, "pairs", "(n, 2)", 2);
    if (checked.shape(1) != 2) throw py::value_error("pairs must have two columns");
    for (const py::array& pool : pools) {
        if (numbers.is_readable()) (void)page_pairs(checked, pool);
    }
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        for (std::size_t i = 0; i < all.size() && status == cuda::kSuccess; ++i) {
            status = cuda::copy_pages(all[i], pools[i].shape(0), numbers.data<PagePair>(),
                                      checked.shape(0), stream_of(device, stream));
        }
    }
    check_status(status, "copying ", checked.shape(0), " pages on cuda:", device);
}

/// Checks page ids [n], and their values if they are readable.
py::ssize_t count_ids(const DeviceNumbers& numbers, const py::array& pool) {
    const Ids ids = numbers.ids("ids");
    if (numbers.is_readable()) {
        check_ids(ids, pool);
    } else {
        check_rank(ids, "ids", "(n,)", 1);
    }
    return ids.size();
}

void fill_pages(const py::list& given, const py::object& ids, int value, int device,
                std::uintptr_t stream) {
    std::vector<py::array> pools = arrays_in(seen_all(given));
    const std::vector<PageBytes<std::byte>> all = writable_pages_of(pools);
    const DeviceNumbers numbers(ids);
    py::ssize_t n = 0;
    for (const py::array& pool : pools) n = count_ids(numbers, pool);
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        for (std::size_t i = 0; i < all.size() && status == cuda::kSuccess; ++i) {
            status = cuda::fill_pages(all[i], pools[i].shape(0), numbers.data<std::int64_t>(), n,
                                      static_cast<std::byte>(value), stream_of(device, stream));
        }
    }
    check_status(status, "filling ", n, " pages on cuda:", device);
}

/// Writes the digests of pages to `out` if `weight` is 0, else adds `weight` times each digest to
/// `out`.
void digest_pages(const py::object& given, const py::object& ids, const py::object& out,
                  std::uint64_t weight, int device, std::uintptr_t stream) {
    const py::array pool = seen(given);
    const PageBytes<const std::byte> pages = pages_of(pool);
    const DeviceNumbers numbers(ids);
    const py::ssize_t n = count_ids(numbers, pool);
    py::array digests = seen(out);
    if (!py::isinstance<py::array_t<std::uint64_t, py::array::c_style>>(digests) ||
        digests.size() != n) {
        throw py::value_error(concat("out must be uint64 (", n, ",) and contiguous"));
    }
    auto* to = static_cast<std::uint64_t*>(digests.mutable_data());
    const auto* wanted = numbers.data<std::int64_t>();
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        const cuda::Stream queue = stream_of(device, stream);
        status = weight == 0
                     ? cuda::digest_pages(pages, pool.shape(0), wanted, n, to, queue)
                     : cuda::add_digests(pages, pool.shape(0), wanted, n, weight, to, queue);
    }
    check_status(status, "digesting ", n, " pages on cuda:", device);
}

}  // namespace

void bind_cuda_pages(py::module_& module) {
    module.def("copy_pages", &copy_pages, py::arg("pools"), py::arg("pairs"), py::arg("device"),
               py::arg("stream"));
    module.def("fill_pages", &fill_pages, py::arg("pools"), py::arg("ids"), py::arg("value"),
               py::arg("device"), py::arg("stream"));
    module.def("digest_pages", &digest_pages, py::arg("pool"), py::arg("ids"), py::arg("out"),
               py::arg("weight"), py::arg("device"), py::arg("stream"));
}
