// SPDX-License-Identifier: Apache-2.0
// Pages from and to vLLM's layout by emulated lanes: the whole cache must equal the CPU's cache.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/cuda.hpp"
#include "support/cuda_cache.hpp"
#include "support/cuda_scene.hpp"

namespace tests::cuda::packed {

using cuda_scene::Bytes;
using cuda_scene::Cache;
using cuda_scene::kDefault;
using cuda_scene::random_alignment;
using cuda_scene::random_bytes;
using cuda_scene::random_pairs;
using cuda_scene::random_sizes;
using cuda_scene::round_up;
using cuda_scene::size_of;
using cuda_scene::with_strange_pairs;
using kvcore::CacheSizes;
using kvcore::LayerRange;
using kvcore::LayoutName;
using kvcore::PackedCacheView;
using kvcore::PackedTensor;
namespace cuda = kvcore::cuda;

namespace {

/// K or V [layers, pages, heads, units, page_size, unit], with gaps between heads and between
/// pages. The layers are in one piece or in a table.
class Packed {
   public:
    Packed(Random& random, const CacheSizes& sizes, std::int64_t units, std::int64_t unit_bytes,
           bool has_table)
        : units_(units), unit_bytes_(unit_bytes), layers_(sizes.layers), has_table_(has_table) {
        const std::int64_t alignment = random_alignment(random);
        offset_ = random.below(3) * alignment;
        head_ =
            round_up(units * unit_bytes * sizes.page_size, alignment) + random.below(2) * alignment;
        page_ = head_ * sizes.heads + random.below(2) * alignment;
        layer_ = page_ * sizes.pages;
        memory = random_bytes(random, offset_ + layer_ * sizes.layers + 64);
    }

    template <class Byte>
    [[nodiscard]] PackedTensor<Byte> view(std::vector<Byte*>& table) {
        PackedTensor<Byte> found{
            memory.data() + offset_, nullptr, page_, layer_, head_, units_, unit_bytes_};
        if (!has_table_) return found;
        table.clear();
        for (std::int64_t layer = 0; layer < layers_; ++layer) table.push_back(found.layer(layer));
        found.layers = table.data();
        found.data = nullptr;
        return found;
    }

    Bytes memory;

   private:
    std::int64_t units_;
    std::int64_t unit_bytes_;
    std::int64_t layers_;
    bool has_table_;
    std::int64_t offset_ = 0;
    std::int64_t head_ = 0;
    std::int64_t page_ = 0;
    std::int64_t layer_ = 0;
};

struct PackedCache {
    PackedCache(Random& random, const CacheSizes& sizes)
        : PackedCache(random, sizes, random.chance(30)) {}
    PackedCache(Random& random, const CacheSizes& sizes, bool has_table)
        : k(random, sizes, sizes.dim_k * kvcore::item_size(sizes.dtype) / 16, 16, has_table),
          v(random, sizes, sizes.dim_v, kvcore::item_size(sizes.dtype), has_table) {}

    [[nodiscard]] PackedCacheView<std::byte> view() { return {k.view(of_k_), v.view(of_v_)}; }
    [[nodiscard]] PackedCacheView<const std::byte> source() {
        return {k.view(from_k_), v.view(from_v_)};
    }
    [[nodiscard]] bool operator==(const PackedCache& other) const {
        return k.memory == other.k.memory && v.memory == other.v.memory;
    }

    Packed k;
    Packed v;

