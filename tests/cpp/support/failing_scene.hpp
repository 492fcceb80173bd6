// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "kvcore/errors.hpp"
#include "support/failing_memory.hpp"
#include "support/manager_text.hpp"

/// Calls of a manager when memory runs out: see failing_memory.hpp.
namespace failing_scene {

using Build = std::function<void(ManagerScene&)>;
using ScenePtr = std::unique_ptr<ManagerScene>;

/// A recipe for a state, which can be built repeatedly.
struct State {
    std::string name;
    Mode mode;
    std::int64_t num_blocks;
    Build build;

    [[nodiscard]] ScenePtr operator()() const {
        auto scene = std::make_unique<ManagerScene>(mode, num_blocks);
        build(*scene);
        return scene;
    }
    [[nodiscard]] std::string name_of(const char* verb) const {
        return std::string(verb) + ", " + mode.name + ", " + name;
    }
};

inline std::string text(const ScenePtr& scene) { return ManagerText(*scene).of_all(); }

/// Check that a call that throws changes nothing. The call may allocate nothing.
template <class Call>
void leaves_no_trace(const char* verb, const State& state, Call&& call) {
    failing_memory::any_site(
        state.name_of(verb).c_str(), state, [&](const ScenePtr& scene) { call(*scene); }, text);
}

/// Check that the call succeeds without memory: its allocations are optional, for example to shrink
/// a container. The result is always the undisturbed result.
template <class Call>
void needs_no_memory(const char* verb, const State& state, Call&& call) {
    const auto without_fail = [&](const ScenePtr& scene) {
        try {
            call(*scene);
        } catch (const std::bad_alloc&) {
            CHECK(false);
        }
    };
    failing_memory::any_site(state.name_of(verb).c_str(), state, without_fail, text);
}

template <class Call>
void allocates_nothing(const char* verb, const State& state, Call&& call) {
    failing_memory::allocates_nothing(state.name_of(verb).c_str(), state,
                                      [&](const ScenePtr& scene) { call(*scene); });
}

/// Check that the call is refused with `Error` and changes nothing, even if memory for the error's
/// text runs out.
template <class Error, class Call>
void is_refused(const char* verb, const State& state, Call&& call) {
    const auto refused = [&](ManagerScene& scene) {
        try {
            call(scene);
        } catch (const Error&) {
            return;
        }
        CHECK(false);
    };
    leaves_no_trace(verb, state, refused);
    auto scene = state();
    refused(*scene);
    auto untouched = state();
    CHECK_EQ(text(scene), text(untouched));
}

/// For calls that may stop half-way. After every failure, calls judge(scene, has thrown).
template <class Call, class Judge>
void each_outcome(const char* verb, const State& state, Call&& call, Judge&& judge) {
    namespace detail = failing_memory::detail;
    const std::string name = state.name_of(verb);
    check::note = name;
    auto undisturbed = state();
    const std::int64_t sites = detail::count(*undisturbed, call);
    for (std::int64_t site = 1; site <= sites; ++site) {
        for (const auto failing :
             {failing_memory::Failing::kOnce, failing_memory::Failing::kFromThereOn}) {
            detail::name_place(name.c_str(), site, failing);
            auto scene = state();
            const detail::Outcome outcome = detail::run(*scene, call, site, failing);
            CHECK(outcome.num_seen >= site);
            scene->manager.check_integrity();
            judge(*scene, outcome.has_thrown);
        }
    }
    check::note.clear();
}

}  // namespace failing_scene
