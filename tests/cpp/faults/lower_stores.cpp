// SPDX-License-Identifier: Apache-2.0
// Loads from lower stores and writes to them when memory runs out: a load that throws brings no
// page, and gives all pages of the host tier back.
#include <memory>
#include <string>

#include "fakes/lower_scene.hpp"
#include "kvcore/store_writer.hpp"
#include "support/failing_memory.hpp"

namespace tests::faults::lower_stores {

using failing_memory::each_site;
using kvcore::StoreWriter;

namespace {

/// Two stores with columns of a prompt, of which the host tier has the first column.
struct Scene {
    explicit Scene(const kvcore::CacheConfig& config) : m(config) {
        keep(Tokens(prompt.begin(), prompt.begin() + 2));
        m.write_all();
        m.open({&upper, &lower});
    }
    /// Leave a prompt on the device and in the host tier.
    void keep(const Tokens& tokens) {
        Request request = m.claim(tokens);
        m.finish(m.reserve(request));
        m.finish(m.commit(request, 0));
        m.manager.release(request.sequence);
    }
    std::string text() {
        std::string text = check::text(m.hit(prompt)) + " tokens, " + check::text(m.room());
        text += " of room, waiting " + check::text(m.manager.num_waiting_writes());
        m.manager.check_integrity();
        return text;
    }

    Tokens prompt = count_up(10, 9);
    LowerScene m;
    FakeStore upper{m.keys(prompt), columns_with(0, 4, 3)};
    FakeStore lower{m.keys(prompt), {}};
    StoreWriter writer{m.manager, {&upper, &lower}};
    StoreWriter::Batch batch;
};

using ScenePtr = std::unique_ptr<Scene>;

std::string digest_of(ScenePtr& scene) { return scene->text(); }

TEST(loads) {
    const std::vector<kvcore::CacheGroup> window = {{kvcore::GroupKind::kFull, 0, 1, 0},
                                                    {kvcore::GroupKind::kSliding, 4, 1, 0}};
    for (const kvcore::CacheConfig& config : {HostFixture::config(32, 64), with_groups(window)}) {
        const auto make = [&] { return std::make_unique<Scene>(config); };
        each_site(
            "load", make,
            [](ScenePtr& scene) {
                kvcore::LowerSearch search = scene->m.search_of(scene->prompt);
                scene->m.reader->load(search);
            },
            digest_of);
        each_site(
            "has", make,
            [](ScenePtr& scene) {
                kvcore::NextColumn next;
                next.keys = {scene->m.keys(scene->prompt)[1]};
                CHECK(scene->m.reader->has(next));
            },
            digest_of);
    }
}

// A batch that was not written is lost; its columns are not kept in the tier.
TEST(writes) {
    const auto make = [] {
        auto scene = std::make_unique<Scene>(HostFixture::config(32, 64));
        scene->keep(count_up(10, 8));
        CHECK(scene->writer.take(10, scene->batch));
        return scene;
    };
    each_site(
        "write", make, [](ScenePtr& scene) { CHECK_EQ(scene->writer.write(scene->batch), 0); },
        [](ScenePtr& scene) {
            scene->writer.finish(scene->batch);
            return scene->text();
        });
}

}  // namespace

}  // namespace tests::faults::lower_stores
