// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>

#include "array_args.hpp"
#include "bindings.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/name_space.hpp"
#include "kvcore/prefix_tree.hpp"

namespace py = pybind11;
using kvcore::PrefixTree;
using kvcore::python::id_array;
using kvcore::python::Int32Arg;

namespace {

using Key = std::optional<std::string>;

/// A matched prefix as Python holds it: knows how often it pinned, and lets go when it is dropped.
class Prefix {
   public:
    Prefix(std::shared_ptr<PrefixTree> tree, kvcore::PrefixHandle handle)
        : tree_(std::move(tree)), handle_(handle) {}
    Prefix(const Prefix&) = delete;
    Prefix& operator=(const Prefix&) = delete;
    ~Prefix() {
        while (pins_ > 0) unpin();
    }

    [[nodiscard]] bool belongs_to(const PrefixTree& tree) const noexcept {
        return tree_.get() == &tree;
    }
    [[nodiscard]] std::int32_t num_pages() const noexcept { return handle_.depth; }
    void pin() {
        if (pins_ == 0) node_ = tree_->split(tree_->resolve(handle_));
        tree_->pin(node_);
        ++pins_;
    }
    void unpin() {
        if (pins_ == 0) {
            throw kvcore::InvalidHandleError(kvcore::detail::concat(
                "a prefix of ", handle_.depth, " pages is not pinned; unpin each pin once"));
        }
        --pins_;
        // The end may have moved to another node since the match; remember where it is.
        handle_ = tree_->handle({node_, handle_.depth});
        tree_->unpin(node_, true);
    }

   private:
    std::shared_ptr<PrefixTree> tree_;
    kvcore::PrefixHandle handle_;
    kvcore::TreeNode* node_ = nullptr;
    std::uint32_t pins_ = 0;
};

Prefix& checked(const PrefixTree& tree, Prefix& prefix) {
    if (prefix.belongs_to(tree)) return prefix;
    throw kvcore::InvalidHandleError("the handle is another tree's; match the tokens in this one");
}

py::tuple match(const std::shared_ptr<PrefixTree>& tree, const py::object& tokens,
                const Key& extra_key, const Key& cache_salt) {
    const Int32Arg arg(tokens, "tokens");
    kvcore::TreeNode* root =
        tree->find_namespace(kvcore::namespace_name(extra_key, cache_salt));
    kvcore::TreePosition at{tree->find_namespace(""), 0};
    if (root != nullptr) at = tree->match(root, arg.data(), arg.size()).at;
    std::vector<kvcore::BlockId> pages(static_cast<std::size_t>(at.depth));
    tree->copy_pages(at, 0, pages.data());
    return py::make_tuple(id_array(pages), std::make_unique<Prefix>(tree, tree->handle(at)));
}

py::array_t<std::int32_t> insert(PrefixTree& tree, const py::object& tokens,
                                 const py::object& pages, const Key& extra_key,
                                 const Key& cache_salt) {
    const Int32Arg run(tokens, "tokens");
    const Int32Arg ids(pages, "pages");
    if (run.size() != ids.size() * tree.page_size()) {
        throw py::value_error(kvcore::detail::concat(
            ids.size(), " pages hold ", ids.size() * tree.page_size(), " tokens, ", run.size(),
            " were given; pass whole pages"));
    }
    std::vector<kvcore::DuplicatePage> duplicates;
    kvcore::TreeNode* root =
        tree.open_namespace(kvcore::namespace_name(extra_key, cache_salt));
    tree.pin(root);  // an empty namespace would go when nobody holds it
    kvcore::TreeNode* end = tree.insert(root, run.data(), ids.data(),
                                        static_cast<std::int32_t>(ids.size()), duplicates);
    tree.pin(end);
    tree.unpin(end, true);
    tree.unpin(root, false);
    std::vector<kvcore::BlockId> held(ids.data(), ids.data() + ids.size());
    for (const auto& duplicate : duplicates) {
        held[static_cast<std::size_t>(duplicate.index)] = duplicate.cached;
    }
    return id_array(held);
}

py::array_t<std::int32_t> evict(PrefixTree& tree, std::int64_t n) {
    if (n < 0) throw py::value_error("n is " + std::to_string(n) + ", must be at least 0");
    std::vector<kvcore::BlockId> pages;
    tree.evict(n, pages);
    return id_array(pages);
}

}  // namespace

void bind_prefix_tree(py::module_& module) {
    py::class_<Prefix>(module, "PrefixHandle")
        .def_property_readonly("num_pages", &Prefix::num_pages)
        .def("__repr__", [](const Prefix& prefix) {
            return kvcore::detail::concat("PrefixHandle(", prefix.num_pages(), " pages)");
        });
    py::class_<PrefixTree, std::shared_ptr<PrefixTree>>(module, "PrefixTree")
        .def(py::init<std::int32_t>(), py::arg("page_size"))
        .def_property_readonly("page_size", &PrefixTree::page_size)
        .def_property_readonly("num_cached", &PrefixTree::num_cached)
        .def_property_readonly("num_evictable", &PrefixTree::num_evictable)
        .def_property_readonly("num_nodes", &PrefixTree::num_nodes)
        .def("match", &match, py::arg("tokens"), py::arg("extra_key") = py::none(),
             py::arg("cache_salt") = py::none())
        .def("insert", &insert, py::arg("tokens"), py::arg("pages"),
             py::arg("extra_key") = py::none(), py::arg("cache_salt") = py::none())
        .def(
            "pin", [](const PrefixTree& tree, Prefix& prefix) { checked(tree, prefix).pin(); },
            py::arg("handle"))
        .def(
            "unpin", [](const PrefixTree& tree, Prefix& prefix) { checked(tree, prefix).unpin(); },
            py::arg("handle"))
        .def("evict", &evict, py::arg("n"))
        .def("check_integrity", &PrefixTree::check_integrity)
        .def("__repr__", [](const PrefixTree& tree) {
            return kvcore::detail::concat("PrefixTree(page_size=", tree.page_size(), ", ",
                                          tree.num_cached(), " pages cached, ",
                                          tree.num_evictable(), " evictable)");
        });
}
