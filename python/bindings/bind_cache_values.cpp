// SPDX-License-Identifier: Apache-2.0
// The values that CacheManager returns.
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>

#include "array_args.hpp"
#include "bindings.hpp"
#include "cache_manager_docs.hpp"
#include "kvcore/cache_manager.hpp"

namespace py = pybind11;
namespace docs = kvcore::python::docs;
using kvcore::HeldPages;
using kvcore::PinHandle;
using kvcore::SequenceHandle;

void bind_cache_values(py::module_& module) {
    py::class_<SequenceHandle>(module, "SequenceHandle",
                               "A claimed sequence; stale after its release.")
        .def("__eq__", [](SequenceHandle a, SequenceHandle b) { return a == b; })
        .def("__hash__", [](SequenceHandle handle) {
            return (static_cast<std::uint64_t>(handle.generation) << 32) | handle.index;
        });
    py::class_<PinHandle>(module, "PinHandle", "A pinned prefix of num_tokens tokens.")
        .def_readonly("num_tokens", &PinHandle::num_tokens);
    py::class_<kvcore::EvictionCounts>(module, "EvictionCounts",
                                       "Evicted cached pages of a tier, by reason.")
        .def_readonly("policy", &kvcore::EvictionCounts::policy)
        .def_readonly("window", &kvcore::EvictionCounts::window)
        .def_readonly("unreachable", &kvcore::EvictionCounts::unreachable)
        .def_readonly("reset", &kvcore::EvictionCounts::reset);
    py::class_<kvcore::Metrics>(module, "Metrics", "Counters since construction or the last reset.")
        .def_readonly("input_tokens", &kvcore::Metrics::input_tokens)
        .def_readonly("cache_tokens", &kvcore::Metrics::cache_tokens)
        .def_readonly("copied_tokens", &kvcore::Metrics::copied_tokens)
        .def_readonly("evicted_pages", &kvcore::Metrics::evicted_pages)
        .def_readonly("evicted", &kvcore::Metrics::evicted)
        .def_readonly("host_evicted", &kvcore::Metrics::host_evicted)
        .def_readonly("peak_used_pages", &kvcore::Metrics::peak_used_pages)
        .def_readonly("stored_pages", &kvcore::Metrics::stored_pages)
        .def_readonly("loaded_pages", &kvcore::Metrics::loaded_pages)
        .def_readonly("loaded_tokens", &kvcore::Metrics::loaded_tokens)
        .def_readonly("generated_tokens", &kvcore::Metrics::generated_tokens)
        .def_readonly("resumed_tokens", &kvcore::Metrics::resumed_tokens)
        .def_readonly("recomputed_tokens", &kvcore::Metrics::recomputed_tokens)
        .def_readonly("missed_pages", &kvcore::Metrics::missed_pages);
    py::class_<kvcore::PoolStats>(module, "PoolStats", "Pages of one replica at one moment.")
        .def_readonly("total_pages", &kvcore::PoolStats::total_pages)
        .def_readonly("free_pages", &kvcore::PoolStats::free_pages)
        .def_readonly("cached_pages", &kvcore::PoolStats::cached_pages)
        .def_readonly("evictable_pages", &kvcore::PoolStats::evictable_pages)
        .def_readonly("num_sequences", &kvcore::PoolStats::num_sequences)
        .def_readonly("host_pages", &kvcore::PoolStats::host_pages)
        .def_readonly("host_cached_pages", &kvcore::PoolStats::host_cached_pages)
        .def_property_readonly("available_pages", &kvcore::PoolStats::available_pages);
    py::class_<kvcore::GroupStats>(module, "GroupStats",
                                   "Pages of one group of layers in one replica at one moment.")
        .def_readonly("held_pages", &kvcore::GroupStats::held_pages)
        .def_readonly("cached_pages", &kvcore::GroupStats::cached_pages)
        .def_readonly("holes", &kvcore::GroupStats::holes)
        .def_readonly("given_back", &kvcore::GroupStats::given_back)
        .def_readonly("filled", &kvcore::GroupStats::filled)
        .def_readonly("stored_pages", &kvcore::GroupStats::stored_pages)
        .def_readonly("loaded_pages", &kvcore::GroupStats::loaded_pages);
    py::class_<kvcore::TenantStats>(module, "TenantStats",
                                    "Pages of one tenant in one replica at one moment.")
        .def_readonly("held_pages", &kvcore::TenantStats::held_pages)
        .def_readonly("reserved_pages", &kvcore::TenantStats::reserved_pages)
        .def_property_readonly("max_pages",
                               [](const kvcore::TenantStats& stats) {
                                   std::optional<std::int64_t> most = stats.max_pages;
                                   if (most == kvcore::TenantQuota::kNoCeiling) most.reset();
                                   return most;
                               })
        .def_readonly("refused", &kvcore::TenantStats::refused)
        .def_readonly("input_tokens", &kvcore::TenantStats::input_tokens)
        .def_readonly("cache_tokens", &kvcore::TenantStats::cache_tokens)
        .def_readonly("generated_tokens", &kvcore::TenantStats::generated_tokens);
    py::class_<kvcore::StateStats>(module, "StateStats",
                                   "Slots of states of one replica at one moment.")
        .def_readonly("total_slots", &kvcore::StateStats::total_slots)
        .def_readonly("used_slots", &kvcore::StateStats::used_slots)
        .def_readonly("checkpoints", &kvcore::StateStats::checkpoints)
        .def_readonly("available_slots", &kvcore::StateStats::available_slots)
        .def_readonly("checkpoint_hits", &kvcore::StateStats::checkpoint_hits)
        .def_readonly("checkpoints_made", &kvcore::StateStats::checkpoints_made)
        .def_readonly("host_slots", &kvcore::StateStats::host_slots)
        .def_readonly("host_checkpoints", &kvcore::StateStats::host_checkpoints)
        .def_readonly("stored_checkpoints", &kvcore::StateStats::stored_checkpoints)
        .def_readonly("loaded_checkpoints", &kvcore::StateStats::loaded_checkpoints)
        .def_readonly("evicted_checkpoints", &kvcore::StateStats::evicted_checkpoints);
    py::class_<kvcore::ReservePlan>(module, "ReservePlan", "The result of a reservation made now.")
        .def_readonly("hit_tokens", &kvcore::ReservePlan::hit_tokens)
        .def_readonly("new_pages", &kvcore::ReservePlan::new_pages)
        .def_readonly("evicted_pages", &kvcore::ReservePlan::evicted_pages)
        .def_readonly("copied_tokens", &kvcore::ReservePlan::copied_tokens)
        .def_readonly("fits", &kvcore::ReservePlan::fits)
        .def_readonly("active", &kvcore::ReservePlan::active)
        .def_readonly("evictable_hit_pages", &kvcore::ReservePlan::evictable_hit_pages);
    py::class_<HeldPages>(module, "HeldPages", docs::kHeldPages)
        .def_property_readonly(
            "pages", [](const HeldPages& held) { return kvcore::python::id_array(held.pages()); },
            "The ids in the order of the call, int32 [n]; a copy.")
        .def("let_go", &HeldPages::let_go, docs::kLetGo)
        .def(
            "__enter__", [](HeldPages& held) -> HeldPages& { return held; },
            py::return_value_policy::reference)
        .def("__exit__",
             [](HeldPages& held, const py::args&) {
                 if (!held.pages().empty()) held.let_go();
             })
        .def("__len__", [](const HeldPages& held) { return held.pages().size(); });
}
