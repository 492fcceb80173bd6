// SPDX-License-Identifier: Apache-2.0
// Late reads when memory runs out: a call notes them for all pages or for no page, and they are
// returned without memory.
#include <memory>
#include <string>
#include <vector>

#include "support/failing_memory.hpp"
#include "support/manager_fixture.hpp"

namespace tests::faults::late_reads {

namespace {

/// Two replicas whose pages are all cached, and stores of all these pages.
struct Scene {
    Scene() : m(config()) {
        for (const std::int32_t replica : {0, 1}) {
            m.put(count_up(0, 8), replica);
            Ids ids;
            m.match(count_up(0, 8), replica, "", &ids);
            for (const BlockId page : ids) {
                kvcore::PageMove store;
                store.replica = replica;
                store.source = page;
                stores.push_back(store);
            }
        }
    }
    static kvcore::CacheConfig config() {
        kvcore::CacheConfig config = ManagerFixture::config(2, 4);
        config.num_replicas = 2;
        return config;
    }
    void note() { m.manager.note_late_reads(stores.data(), count(stores), 5); }
    /// Reserves all pages of each replica and returns the late reads.
    std::string text() {
        std::string out;
        for (const std::int32_t replica : {0, 1}) {
            Request request = m.claim(count_up(100, 8), replica);
            CHECK(m.reserve(request));
            out += std::to_string(m.manager.late_reads(replica)) + " ";
        }
        return out;
    }

    ManagerFixture m;
    std::vector<kvcore::PageMove> stores;
};

TEST(notes_leave_no_trace) {
    const auto make = [] { return std::make_unique<Scene>(); };
    const auto noted = [] {
        auto scene = std::make_unique<Scene>();
        scene->note();
        return scene;
    };
    failing_memory::each_site(
        "note", make, [](auto& scene) { scene->note(); },
        [](auto& scene) { return scene->text(); });
    failing_memory::allocates_nothing("note again", noted, [](auto& scene) { scene->note(); });
    failing_memory::allocates_nothing("late_reads", noted, [](auto& scene) {
        static_cast<void>(scene->m.manager.late_reads(0));
    });
}

}  // namespace

}  // namespace tests::faults::late_reads
