// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "array_args.hpp"
#include "bindings.hpp"
#include "cache_manager_docs.hpp"
#include "kvcore/cache_manager.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/eviction.hpp"
#include "kvcore/extra_keys.hpp"

namespace py = pybind11;
namespace docs = kvcore::python::docs;
using kvcore::CacheManager;
using kvcore::PinHandle;
using kvcore::RequestView;
using kvcore::SequenceHandle;
using kvcore::python::id_array;
using kvcore::python::Int32Arg;

namespace {

using Key = std::optional<std::string>;
using Bound = std::optional<std::int64_t>;

/// (kind, span in tokens, bundles, tokens of a page).
using Group = std::tuple<std::string, std::int64_t, std::int32_t, std::int32_t>;

/// (reserved pages, maximum pages).
using Quota = std::pair<std::int64_t, std::optional<std::int64_t>>;

kvcore::GroupKind group_kind(const std::string& name) {
    if (name == "full") return kvcore::GroupKind::kFull;
    if (name == "sliding") return kvcore::GroupKind::kSliding;
    if (name == "chunked") return kvcore::GroupKind::kChunked;
    throw py::value_error("the kind of a group is '" + name +
                          "', must be 'full', 'sliding' or 'chunked'");
}

kvcore::EvictionConfig eviction_config(const py::object& eviction) {
    const auto [order, attention_tokens] = py::module_::import("kvcore.policies")
                                               .attr("resolved")(eviction)
                                               .cast<std::pair<std::string, std::int32_t>>();
    return {kvcore::eviction_order(order), attention_tokens};
}

CacheManager* make_manager(
    std::int64_t num_blocks, std::int32_t page_size, std::int64_t max_sequences,
    std::int64_t max_seq_len, std::int32_t num_replicas, bool prefix_caching, bool dedup,
    std::int32_t partial_page_reuse, std::int64_t host_pages, const py::object& eviction,
    const std::vector<Group>& groups, bool reserve_chunks, std::int64_t max_draft_tokens,
    const std::vector<Quota>& quotas, const std::vector<std::int64_t>& states,
    std::int64_t num_states, std::int64_t num_host_states, const std::string& write_policy,
    std::int32_t write_threshold, const py::object& host_eviction, std::int32_t host_min_priority,
    bool has_stores, const std::string& key_seed, const py::object& stand_ins,
    std::int64_t event_pages, kvcore::BlockId first_page, bool keep_windows) {
    kvcore::CacheConfig config;
    config.write_policy = kvcore::write_policy(write_policy);
    config.write_threshold = write_threshold;
    config.host_eviction = eviction_config(host_eviction);
    config.host_min_priority = host_min_priority;
    config.has_stores = has_stores;
    config.key_seed = key_seed;
    config.event_pages = event_pages;
    if (!stand_ins.is_none()) {
        config.stand_ins = static_cast<const kvcore::StandIns*>(
            PyCapsule_GetPointer(stand_ins.ptr(), "kvcore.StandIns"));
        if (config.stand_ins == nullptr) throw py::error_already_set();
    }
    for (const std::int64_t interval : states) config.states.push_back({interval});
    config.num_state_slots = num_states;
    config.num_host_state_slots = num_host_states;
    for (const auto& [reserved, most] : quotas) {
        config.quotas.push_back({reserved, most.value_or(kvcore::TenantQuota::kNoCeiling)});
    }
    for (const auto& [kind, span, num_bundles, page] : groups) {
        config.groups.push_back({group_kind(kind), span, num_bundles, page});
    }
    config.reserve_chunks = reserve_chunks;
    config.max_draft_tokens = max_draft_tokens;
    config.num_pages = num_blocks;
    config.first_page = first_page;
    config.keep_windows = keep_windows;
    config.page_size = page_size;
    config.max_sequences = max_sequences;
    config.max_seq_len = max_seq_len;
    config.num_replicas = num_replicas;
    config.prefix_caching = prefix_caching;
    config.dedup = dedup;
    config.partial_page_reuse = partial_page_reuse;
    config.host_pages = host_pages;
    config.eviction = eviction_config(eviction);
    return new CacheManager(config);
}

/// A RequestView and the data to which it points.
struct Request {
    Request(SequenceHandle sequence, const py::object& tokens, std::int64_t start,
            std::optional<std::int64_t> active, const Key& extra_key, const Key& cache_salt)
        : arg(tokens, "tokens", Int32Arg::Memory::kBorrowed),
          name(kvcore::namespace_name(extra_key, cache_salt)) {
        view = {sequence, arg.data(), start, active.value_or(arg.size()), arg.size(), name};
    }

