// SPDX-License-Identifier: Apache-2.0
// The disk store when memory runs out: a call that throws changes nothing, and leaves no page in
// use and no file open.
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fakes/disk_scene.hpp"
#include "support/failing_memory.hpp"

namespace tests::faults::disk_store {

using failing_memory::allocates_nothing;
using failing_memory::each_site;

namespace {

constexpr std::int64_t kBytes = 3000;
constexpr std::int64_t kSlots = 6;

std::int64_t open_files() {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
}

/// A full store with the pages 0 .. 5, and batches for calls.
struct Scene {
    Scene() : files(open_files()), config(disk_config(directory.path, kBytes, kSlots)) {
        config.threads = 1;
        config.queue_pages = 2;
        store = std::make_unique<DiskStore>(config);
        Pages pages(*store, kBytes);
        for (std::uint64_t number = 0; number < kSlots; ++number) pages.put({number});
        for (std::uint64_t number = 0; number < 3; ++number) {
            memory.emplace_back(static_cast<std::size_t>(kBytes));
            to_read.push_back({key_of(number), {{0, memory.back().data(), kBytes}}});
            contents.push_back(content(number + 10, 0, kBytes));
            to_write.push_back({key_of(number + 10), {{0, contents.back().data(), kBytes}}});
            keys.push_back(key_of(number));
        }
    }

    const TemporaryDirectory directory;
    std::int64_t files;
    DiskStoreConfig config;
    std::vector<std::vector<std::byte>> memory;
    std::vector<std::vector<std::byte>> contents;
    std::vector<kvcore::PageToRead> to_read;
    std::vector<kvcore::PageToWrite> to_write;
    std::vector<StoreKey> keys;
    std::unique_ptr<DiskStore> store;
};

// Afterwards all slots are available: no call holds a slot.
std::string text_of(Scene& scene) {
    if (scene.store == nullptr) return check::text(open_files() == scene.files);
    scene.store->check_integrity();
    std::string text;
    for (std::uint64_t number = 0; number < 13; ++number) {
        text += std::to_string(scene.store->parts_of(key_of(number)));
    }
    const kvcore::DiskStoreStats stats = scene.store->stats();
    text += " hits " + check::text(stats.hits) + " misses " + check::text(stats.misses);
    text += " written " + check::text(stats.written);
    Pages pages(*scene.store, kBytes);
    for (std::uint64_t number = 20; number < 20 + kSlots; ++number) {
        CHECK_EQ(pages.put({number}), 1);
    }
    CHECK_EQ(scene.store->stats().stored, kSlots);
    scene.store.reset();
    return text + " files " + check::text(open_files() == scene.files);
}

TEST(verbs) {
    const auto make = [] { return std::make_unique<Scene>(); };
    const auto digest = [](std::unique_ptr<Scene>& scene) { return text_of(*scene); };
    each_site(
        "get", make,
        [](std::unique_ptr<Scene>& scene) {
            CHECK_EQ(scene->store->get_async(scene->to_read).result(), 3);
        },
        digest);
    each_site(
        "put", make,
        [](std::unique_ptr<Scene>& scene) {
            CHECK_EQ(scene->store->put_async(scene->to_write).result(), 3);
        },
        digest);
    allocates_nothing("remove", make, [](std::unique_ptr<Scene>& scene) {
        CHECK_EQ(scene->store->remove(scene->keys), 3);
    });
    each_site(
        "clear", make,
        [](std::unique_ptr<Scene>& scene) { CHECK_EQ(scene->store->clear(), kSlots); }, digest);
    allocates_nothing("close", make, [](std::unique_ptr<Scene>& scene) { scene->store->close(); });
}

TEST(opening) {
    const auto make = [] {
        auto scene = std::make_unique<Scene>();
        scene->store.reset();
        return scene;
    };
    each_site(
        "open", make,
        [](std::unique_ptr<Scene>& scene) {
            scene->store = std::make_unique<DiskStore>(scene->config);
        },
        [](std::unique_ptr<Scene>& scene) { return text_of(*scene); });
}

}  // namespace

}  // namespace tests::faults::disk_store
