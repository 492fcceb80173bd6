// SPDX-License-Identifier: Apache-2.0
// PrefixIndex when memory runs out: earlier pages stay stored, nothing else changes, and the same
// call succeeds when memory is available.
#include <new>
#include <vector>

#include "kvcore/prefix_index.hpp"
#include "support/check.hpp"
#include "support/failing_memory.hpp"

namespace tests::faults::prefix_index {

using failing_memory::Failing;
using failing_memory::Injection;
using kvcore::Medium;
using kvcore::PrefixIndex;

namespace {

constexpr std::size_t kPages = 300;

std::vector<std::uint64_t> pages() {
    std::vector<std::uint64_t> found;
    for (std::uint64_t i = 0; i < kPages; ++i) found.push_back(i * 0x123456789ABCDEFU);
    return found;
}

// With one worker the entry holds it; with a few workers there are lists or rows; with many, only
// rows.
void each_allocation_fails(std::int32_t num_workers, std::int32_t num_known) {
    const std::vector<std::uint64_t> all = pages();
    std::vector<std::int32_t> held(static_cast<std::size_t>(num_workers));
    std::int64_t seen = 1;
    for (std::int64_t site = 1; seen >= site; ++site) {
        PrefixIndex index(num_workers);
        for (std::int32_t worker = 0; worker < num_known; ++worker) {
            index.store(worker, all.data(), kPages / 2, Medium::kHost);
        }
        bool has_failed = false;
        {
            const Injection injection(site, Failing::kOnce);
            try {
                index.store(num_known, all.data(), kPages, Medium::kDevice);
            } catch (const std::bad_alloc&) {
                has_failed = true;
            }
            seen = injection.num_seen();
        }
        CHECK_EQ(has_failed, seen >= site);
        index.check_integrity();
        index.match(all.data(), kPages, kvcore::kAnyMedium, held.data());
        CHECK_EQ(held[static_cast<std::size_t>(num_known)], index.num_pages(num_known));
        for (std::int32_t worker = 0; worker < num_known; ++worker) {
            CHECK_EQ(held[static_cast<std::size_t>(worker)], static_cast<std::int32_t>(kPages / 2));
        }
        index.store(num_known, all.data(), kPages, Medium::kDevice);
        CHECK_EQ(index.num_pages(num_known), static_cast<std::int64_t>(kPages));
        const Injection none(1, Failing::kFromThereOn);
        for (std::int32_t worker = 0; worker <= num_known; ++worker) index.clear(worker);
        CHECK_EQ(index.num_pages(), 0);
    }
}

TEST(each_allocation_fails) {
    each_allocation_fails(3, 0);
    each_allocation_fails(3, 1);
    each_allocation_fails(100, 1);
    each_allocation_fails(100, 15);
    each_allocation_fails(100, 40);
}

}  // namespace

}  // namespace tests::faults::prefix_index