    Int32Arg arg;
    std::string name;
    RequestView view;
};

kvcore::ReserveOptions options_of(Bound max_hit, std::int64_t keep_free, Bound must_fit) {
    kvcore::ReserveOptions options;
    options.max_hit = max_hit.value_or(kvcore::ReserveOptions::kUnlimited);
    options.keep_free = keep_free;
    options.must_fit = must_fit.value_or(0);
    return options;
}

py::tuple reserve(CacheManager& manager, SequenceHandle sequence, const py::object& tokens,
                  std::int64_t start, std::optional<std::int64_t> active, std::int64_t num_steps,
                  const Key& extra_key, const Key& cache_salt, Bound max_hit,
                  std::int64_t keep_free, Bound must_fit) {
    Request request(sequence, tokens, start, active, extra_key, cache_salt);
    const kvcore::ReserveOptions options = options_of(max_hit, keep_free, must_fit);
    const bool fits =
        manager.reserve(request.view, num_steps, nullptr, options) == kvcore::ReserveStatus::kOk;
    return py::make_tuple(fits, request.view.start, request.view.active);
}

kvcore::ReservePlan plan(const CacheManager& manager, SequenceHandle sequence,
                         const py::object& tokens, std::int64_t start,
                         std::optional<std::int64_t> active, std::int64_t num_steps,
                         const Key& extra_key, const Key& cache_salt, Bound max_hit,
                         std::int64_t keep_free, Bound must_fit) {
    const Request request(sequence, tokens, start, active, extra_key, cache_salt);
    return manager.plan(request.view, num_steps, options_of(max_hit, keep_free, must_fit));
}

std::int64_t forget(CacheManager& manager, const py::object& pages, std::int32_t replica) {
    const Int32Arg ids(pages, "pages");
    return manager.forget(replica, ids.data(), ids.size());
}

kvcore::HeldPages hold(CacheManager& manager, const py::object& pages, std::int32_t replica) {
    const Int32Arg ids(pages, "pages");
    return manager.hold(replica, ids.data(), ids.size());
}

py::array_t<std::int32_t> commit(CacheManager& manager, SequenceHandle sequence,
                                 const py::object& tokens, std::int64_t written) {
    const Int32Arg arg(tokens, "tokens", Int32Arg::Memory::kBorrowed);
    if (written < 0 || written > arg.size()) {
        throw py::value_error(kvcore::detail::concat("written is ", written, ", must be 0 .. ",
                                                     arg.size(), ", the number of tokens"));
    }
    // A view needs a token to run; commit reads no token after the written tokens.
    RequestView view{sequence, arg.data(), written, written + 1, written + 1, {}};
    std::vector<kvcore::PageSwap> swaps;
    manager.commit({&view, 1}, swaps);
    py::array_t<std::int32_t> out({static_cast<py::ssize_t>(swaps.size()), py::ssize_t{2}});
    for (std::size_t i = 0; i < swaps.size(); ++i) {
        out.mutable_at(i, 0) = swaps[i].column;
        out.mutable_at(i, 1) = swaps[i].page;
    }
    return out;
}

py::tuple match(CacheManager& manager, const py::object& tokens, std::int32_t replica,
                const Key& extra_key, const Key& cache_salt, bool touch) {
    const Int32Arg arg(tokens, "tokens", Int32Arg::Memory::kBorrowed);
    const std::string name = kvcore::namespace_name(extra_key, cache_salt);
    std::vector<kvcore::BlockId> pages;
    const std::int64_t depth = touch ? manager.touch(replica, name, arg.data(), arg.size(), &pages)
                                     : manager.match(replica, name, arg.data(), arg.size(), &pages);
    return py::make_tuple(depth * manager.config().page_size, id_array(pages));
}

PinHandle pin(CacheManager& manager, const py::object& tokens, std::int32_t replica,
              const Key& extra_key, const Key& cache_salt) {
    const Int32Arg arg(tokens, "tokens", Int32Arg::Memory::kBorrowed);
    return manager.pin(replica, kvcore::namespace_name(extra_key, cache_salt), arg.data(),
                       arg.size());
}

void set_tenant(CacheManager& manager, SequenceHandle sequence,
                std::optional<std::int32_t> tenant) {
    kvcore::RequestPriority terms;
    terms.tenant = tenant.value_or(kvcore::RequestPriority::kNoTenant);
    manager.set_priority(sequence, terms);
}

py::array_t<std::int32_t> take_copies(CacheManager& manager) {
    const std::vector<kvcore::PageMove> copies = manager.take_copies();
    py::array_t<std::int32_t> out({static_cast<py::ssize_t>(copies.size()), py::ssize_t{4}});
    for (std::size_t i = 0; i < copies.size(); ++i) {
        out.mutable_at(i, 0) = copies[i].replica;
        out.mutable_at(i, 1) = copies[i].source;
        out.mutable_at(i, 2) = copies[i].destination;
        out.mutable_at(i, 3) = copies[i].num_tokens;
    }
    return out;
}

py::array_t<std::int32_t> take_state_copies(CacheManager& manager) {
    const std::vector<kvcore::StateMove> copies = manager.take_state_copies();
    py::array_t<std::int32_t> out({static_cast<py::ssize_t>(copies.size()), py::ssize_t{3}});
    for (std::size_t i = 0; i < copies.size(); ++i) {
        out.mutable_at(i, 0) = copies[i].replica;
        out.mutable_at(i, 1) = copies[i].source;
        out.mutable_at(i, 2) = copies[i].destination;
    }
    return out;
}

}  // namespace

