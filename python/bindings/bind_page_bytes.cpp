// SPDX-License-Identifier: Apache-2.0
#include "kvcore/page_bytes.hpp"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "array_args.hpp"
#include "bindings.hpp"
#include "page_args.hpp"

namespace py = pybind11;
using kvcore::PageBytes;
using kvcore::python::arrays_in;
using kvcore::python::check_ids;
using kvcore::python::Ids;
using kvcore::python::page_pairs;
using kvcore::python::pages_of;
using kvcore::python::threads_of;
using kvcore::python::writable_pages_of;

namespace {

// Checks all arguments before anything is written: a list of pools is one cache.
void copy_pages(const py::list& given, const Ids& pairs, const py::object& threads) {
    std::vector<py::array> pools = arrays_in(given);
    const std::vector<PageBytes<std::byte>> all = writable_pages_of(pools);
    std::vector<kvcore::PagePair> copies;
    for (const py::array& pool : pools) copies = page_pairs(pairs, pool);
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    for (const PageBytes<std::byte>& pages : all) {
        kvcore::copy_pages(pages, copies.data(), static_cast<std::int64_t>(copies.size()), workers);
    }
}

void fill_pages(const py::list& given, const Ids& ids, int value, const py::object& threads) {
    std::vector<py::array> pools = arrays_in(given);
    const std::vector<PageBytes<std::byte>> all = writable_pages_of(pools);
    for (const py::array& pool : pools) check_ids(ids, pool);
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    for (const PageBytes<std::byte>& pages : all) {
        kvcore::fill_pages(pages, ids.data(), ids.size(), static_cast<std::byte>(value), workers);
    }
}

py::array_t<std::uint64_t> digest_pages(const py::array& pool, const Ids& ids,
                                        const py::object& threads) {
    const PageBytes<const std::byte> pages = pages_of(pool);
    check_ids(ids, pool);
    const int workers = threads_of(threads);
    py::array_t<std::uint64_t> digests(ids.size());
    std::uint64_t* out = digests.mutable_data();
    const py::gil_scoped_release unlocked;
    kvcore::digest_pages(pages, ids.data(), ids.size(), out, workers);
    return digests;
}

// Uses only the addresses of the elements, so the array needs no memory.
bool has_shared_elements(const std::vector<py::ssize_t>& shape,
                         const std::vector<py::ssize_t>& strides, py::ssize_t item_size) {
    static constexpr std::byte kSomewhere{};
    const py::dtype bytes(std::string("V") + std::to_string(item_size));
    return kvcore::python::is_self_sharing(
        py::array(bytes, shape, strides, &kSomewhere, py::none()));
}

}  // namespace

void bind_page_bytes(py::module_& module) {
    module.def("copy_pages", &copy_pages, py::arg("pools"), py::arg("pairs"), py::arg("threads"));
    module.def("fill_pages", &fill_pages, py::arg("pools"), py::arg("ids"), py::arg("value"),
               py::arg("threads"));
    module.def("has_shared_elements", &has_shared_elements, py::arg("shape"), py::arg("strides"),
               py::arg("item_size"));
    module.def("digest_pages", &digest_pages, py::arg("pool"), py::arg("ids"), py::arg("threads"));
}
