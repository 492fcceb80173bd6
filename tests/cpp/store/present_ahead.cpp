// SPDX-License-Identifier: Apache-2.0
#include "data/present_ahead.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "support/check.hpp"

namespace tests::store::present_ahead {

using kvcore::PresentAhead;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kPage = 4096;

/// Memory that was never written to.
struct Mapped {
    explicit Mapped(std::size_t size) : bytes(size) {
        void* memory =
            mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED);
        data = static_cast<std::byte*>(memory);
    }
    Mapped(const Mapped&) = delete;
    Mapped& operator=(const Mapped&) = delete;
    ~Mapped() { munmap(data, bytes); }

    [[nodiscard]] std::size_t present() const {
        std::vector<unsigned char> pages(bytes / kPage);
        CHECK_EQ(mincore(data, bytes, pages.data()), 0);
        return kPage *
               static_cast<std::size_t>(std::count_if(pages.begin(), pages.end(),
                                                      [](unsigned char page) { return page & 1; }));
    }

    std::byte* data = nullptr;
    std::size_t bytes;
};

bool comes_true(const PresentAhead& ahead, std::size_t bytes) {
    for (int i = 0; i < 1000 && ahead.present() < bytes; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return ahead.present() >= bytes;
}

TEST(memory_is_present_ahead_of_its_use) {
    const Mapped memory(64 * kMiB);
    PresentAhead ahead(memory.data, memory.bytes, 16 * kMiB);
    CHECK_EQ(ahead.present(), 16 * kMiB);
    CHECK(memory.present() >= 16 * kMiB);
    CHECK(memory.present() < 32 * kMiB);
    memory.data[kMiB] = std::byte{7};
    ahead.use(12 * kMiB);  // the thread continues
    CHECK(comes_true(ahead, 28 * kMiB));
    CHECK(ahead.present() <= 32 * kMiB);
    ahead.use(40 * kMiB);  // past the present memory: waits
    CHECK(ahead.present() >= 40 * kMiB);
    CHECK(memory.present() >= 40 * kMiB);
    CHECK(comes_true(ahead, 56 * kMiB));
    ahead.use(3 * kMiB);
    ahead.use(memory.bytes);
    CHECK(comes_true(ahead, memory.bytes));
    CHECK_EQ(memory.present(), memory.bytes);
    CHECK(memory.data[kMiB] == std::byte{7});
}

TEST(a_use_far_behind_all_others_is_left_alone) {
    const Mapped memory(128 * kMiB);
    PresentAhead ahead(memory.data, memory.bytes, 8 * kMiB);
    ahead.use(memory.bytes);
    memory.data[memory.bytes - 1] = std::byte{1};
    CHECK_EQ(ahead.present(), 8 * kMiB);
    CHECK(memory.present() < 16 * kMiB);
}

TEST(little_memory_is_left_alone) {
    const Mapped memory(kMiB);
    PresentAhead ahead(memory.data, memory.bytes, 8 * kMiB);
    ahead.use(memory.bytes);
    CHECK_EQ(memory.present(), 0U);
}

TEST(threads_may_use_it_at_once) {
    const Mapped memory(96 * kMiB);
    PresentAhead ahead(memory.data, memory.bytes, 8 * kMiB);
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            for (std::size_t at = t * kMiB; at < memory.bytes; at += 4 * kMiB) {
                ahead.use(at + kMiB);
                memory.data[at] = std::byte{5};
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t at = 0; at < memory.bytes; at += kMiB) {
        CHECK(memory.data[at] == std::byte{5});
    }
}

TEST(one_that_is_dropped_in_the_middle_ends_its_thread) {
    const Mapped memory(256 * kMiB);
    for (int i = 0; i < 8; ++i) {
        PresentAhead ahead(memory.data, memory.bytes, 16 * kMiB);
        ahead.use(10 * kMiB);
    }
}

TEST(a_child_of_fork_does_nothing) {
    const Mapped memory(64 * kMiB);
    PresentAhead ahead(memory.data, memory.bytes, 16 * kMiB);
    const pid_t child = fork();
    if (child == 0) {
        ahead.use(30 * kMiB);
        _exit(ahead.is_forked() && ahead.present() == 16 * kMiB ? 0 : 1);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

}  // namespace

}  // namespace tests::store::present_ahead