void bind_cache_manager(py::module_& module) {
    py::options options;
    options.disable_function_signatures();
    bind_cache_values(module);
    py::class_<CacheManager>(module, "CacheManager", docs::kManager)
        .def(py::init(&make_manager), py::kw_only(), py::arg("num_blocks"), py::arg("page_size"),
             py::arg("max_sequences"), py::arg("max_seq_len"), py::arg("num_replicas") = 1,
             py::arg("prefix_caching") = true, py::arg("dedup") = true,
             py::arg("partial_page_reuse") = 1, py::arg("host_pages") = 0,
             py::arg("eviction") = "lru", py::arg("groups") = std::vector<Group>(),
             py::arg("reserve_chunks") = false, py::arg("max_draft_tokens") = 0,
             py::arg("quotas") = std::vector<Quota>(),
             py::arg("states") = std::vector<std::int64_t>(), py::arg("num_states") = 0,
             py::arg("num_host_states") = 0, py::arg("write_policy") = "write_through",
             py::arg("write_threshold") = 2, py::arg("host_eviction") = "lru",
             py::arg("host_min_priority") = 0, py::arg("has_stores") = false,
             py::arg("key_seed") = py::bytes(), py::arg("stand_ins") = py::none(),
             py::arg("event_pages") = 0, py::arg("first_page") = 0, py::arg("keep_windows") = false)
        .def("claim", &CacheManager::claim, py::arg("replica") = 0, docs::kClaim)
        .def("contains", &CacheManager::contains, py::arg("sequence"), docs::kContains)
        .def("replica_of", &CacheManager::replica_of, py::arg("sequence"), docs::kReplicaOf)
        .def(
            "pages_of",
            [](const CacheManager& manager, SequenceHandle sequence, std::int32_t bundle,
               std::int64_t first) { return id_array(manager.pages_of(sequence, bundle, first)); },
            py::arg("sequence"), py::arg("bundle") = 0, py::arg("first") = 0, docs::kPagesOf)
        .def(
            "release", [](CacheManager& self, SequenceHandle sequence) { self.release(sequence); },
            py::arg("sequence"), docs::kRelease)
        .def("reserve", &reserve, py::arg("sequence"), py::arg("tokens"), py::arg("start") = 0,
             py::kw_only(), py::arg("active") = py::none(), py::arg("num_steps") = 1,
             py::arg("extra_key") = py::none(), py::arg("cache_salt") = py::none(),
             py::arg("max_hit") = py::none(), py::arg("keep_free") = 0,
             py::arg("must_fit") = py::none(), docs::kReserve)
        .def("plan", &plan, py::arg("sequence"), py::arg("tokens"), py::arg("start") = 0,
             py::kw_only(), py::arg("active") = py::none(), py::arg("num_steps") = 1,
             py::arg("extra_key") = py::none(), py::arg("cache_salt") = py::none(),
             py::arg("max_hit") = py::none(), py::arg("keep_free") = 0,
             py::arg("must_fit") = py::none(), docs::kPlan)
        .def("commit", &commit, py::arg("sequence"), py::arg("tokens"), py::arg("written"),
             docs::kCommit)
        .def("match", &match, py::arg("tokens"), py::arg("replica") = 0,
             py::arg("extra_key") = py::none(), py::arg("cache_salt") = py::none(), py::kw_only(),
             py::arg("touch") = false, docs::kMatch)
        .def("pin", &pin, py::arg("tokens"), py::arg("replica") = 0,
             py::arg("extra_key") = py::none(), py::arg("cache_salt") = py::none(), docs::kPin)
        .def("unpin", &CacheManager::unpin, py::arg("pin"), docs::kUnpin)
        .def("forget", &forget, py::arg("pages"), py::arg("replica") = 0, docs::kForget)
        .def("hold", &hold, py::arg("pages"), py::arg("replica") = 0, py::keep_alive<0, 1>(),
             docs::kHold)
        .def(
            "next_pages",
            [](const CacheManager& manager, std::int32_t replica) {
                return id_array(manager.next_pages(replica));
            },
            py::arg("replica") = 0, docs::kNextPages)
        .def("take_copies", &take_copies, docs::kTakeCopies)
        .def("take_state_copies", &take_state_copies, docs::kTakeStateCopies)
        .def("state_of", &CacheManager::state_of, py::arg("sequence"), docs::kStateOf)
        .def("state_stats", &CacheManager::state_stats, py::arg("replica") = 0, docs::kStateStats)
        .def("reset_prefix_cache", &CacheManager::reset_prefix_cache, docs::kResetPrefixCache)
        .def("stats", &CacheManager::stats, py::arg("replica") = 0, docs::kStats)
        .def("group_stats", &CacheManager::group_stats, py::arg("replica") = 0, docs::kGroupStats)
        .def("set_tenant", &set_tenant, py::arg("sequence"), py::arg("tenant"), docs::kSetTenant)
        .def("tenant_stats", &CacheManager::tenant_stats, py::arg("replica") = 0,
             docs::kTenantStats)
        .def_property_readonly(
            "metrics", &CacheManager::metrics,
            "Counters summed over replicas, a copy: input_tokens, cache_tokens, copied_tokens, "
            "evicted_pages, peak_used_pages, stored_pages, loaded_pages, loaded_tokens; evicted "
            "and "
            "host_evicted are EvictionCounts.")
        .def("reset_metrics", &CacheManager::reset_metrics, docs::kResetMetrics)
        .def("check_integrity", &CacheManager::check_integrity, docs::kCheckIntegrity)
        .def("_late_reads", &CacheManager::late_reads, py::arg("replica"),
             "Return the highest mark of stores that may still read pages that were reallocated "
             "since; 0 if no store reads.")
        .def("_capsule",
             [](CacheManager& manager) { return py::capsule(&manager, "kvcore.CacheManager"); })
        .def("__repr__", [](const CacheManager& manager) {
            std::string text = "CacheManager(";
            for (std::int32_t i = 0; i < manager.config().num_replicas; ++i) {
                const kvcore::PoolStats stats = manager.stats(i);
                text += kvcore::detail::concat(i > 0 ? "; " : "", stats.total_pages,
                                               " pages: ", stats.free_pages, " free, ",
                                               stats.total_pages - stats.available_pages(),
                                               " used, ", stats.evictable_pages, " evictable");
            }
            return text + ")";
        });
}
