// SPDX-License-Identifier: Apache-2.0
// Write-back and selective stores when memory runs out: room is made all the same, a failed call
// can be made again, and no page stays held.
#include <memory>
#include <new>
#include <vector>

#include "support/failing_memory.hpp"
#include "support/host_fixture.hpp"

namespace tests::faults::write_policies {

using failing_memory::Failing;
using failing_memory::Injection;
using kvcore::ReserveStatus;
using kvcore::Transfers;
using kvcore::WritePolicy;

namespace {

constexpr std::int64_t kPages = 12;

struct Scene : HostFixture {
    using HostFixture::HostFixture;

    kvcore::CacheManager& core = manager;
    Request asking = claim(count_up(500, 20));
    Transfers open;

    void settle(Request& request) {
        for (;;) {
            kvcore::RequestView view = request.view();
            Transfers transfers;
            const ReserveStatus status = core.reserve(view, 1, &transfers);
            request.start = view.start;
            request.active = view.active;
            finish(transfers);
            if (status == ReserveStatus::kOk) return;
            CHECK_EQ(status, ReserveStatus::kPending);
        }
    }
    void serve(const Tokens& tokens) {
        Request request = claim(tokens);
        settle(request);
        finish(commit(request, 0));
        core.release(request.sequence);
    }
    /// Tries once to reserve the request.
    void attempt() {
        kvcore::RequestView view = asking.view();
        if (core.reserve(view, 1, &open) == ReserveStatus::kPending) return;
        asking.start = view.start;
        asking.active = view.active;
    }
    void end() {
        core.check_integrity();
        finish(open);
        settle(asking);
        core.release(asking.sequence);
        const kvcore::PoolStats stats = core.stats(0);
        CHECK_EQ(stats.free_pages + stats.evictable_pages, kPages);
    }
};

kvcore::CacheConfig config(WritePolicy policy, bool has_groups) {
    kvcore::CacheConfig config = HostFixture::config(kPages, 40);
    config.write_policy = policy;
    if (has_groups) {
        config.max_sequences = 3;
        config.groups = {{kvcore::GroupKind::kFull, 0, 1, 0},
                         {kvcore::GroupKind::kSliding, 4, 1, 0}};
    }
    return config;
}

// Fails each allocation of a call in turn: only this allocation, and all allocations from it on.
template <class Prepare, class Call>
std::int64_t each_failure(const kvcore::CacheConfig& config, const Prepare& prepare,
                          const Call& call) {
    std::int64_t failures = 0;
    for (const Failing failing : {Failing::kOnce, Failing::kFromThereOn}) {
        bool has_failed = true;
        for (std::int64_t at = 1; has_failed; ++at) {
            Scene scene(config);
            prepare(scene);
            try {
                const Injection injection(at, failing);
                struct Count {
                    const Injection& injection;
                    std::int64_t at;
                    bool& has_failed;
                    ~Count() { has_failed = injection.num_seen() >= at; }
                } const count{injection, at, has_failed};
                call(scene);
            } catch (const std::bad_alloc&) {
                CHECK(has_failed);
            }
            failures += has_failed ? 1 : 0;
            scene.end();
        }
    }
    return failures;
}

TEST(write_back_makes_room_without_memory) {
    for (const bool has_groups : {false, true}) {
        const auto fill = [&](Scene& scene) {
            scene.asking = scene.claim(count_up(500, has_groups ? 8 : 20));
            Tokens branch = count_up(0, 4);
            for (TokenId token : {90, 91, 92, 93}) branch.push_back(token);
            scene.serve(count_up(0, 10));
            scene.serve(branch);
            scene.serve(count_up(50, 6));
        };
        const kvcore::CacheConfig given = config(WritePolicy::kWriteBack, has_groups);
        CHECK(each_failure(given, fill, [](Scene& scene) { scene.attempt(); }) > 10);
    }
}

// The second half of write-back: the stored pages are evicted.
TEST(stored_pages_are_evicted_without_memory) {
    const auto offer = [](Scene& scene) {
        scene.serve(count_up(0, 20));
        scene.attempt();
        CHECK(!scene.open.empty());
        scene.finish(scene.open);
        scene.open.clear();
    };
    const kvcore::CacheConfig given = config(WritePolicy::kWriteBack, false);
    CHECK(each_failure(given, offer, [](Scene& scene) { scene.attempt(); }) > 0);
}

TEST(due_pages_are_stored_with_the_next_page) {
    for (const bool has_groups : {false, true}) {
        const kvcore::CacheConfig given = config(WritePolicy::kSelective, has_groups);
        const auto use = [&](Scene& scene) {
            scene.serve(count_up(0, 6));
            scene.asking = scene.claim(count_up(0, 7));
        };
        const auto hit = [](Scene& scene) { scene.attempt(); };
        CHECK(each_failure(given, use, hit) > 0);
        const auto reserve = [&](Scene& scene) {
            use(scene);
            scene.settle(scene.asking);
            scene.asking.start = 7;
            scene.asking.append(99);
            scene.asking.active = 8;
        };
        const auto step = [](Scene& scene) {
            const kvcore::RequestView view = scene.asking.view();
            std::vector<kvcore::RequestView> views{view};
            std::vector<kvcore::PageSwap> swaps;
            scene.core.commit({views.data(), 1}, swaps, &scene.open);
        };
        CHECK(each_failure(given, reserve, step) > 2);
    }
}

}  // namespace

}  // namespace tests::faults::write_policies
