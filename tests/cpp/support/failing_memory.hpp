// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <type_traits>

#include "support/check.hpp"

/// Memory that runs out at a chosen allocation: the functions try every allocation of a call in
/// turn.
///
/// The program test_faults replaces operator new. If the linker supports it (KVCORE_WRAPS_MALLOC),
/// the program also replaces malloc, calloc, realloc, aligned_alloc and posix_memalign of all
/// statically linked code: see failing_memory.cpp. Its cases are in tests/cpp/faults:
///
///     TEST(nodes_are_inserted_or_not) {
///         failing_memory::each_site(
///             "insert",
///             [] { return Scene(...); },               // the same state every time
///             [](Scene& scene) { scene.insert(); },    // the call under test
///             [](Scene& scene) { return scene.text(); }); // everything observable
///         failing_memory::allocates_nothing("pin", make, [](Scene& scene) { scene.pin(); });
///     }
///
/// `make` returns a scene, which need not be movable. It must be deterministic, and it must build
/// the arguments of the call, because every allocation inside `call` is tried as well.
/// `call` may throw only std::bad_alloc; it must catch every error that it expects.
/// `digest` returns a value that compares and prints (usually a std::string), without addresses. It
/// is called once for each scene, after the call, so it may destroy the scene. It should check
/// integrity.
/// For every n, `each_site` fails the n-th allocation and, in a second run, all allocations from
/// the n-th on. It ends the program unless:
///   - a call that throws leaves the state unchanged, according to `digest`;
///   - the same call then succeeds, with the result of an undisturbed call;
///   - a call that does not need the memory has the same result.
/// Only allocations of the calling thread fail. Sanitizers work: other allocations use their
/// malloc.
namespace failing_memory {

/// Which allocations fail.
enum class Failing { kOnce, kFromThereOn };

namespace detail {

inline thread_local bool is_armed = false;
inline thread_local Failing failing = Failing::kOnce;
inline thread_local std::int64_t failing_at = 0;  // number of the allocation, from 1; 0: only count
inline thread_local std::int64_t num_seen = 0;    // allocations while armed
inline std::int64_t num_failed = 0;               // allocations

/// Return true if the current allocation must fail.
[[nodiscard]] inline bool fails() noexcept {
    if (!is_armed) return false;
    ++num_seen;
    if (failing_at == 0 || num_seen < failing_at) return false;
    return num_seen == failing_at || failing == Failing::kFromThereOn;
}

}  // namespace detail

/// Fails allocations of this thread during its lifetime.
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
    /// The number of allocations so far, including failed allocations.
    [[nodiscard]] std::int64_t num_seen() const noexcept { return detail::num_seen; }
};

namespace detail {

/// The result of a call.
struct Outcome {
    bool has_thrown;
    std::int64_t num_seen;
};

template <class Scene, class Call>
Outcome run(Scene& scene, Call& call, std::int64_t at, Failing failing) {
    std::string other;  // text of another exception
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
    if (!other.empty()) check::fail(__FILE__, __LINE__, "the call throws another error: " + other);
    return outcome;
}

/// The undisturbed call, which must succeed.
template <class Scene, class Call>
std::int64_t count(Scene& scene, Call& call) {
    const Outcome outcome = run(scene, call, 0, Failing::kOnce);
    if (outcome.has_thrown) check::fail(__FILE__, __LINE__, "the undisturbed call fails");
    return outcome.num_seen;
}

/// Return the digest of a scene. A broken law is reported together with the failed allocation.
template <class Scene, class Digest>
auto look_at(Scene& scene, Digest& digest) -> std::decay_t<decltype(digest(scene))> {
    try {
        return digest(scene);
    } catch (const std::exception& error) {
        check::fail(__FILE__, __LINE__, std::string("the state is broken: ") + error.what());
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

/// Try the call with each of its allocations failing, as above. The call must have an allocation.
/// Return the number of allocations.
template <class Make, class Call, class Digest>
std::int64_t each_site(const char* name, Make&& make, Call&& call, Digest&& digest) {
    check::note = name;
    auto untouched = make();
    const auto before = detail::look_at(untouched, digest);
    auto undisturbed = make();
    const std::int64_t sites = detail::count(undisturbed, call);
    const auto after = detail::look_at(undisturbed, digest);
    if (sites == 0) check::fail(__FILE__, __LINE__, "the call allocates nothing");
    for (std::int64_t site = 1; site <= sites; ++site) {
        for (const Failing failing : {Failing::kOnce, Failing::kFromThereOn}) {
            detail::name_place(name, site, failing);
            detail::try_site(make, call, digest, before, after, site, failing);
        }
    }
    check::note.clear();
    return sites;
}

/// The same for calls that may have no allocation, for example in random traffic.
template <class Make, class Call, class Digest>
std::int64_t any_site(const char* name, Make&& make, Call&& call, Digest&& digest) {
    auto undisturbed = make();
    if (detail::count(undisturbed, call) == 0) return 0;
    return each_site(name, make, call, digest);
}

/// Check that the call allocates nothing.
template <class Make, class Call>
void allocates_nothing(const char* name, Make&& make, Call&& call) {
    check::note = name;
    auto scene = make();
    const std::int64_t asked = detail::count(scene, call);
    CHECK_EQ(asked, 0);
    check::note.clear();
}

}  // namespace failing_memory