   private:
    std::vector<std::byte*> of_k_, of_v_;
    std::vector<const std::byte*> from_k_, from_v_;
};

TEST(pages_are_packed_and_unpacked_as_on_the_cpu) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(66));
    for (int i = 0; i < 800; ++i) {
        CacheSizes sizes = random_sizes(random);
        sizes.dim_k = 16 / kvcore::item_size(sizes.dtype) * random.between(1, 9);
        if (random.chance(20)) sizes.page_size = 8;
        Cache plain(random, sizes);
        sizes.pages = random.between(1, 7);
        PackedCache packed(random, sizes);
        LayerRange layers{random.below(sizes.layers), 0};
        layers.count = random.between(0, sizes.layers - layers.first);
        const std::int64_t limit = random.chance(30) ? 1 + random.below(3) : 0;

        const auto into = random_pairs(random, plain.sizes().pages, sizes.pages);
        PackedCache expected = packed;
        kvcore::transfer_to_packed(plain.source(), expected.view(), into.data(), size_of(into),
                                   layers);
        const cuda::PageCounts pages{plain.sizes().pages, sizes.pages};
        const auto named = with_strange_pairs(random, into, pages);
        CHECK_EQ(cuda::transfer_to_packed(plain.source(), packed.view(), pages, named.data(),
                                          size_of(named), layers, limit, kDefault),
                 cuda::kSuccess);
        CHECK(packed == expected);

        const auto out = random_pairs(random, sizes.pages, plain.sizes().pages);
        std::vector<std::int64_t> sources, destinations;
        const cuda::PageCounts back{sizes.pages, plain.sizes().pages};
        for (const kvcore::PagePair& pair : with_strange_pairs(random, out, back)) {
            sources.push_back(pair.source);
            destinations.push_back(pair.destination);
        }
        Cache plain_expected = plain;
        kvcore::transfer_from_packed(packed.source(), plain_expected.view(), out.data(),
                                     size_of(out), layers);
        CHECK_EQ(cuda::transfer_from_packed(packed.source(), plain.view(), back, sources.data(),
                                            destinations.data(), size_of(sources), layers, limit,
                                            kDefault),
                 cuda::kSuccess);
        CHECK(plain.memory == plain_expected.memory);
        CHECK(packed == expected);
    }
}

/// Pages of the usual sizes move in one launch. A call without pages or layers needs no launch.
TEST(whole_tiles_take_one_launch) {
    cuda::emulation::reset(1);
    constexpr CacheSizes kSizes{2, 1, 8, 1, 16, 16, kvcore::DType::kInt8};
    constexpr std::int64_t kBytes = 256;  // of K or V
    alignas(16) std::byte from[2 * kBytes] = {};
    alignas(16) std::byte to[2 * kBytes] = {};
    const auto plain = kvcore::view_of<const std::byte>(
        kvcore::layout_of(LayoutName::kMax, kSizes).value_or(kvcore::CacheLayout{}), from);
    const PackedCacheView<std::byte> packed{{to, nullptr, 128, 0, 128, 1, 16},
                                            {to + kBytes, nullptr, 128, 0, 128, 16, 1}};
    const std::vector<kvcore::PagePair> pairs = {{0, 1}};
    cuda::emulation::set_order(cuda::emulation::Order::kAny, 1);
    const std::int64_t before = cuda::emulation::num_waiting();
    const auto move = [&](std::int64_t n, LayerRange layers, std::int64_t limit) {
        return cuda::transfer_to_packed(plain, packed, {2, 2}, pairs.data(), n, layers, limit,
                                        kDefault);
    };
    CHECK_EQ(move(0, {0, 1}, 0), cuda::kSuccess);
    CHECK_EQ(move(1, {0, 0}, 0), cuda::kSuccess);
    CHECK_EQ(move(-1, {0, 1}, 0), cuda::kInvalidCall);
    CHECK_EQ(move(1, {0, 1}, -1), cuda::kInvalidCall);
    CHECK_EQ(cuda::emulation::num_waiting(), before);
    CHECK_EQ(move(1, {0, 1}, 0), cuda::kSuccess);
    CHECK_EQ(cuda::emulation::num_waiting(), before + 1);
    CHECK_EQ(cuda::synchronize(kDefault), cuda::kSuccess);
}

}  // namespace

}  // namespace tests::cuda::packed
