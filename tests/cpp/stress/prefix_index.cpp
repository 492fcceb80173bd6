// SPDX-License-Identifier: Apache-2.0
// PrefixIndex next to maps of sets: workers store and remove pages in any order, and some workers
// are cleared. After that, threads match while others write. --count: operations.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvcore/prefix_index.hpp"
#include "support/check.hpp"
#include "support/random.hpp"
#include "traffic/workers.hpp"

namespace tests::stress::prefix_index {

using kvcore::Medium;
using kvcore::PrefixIndex;

namespace {

using Pages = std::vector<std::uint64_t>;

constexpr Medium kMedia[] = {Medium::kDevice, Medium::kHost, Medium::kStorage};

/// The expected content of the index, page by page and worker by worker.
class SlowIndex {
   public:
    explicit SlowIndex(std::int32_t num_workers) : num_workers_(num_workers) {}
    void store(std::int32_t worker, const Pages& pages, Medium medium) {
        for (const std::uint64_t page : pages) {
            pages_[page][worker] |= static_cast<unsigned>(medium);
        }
    }
    void remove(std::int32_t worker, const Pages& pages, Medium medium) {
        for (const std::uint64_t page : pages) drop(page, worker, static_cast<unsigned>(medium));
    }
    void clear(std::int32_t worker) {
        Pages all;
        for (const auto& [page, workers] : pages_) all.push_back(page);
        for (const std::uint64_t page : all) drop(page, worker, 7);
    }
    [[nodiscard]] std::vector<std::int32_t> match(const Pages& pages, unsigned media) const {
        std::vector<std::int32_t> held(static_cast<std::size_t>(num_workers_));
        for (std::int32_t worker = 0; worker < num_workers_; ++worker) {
            auto& n = held[static_cast<std::size_t>(worker)];
            for (const std::uint64_t page : pages) {
                if ((media_of(page, worker) & media) == 0) break;
                ++n;
            }
        }
        return held;
    }
    [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(pages_.size()); }
    [[nodiscard]] std::int64_t size(std::int32_t worker) const {
        return std::count_if(pages_.begin(), pages_.end(),
                             [&](const auto& each) { return each.second.count(worker) > 0; });
    }

   private:
    [[nodiscard]] unsigned media_of(std::uint64_t page, std::int32_t worker) const {
        const auto workers = pages_.find(page);
        if (workers == pages_.end()) return 0;
        const auto found = workers->second.find(worker);
        return found == workers->second.end() ? 0 : found->second;
    }
    void drop(std::uint64_t page, std::int32_t worker, unsigned media) {
        const auto workers = pages_.find(page);
        if (workers == pages_.end()) return;
        const auto found = workers->second.find(worker);
        if (found == workers->second.end()) return;
        found->second &= ~media;
        if (found->second == 0) workers->second.erase(found);
        if (workers->second.empty()) pages_.erase(workers);
    }

    std::int32_t num_workers_;
    std::map<std::uint64_t, std::map<std::int32_t, unsigned>> pages_;
};

/// Prompts with common prefixes. Hashes that are close to each other crowd the table.
std::vector<Pages> make_prompts(Random& random) {
    std::vector<Pages> prompts;
    for (int i = 0; i < 40; ++i) {
        Pages pages;
        if (i > 0) pages = random.pick(prompts);
        pages.resize(
            static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(pages.size()))));
        for (std::int64_t n = random.between(1, 60); n > 0; --n) {
            const auto near = static_cast<std::uint64_t>(random.below(4096));
            pages.push_back(random.chance(50) ? near << 52U : near * 0x123456789ABCDEFU);
        }
        prompts.push_back(pages);
    }
    return prompts;
}

Pages part_of(Random& random, const Pages& pages) {
    const auto size = static_cast<std::int64_t>(pages.size());
    const std::int64_t from = random.chance(60) ? 0 : random.below(size);
    const std::int64_t to = random.between(from, size);
    return {pages.begin() + from, pages.begin() + to};
}

