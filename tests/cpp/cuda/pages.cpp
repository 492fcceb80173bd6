// SPDX-License-Identifier: Apache-2.0
// Pages copied, transferred and digested by emulated lanes: the whole cache must equal the CPU's
// cache.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kvcore/cuda.hpp"
#include "support/cuda_cache.hpp"
#include "support/cuda_scene.hpp"

namespace tests::cuda::pages {

using cuda_scene::Bytes;
using cuda_scene::Cache;
using cuda_scene::kDefault;
using cuda_scene::random_alignment;
using cuda_scene::random_bytes;
using cuda_scene::random_pairs;
using cuda_scene::random_sizes;
using cuda_scene::random_stranger;
using cuda_scene::round_up;
using cuda_scene::shuffled;
using cuda_scene::size_of;
using cuda_scene::with_strange_pairs;
using cuda_scene::with_strangers;
using kvcore::CacheSizes;
using kvcore::LayerRange;
using kvcore::PagePair;
using kvcore::PageStart;
namespace cuda = kvcore::cuda;

namespace {

TEST(pages_move_as_on_the_cpu) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(63));
    for (int i = 0; i < 800; ++i) {
        CacheSizes sizes = random_sizes(random);
        Cache from(random, sizes);
        sizes.pages = random.between(1, 7);
        Cache found(random, sizes);
        Cache expected = found;
        const auto pairs = random_pairs(random, from.sizes().pages, sizes.pages);
        LayerRange layers{random.below(sizes.layers), 0};
        layers.count = random.between(0, sizes.layers - layers.first);
        const Bytes before = from.memory;
        kvcore::transfer(from.source(), expected.view(), pairs.data(), size_of(pairs), layers);
        const cuda::PageCounts pages{from.sizes().pages, sizes.pages};
        const auto named = with_strange_pairs(random, pairs, pages);
        CHECK_EQ(cuda::transfer(from.source(), found.view(), pages, named.data(), size_of(named),
                                layers, random.chance(30) ? 1 + random.below(3) : 0, kDefault),
                 cuda::kSuccess);
        CHECK(found.memory == expected.memory);
        CHECK(from.memory == before);
    }
}

TEST(starts_of_pages_are_copied_as_on_the_cpu) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(63));
    for (int i = 0; i < 500; ++i) {
        Cache found(random, random_sizes(random));
        Cache expected = found;
        const auto ids = shuffled<std::int64_t>(random, found.sizes().pages);
        const std::size_t half = ids.size() / 2;
        std::vector<PageStart> copies;
        for (std::size_t j = half; j < ids.size() && half > 0; ++j) {
            copies.push_back({ids[j % half], ids[j], random.between(0, found.sizes().page_size)});
        }
        kvcore::copy_partial(expected.view(), copies.data(), size_of(copies));
        const std::int64_t pages = found.sizes().pages;
        const auto named = with_strangers(random, copies, [&]() -> PageStart {
            const std::int64_t stranger = random_stranger(random, pages);
            return random.chance(50) ? PageStart{stranger, random.below(pages), 1}
                                     : PageStart{random.below(pages), stranger, 1};
        });
        CHECK_EQ(cuda::copy_partial(found.view(), pages, named.data(), size_of(named), kDefault),
                 cuda::kSuccess);
        CHECK(found.memory == expected.memory);
    }
}

