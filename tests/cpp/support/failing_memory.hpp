// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <type_traits>

#include "support/check.hpp"

/// Memory that runs out where a test wants it to: tries every allocation of a call in turn.
///
/// The program test_faults replaces operator new and, where the linker can (KVCORE_WRAPS_MALLOC),
/// malloc, calloc, realloc, aligned_alloc and posix_memalign of everything linked statically: see
/// failing_memory.cpp. Its cases lie in tests/cpp/faults:
///
///     TEST(nodes_are_inserted_or_not) {
///         failing_memory::each_site(
///             "insert",
///             [] { return Scene(...); },               // the same state every time
///             [](Scene& scene) { scene.insert(); },    // the call under test
///             [](Scene& scene) { return scene.text(); }); // all that one can see of the state
///         failing_memory::allocates_nothing("pin", make, [](Scene& scene) { scene.pin(); });
///     }
///
/// `make` returns a scene, which need not be movable. It has to be deterministic. What the call
/// takes is built there: whatever `call` allocates itself is tried as well.
/// `call` may throw std::bad_alloc and nothing else; errors that it expects it catches.
/// `digest` returns something that compares and prints (a std::string, most of the time), without
/// addresses in it. Each scene is asked once, after the call, so it may take the scene apart; it
/// should check integrity.
/// `each_site` fails the program unless, for every n, with the n-th allocation failing and also
/// with all from the n-th on failing:
///   - a call that throws leaves what it found, as `digest` tells;
///   - the same call then succeeds, and ends where a call ends that nothing disturbed;
///   - a call that does without the memory ends there too.
/// Only the thread that calls is failed. Sanitizers work: what is not failed goes to their malloc.
namespace failing_memory {

/// Which allocations fail.
enum class Failing { kOnce, kFromThereOn };

namespace detail {

inline thread_local bool is_armed = false;
inline thread_local Failing failing = Failing::kOnce;
inline thread_local std::int64_t failing_at = 0;  // from 1; 0: none, they are counted only
inline thread_local std::int64_t num_seen = 0;    // while armed
inline std::int64_t num_failed = 0;               // allocations

/// Whether the allocation that is asked for now fails.
[[nodiscard]] inline bool fails() noexcept {
    if (!is_armed) return false;
    ++num_seen;
    if (failing_at == 0 || num_seen < failing_at) return false;
    return num_seen == failing_at || failing == Failing::kFromThereOn;
}

}  // namespace detail

/// Fails allocations of this thread for as long as it lives.
class Injection {
   public:
    explicit Injection(std::int64_t at, Failing failing = Failing::kOnce) noexcept {
        detail::failing = failing;
        detail::failing_at = at;
        detail::num_seen = 0;
        detail::is_armed = true;
    }
    Injection(const Injection&) = delete;
    Injection& operator=(const Injection&) = delete;
    ~Injection() {
        detail::is_armed = false;
        if (detail::failing_at > 0 && detail::num_seen >= detail::failing_at) ++detail::num_failed;
    }
    /// Allocations asked for so far, the failed ones among them.
    [[nodiscard]] std::int64_t num_seen() const noexcept { return detail::num_seen; }
};

namespace detail {

/// What came of a call.
struct Outcome {
    bool has_thrown;
    std::int64_t num_seen;
};

template <class Scene, class Call>
Outcome run(Scene& scene, Call& call, std::int64_t at, Failing failing) {
    std::string other;  // what else was thrown
    Outcome outcome{};
    {
        const Injection injection(at, failing);
        try {
            call(scene);
        } catch (const std::bad_alloc&) {
            outcome.has_thrown = true;
        } catch (const std::exception& error) {
            is_armed = false;
            other = error.what();
        }
        outcome.num_seen = injection.num_seen();
    }
    if (!other.empty()) check::fail(__FILE__, __LINE__, "the call throws something else: " + other);
    return outcome;
}

/// The undisturbed call: has to succeed.
template <class Scene, class Call>
std::int64_t count(Scene& scene, Call& call) {
    const Outcome outcome = run(scene, call, 0, Failing::kOnce);
    if (outcome.has_thrown) check::fail(__FILE__, __LINE__, "the call fails by itself");
    return outcome.num_seen;
}

/// What can be seen of a scene; laws that do not hold there are told with the place.
template <class Scene, class Digest>
auto look_at(Scene& scene, Digest& digest) -> std::decay_t<decltype(digest(scene))> {
    try {
        return digest(scene);
    } catch (const std::exception& error) {
        check::fail(__FILE__, __LINE__, std::string("what is left is broken: ") + error.what());
    }
}

inline void name_place(const char* name, std::int64_t site, Failing failing) {
    check::note = std::string(name) + ", allocation " + std::to_string(site) +
                  (failing == Failing::kOnce ? " failing" : " and all after it failing");
    check::verb = "";
}

template <class Make, class Call, class Digest, class Text>
void try_site(Make& make, Call& call, Digest& digest, const Text& before, const Text& after,
              std::int64_t site, Failing failing) {
    auto failed = make();
    const Outcome outcome = run(failed, call, site, failing);
    if (outcome.num_seen < site) check::fail(__FILE__, __LINE__, "make() is not deterministic");
    const auto found = look_at(failed, digest);
    CHECK_EQ(found, outcome.has_thrown ? before : after);
    if (!outcome.has_thrown) return;
    auto again = make();
    static_cast<void>(run(again, call, site, failing));
    static_cast<void>(count(again, call));
    const auto second = look_at(again, digest);
    CHECK_EQ(second, after);
}

}  // namespace detail

/// Tries the call with every allocation of it failing, as above. It has to have at least one.
/// Returns how many it has.
template <class Make, class Call, class Digest>
std::int64_t each_site(const char* name, Make&& make, Call&& call, Digest&& digest) {
    check::note = name;
    auto untouched = make();
    const auto before = detail::look_at(untouched, digest);
    auto undisturbed = make();
    const std::int64_t sites = detail::count(undisturbed, call);
    const auto after = detail::look_at(undisturbed, digest);
    if (sites == 0) check::fail(__FILE__, __LINE__, "the call has no allocation to fail");
    for (std::int64_t site = 1; site <= sites; ++site) {
        for (const Failing failing : {Failing::kOnce, Failing::kFromThereOn}) {
            detail::name_place(name, site, failing);
            detail::try_site(make, call, digest, before, after, site, failing);
        }
    }
    check::note.clear();
    return sites;
}

/// The same for calls of which some have no allocation, such as those of random traffic.
template <class Make, class Call, class Digest>
std::int64_t any_site(const char* name, Make&& make, Call&& call, Digest&& digest) {
    auto undisturbed = make();
    if (detail::count(undisturbed, call) == 0) return 0;
    return each_site(name, make, call, digest);
}

/// The call works without asking for any memory.
template <class Make, class Call>
void allocates_nothing(const char* name, Make&& make, Call&& call) {
    check::note = name;
    auto scene = make();
    const std::int64_t asked = detail::count(scene, call);
    CHECK_EQ(asked, 0);
    check::note.clear();
}

}  // namespace failing_memory
