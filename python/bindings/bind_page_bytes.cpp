// SPDX-License-Identifier: Apache-2.0
#include "kvcore/page_bytes.hpp"

#include <vector>

#include "array_args.hpp"
#include "bindings.hpp"
#include "page_args.hpp"

namespace py = pybind11;
using kvcore::PageBytes;
using kvcore::python::check_ids;
using kvcore::python::Ids;
using kvcore::python::page_pairs;
using kvcore::python::pages_of;
using kvcore::python::threads_of;
using kvcore::python::writable_pages_of;

namespace {

void copy_pages(py::array pool, const Ids& pairs, int threads) {
    const PageBytes<std::byte> pages = writable_pages_of(pool);
    const std::vector<kvcore::PagePair> all = page_pairs(pairs, pool);
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    kvcore::copy_pages(pages, all.data(), static_cast<std::int64_t>(all.size()), workers);
}

void fill_pages(py::array pool, const Ids& ids, int value, int threads) {
    const PageBytes<std::byte> pages = writable_pages_of(pool);
    check_ids(ids, pool);
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    kvcore::fill_pages(pages, ids.data(), ids.size(), static_cast<std::byte>(value), workers);
}

py::array_t<std::uint64_t> digest_pages(const py::array& pool, const Ids& ids, int threads) {
    const PageBytes<const std::byte> pages = pages_of(pool);
    check_ids(ids, pool);
    const int workers = threads_of(threads);
    py::array_t<std::uint64_t> digests(ids.size());
    std::uint64_t* out = digests.mutable_data();
    const py::gil_scoped_release unlocked;
    kvcore::digest_pages(pages, ids.data(), ids.size(), out, workers);
    return digests;
}

}  // namespace

void bind_page_bytes(py::module_& module) {
    module.def("copy_pages", &copy_pages, py::arg("pool"), py::arg("pairs"), py::arg("threads"));
    module.def("fill_pages", &fill_pages, py::arg("pool"), py::arg("ids"), py::arg("value"),
               py::arg("threads"));
    module.def("digest_pages", &digest_pages, py::arg("pool"), py::arg("ids"), py::arg("threads"));
}
