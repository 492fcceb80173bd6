// SPDX-License-Identifier: Apache-2.0
#include "kvcore/page_bytes.hpp"

#include <vector>

#include "array_args.hpp"
#include "bindings.hpp"
#include "page_ids.hpp"

namespace py = pybind11;
using kvcore::PageBytes;
using kvcore::python::check_page;
using kvcore::python::check_rank;
using kvcore::python::concat;
using kvcore::python::Ids;
using kvcore::python::threads_of;

namespace {

/// A pool whose first axis are the pages, each of them one run of bytes.
PageBytes<const std::byte> pages_of(const py::array& pool) {
    if (pool.ndim() < 1) throw py::value_error("the pool has no axes, the first must be its pages");
    py::ssize_t bytes = pool.itemsize();
    for (py::ssize_t axis = pool.ndim() - 1; axis > 0; --axis) {
        if (pool.shape(axis) > 1 && pool.strides(axis) != bytes) {
            throw py::value_error(
                concat("the pool's axis ", axis, " is strided; a page must be one run of bytes"));
        }
        bytes *= pool.shape(axis);
    }
    return {static_cast<const std::byte*>(pool.data()), pool.strides(0), bytes};
}

PageBytes<std::byte> writable_pages_of(py::array& pool) {
    const PageBytes<const std::byte> pages = pages_of(pool);
    if (!pool.writeable()) throw py::value_error("the pool is read-only");
    return {static_cast<std::byte*>(pool.mutable_data()), pages.page_stride, pages.page_bytes};
}

void check_ids(const Ids& ids, const py::array& pool) {
    for (py::ssize_t i = 0; i < ids.size(); ++i) check_page(ids.data()[i], pool.shape(0));
}

void copy_pages(py::array pool, const Ids& pairs, int threads) {
    const PageBytes<std::byte> pages = writable_pages_of(pool);
    check_rank(pairs, "pairs", "(n, 2)", 2);
    if (pairs.shape(1) != 2) throw py::value_error("pairs must have two columns");
    check_ids(pairs, pool);
    kvcore::python::PageUses uses(pool.shape(0));
    std::vector<kvcore::PagePair> all;
    for (py::ssize_t i = 0; i < pairs.shape(0); ++i) {
        all.push_back({pairs.at(i, 0), pairs.at(i, 1)});
        uses.read(all.back().source);
        uses.write(all.back().destination);
    }
    uses.check_apart();
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    kvcore::copy_pages(pages, all.data(), static_cast<std::int64_t>(all.size()), workers);
}

void fill_pages(py::array pool, const Ids& ids, int value, int threads) {
    const PageBytes<std::byte> pages = writable_pages_of(pool);
    check_rank(ids, "ids", "(n,)", 1);
    check_ids(ids, pool);
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    kvcore::fill_pages(pages, ids.data(), ids.size(), static_cast<std::byte>(value), workers);
}

py::array_t<std::uint64_t> digest_pages(const py::array& pool, const Ids& ids, int threads) {
    const PageBytes<const std::byte> pages = pages_of(pool);
    check_rank(ids, "ids", "(n,)", 1);
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
