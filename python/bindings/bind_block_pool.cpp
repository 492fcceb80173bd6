// SPDX-License-Identifier: Apache-2.0
#include "array_args.hpp"
#include "bindings.hpp"
#include "kvcore/block_pool.hpp"
#include "kvcore/errors.hpp"

namespace py = pybind11;
using kvcore::BlockPool;
using kvcore::python::id_array;
using kvcore::python::Int32Arg;

namespace {

py::array_t<std::int32_t> allocate(BlockPool& pool, std::int64_t n) {
    if (n < 0) throw py::value_error("n is " + std::to_string(n) + ", must be at least 0");
    if (n > pool.num_free()) {
        throw kvcore::InsufficientBlocksError(
            kvcore::detail::concat(n, " pages are needed, ", pool.num_free(), " of ",
                                   pool.num_blocks(), " are free; free some first"));
    }
    std::vector<kvcore::BlockId> ids(static_cast<std::size_t>(n));
    if (!pool.allocate(n, ids.data())) throw kvcore::Error("pool changed during the call");
    return id_array(ids);
}

}  // namespace

void bind_block_pool(py::module_& module) {
    py::class_<BlockPool>(module, "BlockPool")
        .def(py::init<std::int64_t>(), py::arg("num_blocks"))
        .def_property_readonly("num_blocks", &BlockPool::num_blocks)
        .def_property_readonly("num_free", &BlockPool::num_free)
        .def("allocate", &allocate, py::arg("n"))
        .def(
            "share",
            [](BlockPool& pool, const py::object& ids) {
                const Int32Arg arg(ids, "ids");
                pool.share(arg.data(), arg.size());
            },
            py::arg("ids"))
        .def(
            "free",
            [](BlockPool& pool, const py::object& ids) {
                const Int32Arg arg(ids, "ids");
                pool.free(arg.data(), arg.size());
            },
            py::arg("ids"))
        .def("ref_count", &BlockPool::ref_count, py::arg("block_id"))
        .def("check_integrity", &BlockPool::check_integrity)
        .def("__repr__", [](const BlockPool& pool) {
            return kvcore::detail::concat("BlockPool(", pool.num_blocks(), " pages, ",
                                          pool.num_free(), " free, ",
                                          pool.num_blocks() - pool.num_free(), " used)");
        });
}