TEST(whole_pages_are_copied_and_digested) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(63));
    for (int i = 0; i < 400; ++i) {
        const std::int64_t alignment = random_alignment(random);
        const std::int64_t bytes = random.below(random.chance(20) ? 40000 : 300);
        const std::int64_t stride = round_up(bytes, alignment) + random.below(3) * alignment;
        const std::int64_t offset = random.below(3) * alignment;
        const std::int64_t pages = random.between(2, 6);
        Bytes found = random_bytes(random, offset + stride * pages + 64);
        Bytes expected = found;
        const auto ids = shuffled<std::int64_t>(random, pages);
        std::vector<PagePair> pairs;
        for (std::size_t j = 0; j + 1 < ids.size(); j += 2) pairs.push_back({ids[j], ids[j + 1]});
        kvcore::copy_pages({expected.data() + offset, stride, bytes}, pairs.data(), size_of(pairs));
        const auto named_pairs = with_strange_pairs(random, pairs, {pages, pages});
        CHECK_EQ(cuda::copy_pages({found.data() + offset, stride, bytes}, pages, named_pairs.data(),
                                  size_of(named_pairs), kDefault),
                 cuda::kSuccess);
        CHECK(found == expected);

        const auto named =
            with_strangers(random, ids, [&] { return random_stranger(random, pages); });
        std::vector<std::uint64_t> digests(named.size() + 1, 77);
        std::vector<std::uint64_t> digests_expected(named.size() + 1, 0);
        digests_expected.back() = 77;
        for (std::size_t j = 0; j < named.size(); ++j) {
            if (named[j] < 0 || named[j] >= pages) continue;
            kvcore::digest_pages({found.data() + offset, stride, bytes}, &named[j], 1,
                                 &digests_expected[j]);
        }
        CHECK_EQ(cuda::digest_pages({found.data() + offset, stride, bytes}, pages, named.data(),
                                    size_of(named), digests.data(), kDefault),
                 cuda::kSuccess);
        CHECK(digests == digests_expected);
        CHECK(found == expected);
    }
}

/// A team needs several rounds for a page, and a page needs several teams.
TEST(many_pages_are_digested) {
    cuda::emulation::reset(1);
    constexpr std::int64_t kPageBytes = 4 * 1024 + 8;
    constexpr std::size_t kPages = 6000;
    Random random(3);
    const Bytes memory = random_bytes(random, 2 * kPageBytes + 8);
    const kvcore::PageBytes<const std::byte> pool{memory.data() + 8, kPageBytes, kPageBytes};
    std::vector<std::int64_t> ids(kPages);
    for (std::size_t i = 0; i < kPages; ++i) ids[i] = static_cast<std::int64_t>(i * i % 3 % 2);
    std::vector<std::uint64_t> found(kPages, 77);
    std::vector<std::uint64_t> expected(kPages);
    kvcore::digest_pages(pool, ids.data(), size_of(ids), expected.data());
    CHECK_EQ(cuda::digest_pages(pool, 2, ids.data(), size_of(ids), found.data(), kDefault),
             cuda::kSuccess);
    CHECK(found == expected);
    CHECK_EQ(cuda::add_digests(pool, 2, ids.data(), size_of(ids), 3, found.data(), kDefault),
             cuda::kSuccess);
    std::vector<std::uint64_t> once = expected;
    for (std::uint64_t& digest : expected) digest *= 4;
    CHECK(found == expected);
    for (std::size_t i = 0; i < kPages; i += 5) {
        ids[i] = i % 2 == 0 ? -1 : 2;
        once[i] = 0;
    }
    CHECK_EQ(cuda::add_digests(pool, 2, ids.data(), size_of(ids), 3, found.data(), kDefault),
             cuda::kSuccess);
    for (std::size_t i = 0; i < kPages; ++i) CHECK_EQ(found[i], expected[i] + 3 * once[i]);
    CHECK_EQ(cuda::digest_pages(pool, 2, ids.data(), size_of(ids), found.data(), kDefault),
             cuda::kSuccess);
    CHECK(found == once);
}

TEST(batches_of_copies_move_their_bytes) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(63));
    for (int i = 0; i < 100; ++i) {
        const Bytes from = random_bytes(random, 5000);
        Bytes found = random_bytes(random, 5000);
        Bytes expected = found;
        std::vector<void*> destinations;
        std::vector<const void*> sources;
        std::vector<std::int64_t> bytes;
        for (std::int64_t at = 0; at < 4900;) {
            const std::int64_t n = random.below(12);
            const std::int64_t source = random.chance(50) ? at : random.below(4900);
            destinations.push_back(found.data() + at);
            sources.push_back(from.data() + source);
            bytes.push_back(n);
            std::copy_n(from.begin() + source, n, expected.begin() + at);
            at += n + random.below(2);
        }
        CHECK_EQ(cuda::copy_batch(destinations.data(), sources.data(), bytes.data(), size_of(bytes),
                                  kDefault),
                 cuda::kSuccess);
        CHECK(found == expected);
    }
}

}  // namespace

}  // namespace tests::cuda::pages
