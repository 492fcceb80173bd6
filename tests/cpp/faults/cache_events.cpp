// SPDX-License-Identifier: Apache-2.0
// Cache events when memory runs out: calls that change a cache work without their events, and the
// reader still gets a correct list of the cache.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <new>
#include <string>
#include <vector>

#include "oracle/event_mirror.hpp"
#include "support/failing_memory.hpp"
#include "support/layer_groups.hpp"

namespace tests::faults::cache_events {

using failing_memory::Failing;
using failing_memory::Injection;
using kvcore::CacheConfig;
using kvcore::CacheManager;
using kvcore::TokenId;

namespace {

CacheConfig config_of(bool has_groups) {
    CacheConfig config;
    config.page_size = 4;
    config.num_pages = has_groups ? 48 : 24;
    config.max_sequences = 2;
    config.max_seq_len = 64;
    config.event_pages = 1000;
    if (has_groups) config.groups = {full(), sliding(8)};
    return config;
}

/// A manager, and a reader that has not read the events of the last prompt.
struct Scene {
    explicit Scene(const CacheConfig& config) : manager(config), mirror(config) {
        run(0, "a namespace of its own, with a name that needs memory");
        read();
        run(100, "another namespace, whose name needs memory as well");
    }
    void run(TokenId first, const std::string& name) {
        std::vector<TokenId> tokens;
        for (TokenId i = 0; i < 26; ++i) tokens.push_back(first + i);
        kvcore::RequestView view{manager.claim(), tokens.data(), 0, 26, 26, name};
        CHECK(manager.reserve(view) == kvcore::ReserveStatus::kOk);
        view.start = 25;
        std::vector<kvcore::PageSwap> swaps;
        manager.commit({&view, 1}, swaps);
        manager.release(view.sequence);
    }
    void take() { taken = manager.take_events(); }
    void read() {
        mirror.read(taken);
        take();
        mirror.read(taken);
        taken.clear();
    }
    void check() {
        read();
        CHECK(mirror.pages() == mirror.truth(manager));
        manager.check_integrity();
    }

    CacheManager manager;
    EventMirror mirror;
    std::vector<kvcore::CacheEvent> taken;  // taken, but not read yet
};

/// Repeats the call with each of its allocations failing, and returns the number of allocations.
template <class Call>
std::int64_t at_each_site(const char* name, bool has_groups, const Call& call) {
    for (const Failing failing : {Failing::kOnce, Failing::kFromThereOn}) {
        for (std::int64_t site = 1;; ++site) {
            check::note = std::string(name) + ", allocation " + std::to_string(site);
            Scene scene(config_of(has_groups));
            std::int64_t seen = 0;
            {
                const Injection injection(site, failing);
                try {
                    call(scene);
                } catch (const std::bad_alloc&) {
                    seen = site;
                }
                seen = std::max(seen, injection.num_seen());
            }
            scene.check();
            scene.run(200, "what comes next");
            scene.check();
            if (seen >= site) continue;
            if (failing == Failing::kFromThereOn) return site - 1;
            break;
        }
    }
}

TEST(calls_that_record_events_leave_no_trace) {
    std::int64_t sites = 0;
    for (const bool has_groups : {false, true}) {
        sites += at_each_site("take_events", has_groups, [](Scene& scene) { scene.take(); });
        sites += at_each_site("a prompt", has_groups,
                              [](Scene& scene) { scene.run(300, "a namespace that is new here"); });
        sites += at_each_site("a reset", has_groups,
                              [](Scene& scene) { scene.manager.reset_prefix_cache(); });
    }
    CHECK(sites > 20);
    std::printf("%lld allocations failed one by one\n", static_cast<long long>(sites));
}

}  // namespace

}  // namespace tests::faults::cache_events
