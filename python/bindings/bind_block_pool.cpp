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

// Python shows a first line `name(self, arguments)`, followed by `--`, as the signature.
constexpr const char* kClassDoc = R"(Count the references of page ids ``0 .. num_blocks - 1``.

Parameters
----------
num_blocks : int
    Pages, ``1 .. 2**31 - 1``.

Raises
------
ValueError
    `num_blocks` is outside this range.

Notes
-----
One thread at a time. O(1) per id; ids freed last are handed out first.

Examples
--------
>>> from kvcore import BlockPool
>>> pool = BlockPool(4)
>>> ids = pool.allocate(3)
>>> pool.free(ids[:1])
>>> pool
BlockPool(4 pages, 2 free, 2 used))";

constexpr const char* kAllocateDoc = R"(allocate(self, n)
--

Take pages, each with one reference.

Returns
-------
int32 [n]
    Their ids.

Raises
------
InsufficientBlocksError
    Fewer than `n` pages are free. The call took no page.
ValueError
    `n` is below 0.)";

constexpr const char* kShareDoc = R"(share(self, ids)
--

Add a reference to each page.

Parameters
----------
ids : list of int, or array int32 or int64 [n]

Raises
------
InvalidHandleError
    An id is free or not a page. The call changed nothing.)";

constexpr const char* kFreeDoc = R"(free(self, ids)
--

Drop a reference of each page. A page without references becomes free.

Parameters
----------
ids : list of int, or array int32 or int64 [n]

Raises
------
InvalidHandleError
    An id is already free (a double free) or not a page. The call changed nothing.)";

constexpr const char* kRefCountDoc = R"(ref_count(self, block_id)
--

Return the references to a page, 0 if it is free; InvalidHandleError for an invalid id.)";

constexpr const char* kCheckIntegrityDoc = R"(check_integrity(self)
--

Raise AssertionError unless free and referenced pages make up the pool. O(num_blocks).)";

py::array_t<std::int32_t> allocate(BlockPool& pool, std::int64_t n) {
    if (n < 0) throw py::value_error("n is " + std::to_string(n) + ", must be at least 0");
    if (n > pool.num_free()) {
        throw kvcore::InsufficientBlocksError(
            kvcore::detail::concat(n, " pages are needed, ", pool.num_free(), " of ",
                                   pool.num_blocks(), " are free; free pages first"));
    }
    std::vector<kvcore::BlockId> ids(static_cast<std::size_t>(n));
    if (!pool.allocate(n, ids.data())) throw kvcore::Error("pool changed during the call");
    return id_array(ids);
}

}  // namespace

void bind_block_pool(py::module_& module) {
    py::options options;
    options.disable_function_signatures();
    py::class_<BlockPool>(module, "BlockPool", kClassDoc)
        .def(py::init<std::int64_t>(), py::arg("num_blocks"))
        .def_property_readonly("num_blocks", &BlockPool::num_blocks, "Pages of the pool.")
        .def_property_readonly("num_free", &BlockPool::num_free, "Pages without references.")
        .def("allocate", &allocate, py::arg("n"), kAllocateDoc)
        .def(
            "share",
            [](BlockPool& pool, const py::object& ids) {
                const Int32Arg arg(ids, "ids");
                pool.share(arg.data(), arg.size());
            },
            py::arg("ids"), kShareDoc)
        .def(
            "free",
            [](BlockPool& pool, const py::object& ids) {
                const Int32Arg arg(ids, "ids");
                pool.free(arg.data(), arg.size());
            },
            py::arg("ids"), kFreeDoc)
        .def("ref_count", &BlockPool::ref_count, py::arg("block_id"), kRefCountDoc)
        .def("check_integrity", &BlockPool::check_integrity, kCheckIntegrityDoc)
        .def("__repr__", [](const BlockPool& pool) {
            return kvcore::detail::concat("BlockPool(", pool.num_blocks(), " pages, ",
                                          pool.num_free(), " free, ",
                                          pool.num_blocks() - pool.num_free(), " used)");
        });
}
