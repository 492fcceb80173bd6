// SPDX-License-Identifier: Apache-2.0
#include "kvcore/host_store.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kvcore/errors.hpp"
#include "support/check.hpp"
#include "support/request.hpp"

namespace tests::store::host_store {

using kvcore::CacheTensor;
using kvcore::CacheView;
using kvcore::HostStore;
using kvcore::PagePair;

namespace {

using Bytes = std::vector<std::byte>;

constexpr std::int64_t kPages = 7;
constexpr std::int64_t kLayers = 2;
constexpr std::int64_t kHeads = 3;

/// An array [pages, kv, layers, page_size, heads, row], with a gap after each page and row.
struct Array {
    Array(std::int64_t kv, std::int64_t page_size, std::int64_t row, std::int64_t gap)
        : kv(kv), page_size(page_size), row(row), step(row + gap) {
        part = kLayers * page_size * kHeads * step;
        memory.resize(static_cast<std::size_t>(kPages * (kv * part + gap)));
    }

    [[nodiscard]] std::int64_t page_stride() const { return count(memory) / kPages; }
    [[nodiscard]] std::int64_t page_bytes() const {
        return kv * kLayers * page_size * kHeads * row;
    }
    [[nodiscard]] CacheView<std::byte> view() {
        const auto tensor = [&](std::int64_t i) {
            return CacheTensor<std::byte>{memory.data() + i * part,  nullptr,       page_stride(),
                                          page_size * kHeads * step, kHeads * step, step,
                                          i < kv ? row : 0};
        };
        return {kLayers, page_size, kHeads, tensor(0), tensor(1)};
    }
    /// Return every byte of the page's rows, in order.
    [[nodiscard]] Bytes content(std::int64_t page) const {
        Bytes found;
        for (std::int64_t at = 0; at < kv * part; at += step) {
            const auto first = memory.begin() + (page * page_stride() + at);
            found.insert(found.end(), first, first + row);
        }
        return found;
    }
    void fill(Random& random) {
        for (std::byte& byte : memory) byte = static_cast<std::byte>(random.below(256));
    }

    std::int64_t kv;
    std::int64_t page_size;
    std::int64_t row;
    std::int64_t step;
    std::int64_t part = 0;
    Bytes memory;
};

void pages_go_down_and_come_back(std::int64_t page_size, std::int64_t row, std::int64_t gap,
                                 int threads) {
    Random random(static_cast<std::uint64_t>(page_size * 1000 + row));
    Array blocks(2, page_size, row, gap);
    Array scales(1, page_size, 4, 0);
    const HostStore store(5, {blocks.view(), scales.view()});
    CHECK_EQ(store.page_bytes(), blocks.page_bytes() + scales.page_bytes());
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(store.page(0)) % 4096, 0);
    blocks.fill(random);
    scales.fill(random);
    const std::vector<PagePair> down{{6, 0}, {1, 4}, {2, 3}};
    store.store(down.data(), count(down), threads);
    for (const PagePair& pair : down) {
        Bytes expected = blocks.content(pair.source);
        const Bytes behind = scales.content(pair.source);
        expected.insert(expected.end(), behind.begin(), behind.end());
        const std::byte* page = store.page(pair.destination);
        CHECK(Bytes(page, page + store.page_bytes()) == expected);
    }
    for (const std::int64_t page : {1, 2}) {  // never written
        for (std::int64_t i = 0; i < store.page_bytes(); ++i) {
            CHECK(store.page(page)[i] == std::byte{0});
        }
    }
    const Array before = blocks;
    const Array scales_before = scales;
    blocks.fill(random);
    scales.fill(random);
    Array expected = blocks;
    Array scales_expected = scales;
    const std::vector<PagePair> up{{0, 5}, {4, 0}, {3, 2}};
    store.load(up.data(), count(up), threads);
    for (std::size_t i = 0; i < up.size(); ++i) {
        CHECK(blocks.content(up[i].destination) == before.content(down[i].source));
        CHECK(scales.content(up[i].destination) == scales_before.content(down[i].source));
    }
    // The store wrote only rows, and only rows of these pages.
    for (std::int64_t at = 0; at < count(blocks.memory); ++at) {
        const std::int64_t page = at / blocks.page_stride();
        const std::int64_t inside = at % blocks.page_stride();
        const bool is_row = inside < 2 * blocks.part && inside % blocks.step < row;
        const bool is_loaded = page == 5 || page == 0 || page == 2;
        if (!is_row || !is_loaded) CHECK(item(blocks.memory, at) == item(expected.memory, at));
    }
    for (const std::int64_t page : {1, 3, 4, 6}) {
        CHECK(scales.content(page) == scales_expected.content(page));
    }
}

TEST(sizes_are_checked) {
    Array blocks(1, 4, 8, 0);
    CHECK_THROWS(std::invalid_argument, HostStore(0, {blocks.view()}));
    CHECK_THROWS(std::invalid_argument, HostStore(-3, {blocks.view()}));
    CHECK_THROWS(std::invalid_argument, HostStore(3, {}));
    CHECK_THROWS(kvcore::CapacityError, HostStore(std::int64_t{1} << 50, {blocks.view()}));
    CHECK_THROWS(kvcore::CapacityError, HostStore(std::int64_t{1} << 62, {blocks.view()}));
}

// The tier is far larger than the machine's memory: it is mapped, but not present.
TEST(an_unused_tier_takes_no_memory) {
    Array blocks(1, 4, 8, 0);
    const HostStore store((std::int64_t{1} << 40) / blocks.page_bytes(), {blocks.view()});
    const PagePair pair{3, store.num_pages() - 1};
    store.store(&pair, 1);
    CHECK(store.page(pair.destination)[0] == blocks.content(3)[0]);
}

// The store's thread waits for work, and the child process cannot join it.
TEST(a_child_of_fork_lets_the_tier_go) {
    Array blocks(1, 4, 8, 0);
    auto store = std::make_unique<HostStore>((std::int64_t{2} << 30) / blocks.page_bytes(),
                                             std::vector{blocks.view()});
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const pid_t child = fork();
    if (child == 0) {
        const PagePair pair{3, 1};
        store->store(&pair, 1);
        store.reset();
        _exit(0);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

TEST(pages_go_down_and_come_back) {
    for (const std::int64_t page_size : {1, 3, 24, 48}) {
        for (const std::int64_t row : {1, 59, 160}) {
            pages_go_down_and_come_back(page_size, row, 0, 1);
            pages_go_down_and_come_back(page_size, row, 5, 3);
        }
    }
    pages_go_down_and_come_back(512, 4096, 0, 3);
}

}  // namespace

}  // namespace tests::store::host_store
