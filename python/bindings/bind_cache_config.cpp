// SPDX-License-Identifier: Apache-2.0
// CacheConfig from keywords, by the list of options in kvcore/cache_config.hpp.
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "kvcore/cache_config.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/eviction.hpp"

namespace py = pybind11;
using kvcore::CacheConfig;
using kvcore::detail::concat;

namespace {

[[noreturn]] void throw_type(const char* name, const py::handle& value, const char* wanted) {
    throw py::type_error(
        concat(name, " is a ", Py_TYPE(value.ptr())->tp_name, ", must be ", wanted));
}

/// Sets an option from a Python object. Each type of a field has an overload.
void set_option(const char* name, const py::handle& value, bool& field) {
    if (!PyBool_Check(value.ptr())) throw_type(name, value, "a bool");
    field = value.ptr() == Py_True;
}

template <class Number, std::enable_if_t<std::is_integral_v<Number>, int> = 0>
void set_option(const char* name, const py::handle& value, Number& field) {
    if (PyIndex_Check(value.ptr()) == 0 || PyBool_Check(value.ptr())) {
        throw_type(name, value, "an int");
    }
    const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!number) throw py::error_already_set();
    int overflow = 0;
    const long long found = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (found == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    using Limits = std::numeric_limits<Number>;
    if (overflow != 0 || found < Limits::min() || found > Limits::max()) {
        throw py::value_error(concat(name, " is ", py::str(number).cast<std::string>(),
                                     ", must be ", Limits::min(), " .. ", Limits::max()));
    }
    field = static_cast<Number>(found);
}

void set_option(const char* name, const py::handle& value, std::string& field) {
    if (!PyBytes_Check(value.ptr())) throw_type(name, value, "bytes");
    field = value.cast<std::string>();
}

void set_option(const char* name, const py::handle& value, kvcore::EvictionConfig& field) {
    const auto [order, attention_tokens] = py::module_::import("kvcore.policies")
                                               .attr("resolved")(value, name)
                                               .cast<std::pair<std::string, std::int32_t>>();
    field = {kvcore::eviction_order(order), attention_tokens};
}

void set_option(const char* name, const py::handle& value, kvcore::WritePolicy& field) {
    if (!PyUnicode_Check(value.ptr())) throw_type(name, value, "the name of a policy");
    field = kvcore::write_policy(value.cast<std::string>());
}

void set_option(const char* name, const py::handle& value, const kvcore::StandIns*& field) {
    if (!PyCapsule_IsValid(value.ptr(), "kvcore.StandIns")) throw_type(name, value, "a capsule");
    field =
        static_cast<const kvcore::StandIns*>(PyCapsule_GetPointer(value.ptr(), "kvcore.StandIns"));
}

kvcore::GroupKind group_kind(const std::string& name) {
    if (name == "full") return kvcore::GroupKind::kFull;
    if (name == "sliding") return kvcore::GroupKind::kSliding;
    if (name == "chunked") return kvcore::GroupKind::kChunked;
    throw py::value_error("the kind of a group is '" + name +
                          "', must be 'full', 'sliding' or 'chunked'");
}

/// From (kind, span in tokens, bundles, tokens of a page) of each group.
void set_option(const char*, const py::handle& value, std::vector<kvcore::CacheGroup>& field) {
    using Group = std::tuple<std::string, std::int64_t, std::int32_t, std::int32_t>;
    for (const auto& [kind, span, num_bundles, page] : value.cast<std::vector<Group>>()) {
        field.push_back({group_kind(kind), span, num_bundles, page});
    }
}

/// From the interval of each group.
void set_option(const char*, const py::handle& value, std::vector<kvcore::StateGroup>& field) {
    for (const auto interval : value.cast<std::vector<std::int64_t>>()) field.push_back({interval});
}

/// From (reserved pages, maximum pages or None) of each tenant.
void set_option(const char*, const py::handle& value, std::vector<kvcore::TenantQuota>& field) {
    using Quota = std::pair<std::int64_t, std::optional<std::int64_t>>;
    for (const auto& [reserved, most] : value.cast<std::vector<Quota>>()) {
        field.push_back({reserved, most.value_or(kvcore::TenantQuota::kNoCeiling)});
    }
}

CacheConfig config_of(const py::kwargs& options) {
    CacheConfig config;
    std::size_t used = 0;
    kvcore::for_each_option([&](const char* name, auto member, kvcore::OptionBounds) {
        if (!options.contains(name)) return;
        set_option(name, options[name], config.*member);
        ++used;
    });
    if (used == options.size()) return config;
    for (const auto& item : options) {
        bool is_known = false;
        const auto given = item.first.cast<std::string>();
        kvcore::for_each_option(
            [&](const char* name, auto, kvcore::OptionBounds) { is_known |= given == name; });
        if (!is_known) {
            throw py::type_error(
                concat("'", given, "' is not an option, must be one of ", "CacheConfig.options"));
        }
    }
    return config;
}

py::tuple option_names() {
    py::list names;
    kvcore::for_each_option(
        [&](const char* name, auto, kvcore::OptionBounds) { names.append(name); });
    return py::tuple(names);
}

}  // namespace

void bind_cache_config(py::module_& module) {
    py::options options;
    options.disable_function_signatures();
    py::class_<CacheConfig>(
        module, "CacheConfig",
        "The configuration of a cache: the fields of kvcore::CacheConfig as "
        "keywords.\n\nAn option that is not given has the value of the C++ field.")
        .def(py::init(&config_of))
        .def_property_readonly_static(
            "options", [](const py::object&) { return option_names(); },
            "The names of the options, in the order of the C++ fields.")
        .def("_capsule",
             [](CacheConfig& config) { return py::capsule(&config, "kvcore.CacheConfig"); });
}
