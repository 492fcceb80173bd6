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
using kvcore::PageCopier;
using kvcore::PageMove;
using kvcore::python::check_page;
using kvcore::python::check_rank;
using kvcore::python::Ids;
using kvcore::python::PoolArg;

namespace {

/// A PageCopier and the arrays in which it copies.
class BoundCopier {
   public:
    /// `pools`: for each replica, the arguments of CacheArg for its arrays.
    explicit BoundCopier(const py::list& pools) {
        std::vector<PageCopier::Pool> views;
        for (const py::handle replica : pools) {
            pools_.emplace_back(py::cast<py::list>(replica));
            views.push_back(pools_.back().views());
        }
        copier_ = std::make_unique<PageCopier>(std::move(views));
    }

    [[nodiscard]] PageCopier& copier() const noexcept { return *copier_; }

    void run(const Ids& copies) const {
        const std::vector<PageMove> all = copies_of(copies);
        const py::gil_scoped_release unlocked;
        copier_->run(all.data(), static_cast<std::int64_t>(all.size()));
    }

   private:
    // Columns: replica, source page, destination page, tokens.
    [[nodiscard]] std::vector<PageMove> copies_of(const Ids& given) const {
        check_rank(given, "copies", "(n, 4)", 2);
        if (given.shape(1) != 4) throw py::value_error("copies must have four columns");
        std::vector<PageMove> all;
        all.reserve(static_cast<std::size_t>(given.shape(0)));
        for (py::ssize_t i = 0; i < given.shape(0); ++i) {
            const std::int64_t replica = given.at(i, 0);
            const std::int64_t tokens = given.at(i, 3);
            if (replica < 0 || replica >= static_cast<std::int64_t>(pools_.size())) {
                throw py::index_error(kvcore::detail::concat(
                    "replica ", replica, " does not exist, there are ", pools_.size()));
            }
            for (const auto& cache : pools_[static_cast<std::size_t>(replica)].caches()) {
                check_page(given.at(i, 1), cache.sizes().pages);
                check_page(given.at(i, 2), cache.sizes().pages);
                if (tokens < 0 || tokens > cache.sizes().page_size) {
                    throw py::value_error(
                        kvcore::detail::concat("a copy has ", tokens, " tokens, must be 0 .. ",
                                               cache.sizes().page_size, ", the page size"));
                }
            }
            all.push_back({static_cast<std::int32_t>(replica),
                           static_cast<kvcore::BlockId>(given.at(i, 1)),
                           static_cast<kvcore::BlockId>(given.at(i, 2)),
                           static_cast<std::int32_t>(tokens),
                           {}});
        }
        return all;
    }

    std::vector<PoolArg> pools_;
    std::unique_ptr<PageCopier> copier_;
};

}  // namespace

void bind_page_copier(py::module_& module) {
    py::class_<BoundCopier>(module, "PageCopier",
                            "Copies pages within the pools of a manager, for all replicas.")
        .def(py::init<py::list>(), py::arg("pools"))
        .def("run", &BoundCopier::run, py::arg("copies"),
             "Copy the starts of pages, in any order; each row: replica, source page, destination "
             "page, tokens.")
        .def("_capsule", [](const BoundCopier& bound) {
            return py::capsule(&bound.copier(), "kvcore.PageCopier");
        });
}