void compare(std::int32_t num_workers, std::uint64_t seed, std::int64_t operations) {
    Random random(seed);
    PrefixIndex index(num_workers);
    SlowIndex slow(num_workers);
    std::vector<Pages> prompts = make_prompts(random);
    for (std::int64_t i = 0; i < operations; ++i) {
        // Nearly all workers have some pages, and a few workers have the others.
        const std::int64_t most = random.chance(40) ? std::min(num_workers, 4) : num_workers;
        const auto worker = static_cast<std::int32_t>(random.below(most));
        const Pages pages = part_of(random, random.pick(prompts));
        const Medium medium = kMedia[random.below(3)];
        const std::int64_t dice = random.below(1000);
        if (dice < 550) {
            index.store(worker, pages.data(), pages.size(), medium);
            slow.store(worker, pages, medium);
        } else if (dice < 990) {
            index.remove(worker, pages.data(), pages.size(), medium);
            slow.remove(worker, pages, medium);
        } else {
            index.clear(worker);
            slow.clear(worker);
        }
        if (i % 5 == 0) {
            const Pages& prompt = random.pick(prompts);
            const auto media = static_cast<std::uint8_t>(random.between(1, 7));
            std::vector<std::int32_t> held(static_cast<std::size_t>(num_workers), -1);
            index.match(prompt.data(), prompt.size(), media, held.data());
            CHECK(held == slow.match(prompt, media));
        }
        if (i % 50 == 0) {
            index.check_integrity();
            CHECK_EQ(index.num_pages(), slow.size());
            CHECK_EQ(index.num_pages(worker), slow.size(worker));
        }
    }
    for (std::int32_t worker = 0; worker < num_workers; ++worker) index.clear(worker);
    CHECK_EQ(index.num_pages(), 0);
    index.check_integrity();
    const std::int64_t before = index.num_bytes();
    Pages many(100'000);
    for (std::size_t i = 0; i < many.size(); ++i) many[i] = i + 1;
    index.store(0, many.data(), many.size(), Medium::kDevice);
    index.clear(0);
    CHECK(index.num_bytes() <= before);
}

void threads(std::uint64_t seed, std::int64_t operations) {
    PrefixIndex index(100);
    Random random(seed);
    std::vector<Pages> prompts = make_prompts(random);
    run_together(6, [&](int i) {
        Random own(seed * 10 + static_cast<std::uint64_t>(i));
        std::vector<std::int32_t> held(100);
        const auto worker = static_cast<std::int32_t>(16 * i);
        for (std::int64_t n = 0; n < operations; ++n) {
            const Pages pages = part_of(own, own.pick(prompts));
            if (n % 2 == 0) {
                index.store(worker, pages.data(), pages.size(), Medium::kDevice);
                index.match(pages.data(), pages.size(), kvcore::kAnyMedium, held.data());
                // No other thread stores or removes pages of this worker.
                CHECK_EQ(held[static_cast<std::size_t>(worker)],
                         static_cast<std::int32_t>(pages.size()));
            } else {
                index.remove(worker, pages.data(), pages.size(), Medium::kDevice);
            }
            if (n % 500 == 0) index.clear(worker);
        }
    });
    index.check_integrity();
}

TEST(wrong_workers) {
    CHECK_THROWS(std::invalid_argument, PrefixIndex(0));
    CHECK_THROWS(std::invalid_argument, PrefixIndex(4097));
    PrefixIndex index(3);
    const Pages pages{1, 2};
    for (const std::int32_t worker : {-1, 3}) {
        CHECK_THROWS(std::out_of_range, index.store(worker, pages.data(), 2, Medium::kDevice));
        CHECK_THROWS(std::out_of_range, index.remove(worker, pages.data(), 2, Medium::kDevice));
        CHECK_THROWS(std::out_of_range, index.clear(worker));
    }
    CHECK_EQ(index.num_pages(), 0);
}

TEST(agrees_with_maps_of_sets) {
    const std::uint64_t seed = check::seed_or(7);
    const std::int64_t operations = check::count_or(10'000);
    for (const std::int32_t workers : {1, 3, 64, 65, 200, 4096}) {
        compare(workers, seed + static_cast<std::uint64_t>(workers), operations);
    }
    threads(seed, operations);
}

}  // namespace

}  // namespace tests::stress::prefix_index
