// SPDX-License-Identifier: Apache-2.0
#include "kvcore/host_store.hpp"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "array_args.hpp"
#include "bindings.hpp"
#include "cache_args.hpp"
#include "page_ids.hpp"

namespace py = pybind11;
using kvcore::HostStore;
using kvcore::PagePair;
using kvcore::python::check_page;
using kvcore::python::check_rank;
using kvcore::python::Ids;
using kvcore::python::PoolArg;
using kvcore::python::threads_of;

namespace {

/// A HostStore and the arrays that it copies from and to.
class BoundStore {
   public:
    /// `caches`: the argument of CacheArg for each array of the replica.
    BoundStore(std::int64_t num_pages, py::list caches)
        : pool_(std::move(caches)), store_(std::make_unique<HostStore>(num_pages, pool_.views())) {}

    [[nodiscard]] const HostStore& store() const noexcept { return *store_; }
    /// Returns the pages as bytes. The array keeps `self`, which owns the memory.
    [[nodiscard]] static py::array_t<std::uint8_t> memory(const py::object& self) {
        const HostStore& store = self.cast<const BoundStore&>().store();
        return {{store.num_pages(), store.page_bytes()},
                {store.page_bytes(), std::int64_t{1}},
                reinterpret_cast<const std::uint8_t*>(store.page(0)),
                self};
    }

    void copy(const Ids& pairs, bool is_store, const py::object& threads) const {
        const std::vector<PagePair> all = pairs_of(pairs, is_store);
        const auto n = static_cast<std::int64_t>(all.size());
        const int workers = threads_of(threads);
        const py::gil_scoped_release unlocked;
        if (is_store) {
            store_->store(all.data(), n, workers);
        } else {
            store_->load(all.data(), n, workers);
        }
    }

   private:
    // Columns: page of the device, page of the host.
    [[nodiscard]] std::vector<PagePair> pairs_of(const Ids& pairs, bool is_store) const {
        check_rank(pairs, "pairs", "(n, 2)", 2);
        if (pairs.shape(1) != 2) throw py::value_error("pairs must have two columns");
        std::vector<PagePair> all;
        all.reserve(static_cast<std::size_t>(pairs.shape(0)));
        for (py::ssize_t i = 0; i < pairs.shape(0); ++i) {
            const std::int64_t device = pairs.at(i, 0);
            const std::int64_t host = pairs.at(i, 1);
            for (const auto& cache : pool_.caches()) check_page(device, cache.sizes().pages);
            check_page(host, store_->num_pages());
            all.push_back(is_store ? PagePair{device, host} : PagePair{host, device});
        }
        return all;
    }

    PoolArg pool_;
    std::unique_ptr<HostStore> store_;
};

}  // namespace

void bind_host_store(py::module_& module) {
    py::class_<BoundStore>(module, "HostStore",
                           "Memory of the host tier's pages for one replica, and copies between it "
                           "and the arrays of the pool.")
        .def(py::init<std::int64_t, py::list>(), py::arg("num_pages"), py::arg("caches"))
        .def_property_readonly("num_pages",
                               [](const BoundStore& bound) { return bound.store().num_pages(); })
        .def_property_readonly("page_bytes",
                               [](const BoundStore& bound) { return bound.store().page_bytes(); })
        .def_property_readonly(
            "memory", [](const py::object& self) { return BoundStore::memory(self); },
            "The pages as bytes, uint8 [num_pages, page_bytes]; allocated before their use.")
        .def(
            "expect",
            [](const BoundStore& bound, std::int64_t last) {
                check_page(last, bound.store().num_pages());
                const py::gil_scoped_release unlocked;
                bound.store().expect(last);
            },
            py::arg("last"),
            "Allocate the memory up to a page and some more, unless it is allocated.")
        .def(
            "store",
            [](const BoundStore& bound, const Ids& pairs, const py::object& threads) {
                bound.copy(pairs, true, threads);
            },
            py::arg("pairs"), py::arg("threads") = 1,
            "Copy pages to the host tier; each row: page of the pool, page of the tier.")
        .def(
            "load",
            [](const BoundStore& bound, const Ids& pairs, const py::object& threads) {
                bound.copy(pairs, false, threads);
            },
            py::arg("pairs"), py::arg("threads") = 1,
            "Copy pages of the host tier back; rows as for store.");
}
