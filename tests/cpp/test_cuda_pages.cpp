// SPDX-License-Identifier: Apache-2.0
// Pages copied, transferred and digested by emulated lanes: whole caches as the CPU leaves them.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda_scene.hpp"
#include "kvcore/cuda.hpp"

using cuda_scene::Bytes;
using cuda_scene::kDefault;
using cuda_scene::random_alignment;
using cuda_scene::random_bytes;
using cuda_scene::random_dim;
using cuda_scene::random_page_size;
using cuda_scene::round_up;
using cuda_scene::shuffled;
using cuda_scene::size_of;
using kvcore::CacheLayout;
using kvcore::CacheSizes;
using kvcore::CacheView;
using kvcore::DType;
using kvcore::LayerRange;
using kvcore::LayoutName;
using kvcore::PagePair;
using kvcore::PageStart;
namespace cuda = kvcore::cuda;

namespace {

CacheSizes random_sizes(Random& random) {
    CacheSizes sizes{random.between(1, 7),
                     random.between(1, 4),
                     random_page_size(random),
                     random.between(1, 4),
                     random_dim(random),
                     0,
                     static_cast<DType>(random.below(kvcore::kNumDTypes))};
    sizes.dim_v = random.chance(60) ? sizes.dim_k : random.chance(50) ? 0 : random_dim(random);
    return sizes;
}

/// A cache in any layout: in one piece, or with tables of layers each of which lies at an address
/// of its own alignment.
class Cache {
   public:
    Cache(Random& random, const CacheSizes& sizes)
        : layout_(
              kvcore::layout_of(static_cast<LayoutName>(random.below(kvcore::kNumLayouts)), sizes)
                  .value_or(CacheLayout{})),
          offset_(random.below(3) * random_alignment(random)) {
        if (random.chance(30)) {
            for (std::int64_t layer = 0; layer < sizes.layers; ++layer) {
                shifts_.push_back((layout_.bytes + 64) * layer + random.below(20));
            }
        }
        const std::int64_t copies = shifts_.empty() ? 1 : sizes.layers;
        memory = random_bytes(random, (layout_.bytes + 64) * copies + offset_ + 64);
    }
    Cache(const Cache& other)
        : memory(other.memory),
          layout_(other.layout_),
          offset_(other.offset_),
          shifts_(other.shifts_) {}
    Cache& operator=(const Cache&) = delete;
    ~Cache() = default;

    [[nodiscard]] const CacheSizes& sizes() const { return layout_.sizes; }

    [[nodiscard]] CacheView<std::byte> view() {
        CacheView<std::byte> found = kvcore::view_of<std::byte>(layout_, memory.data() + offset_);
        fill_table(found.k, k_table_);
        fill_table(found.v, v_table_);
        return found;
    }
    [[nodiscard]] CacheView<const std::byte> source() {
        const CacheView<std::byte> found = view();
        const auto readable = [](const kvcore::CacheTensor<std::byte>& tensor) {
            return kvcore::CacheTensor<const std::byte>{
                tensor.data,         tensor.layers,      tensor.page_stride, tensor.layer_stride,
                tensor.token_stride, tensor.head_stride, tensor.row_bytes};
        };
        return {found.layers, found.page_size, found.heads, readable(found.k), readable(found.v)};
    }

    Bytes memory;

   private:
    void fill_table(kvcore::CacheTensor<std::byte>& tensor, std::vector<std::byte*>& table) const {
        if (shifts_.empty()) return;
        table.clear();
        for (std::size_t layer = 0; layer < shifts_.size(); ++layer) {
            table.push_back(tensor.layer(static_cast<std::int64_t>(layer)) + shifts_[layer]);
        }
        tensor.layers = table.data();
        tensor.data = nullptr;
        tensor.layer_stride = 1;  // of no meaning
    }

    CacheLayout layout_;
    std::int64_t offset_;
    std::vector<std::int64_t> shifts_;
    std::vector<std::byte*> k_table_;
    std::vector<std::byte*> v_table_;
};

std::vector<PagePair> random_pairs(Random& random, std::int64_t sources, std::int64_t targets) {
    std::vector<PagePair> pairs;
    for (const auto target : shuffled<std::int64_t>(random, targets)) {
        if (random.chance(20)) pairs.push_back({-1, target});
        if (random.chance(10)) pairs.push_back({0, -1 - random.below(5)});
        if (random.chance(70)) pairs.push_back({random.below(sources), target});
    }
    return pairs;
}

void pages_move_as_on_the_cpu(Random& random) {
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
        CHECK_EQ(cuda::transfer(from.source(), found.view(), pairs.data(), size_of(pairs), layers,
                                random.chance(30) ? 1 + random.below(3) : 0, kDefault),
                 cuda::kSuccess);
        CHECK(found.memory == expected.memory);
        CHECK(from.memory == before);
    }
}

void starts_of_pages_are_copied_as_on_the_cpu(Random& random) {
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
        CHECK_EQ(cuda::copy_partial(found.view(), copies.data(), size_of(copies), kDefault),
                 cuda::kSuccess);
        CHECK(found.memory == expected.memory);
    }
}

void whole_pages_are_copied_and_digested(Random& random) {
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
        CHECK_EQ(cuda::copy_pages({found.data() + offset, stride, bytes}, pairs.data(),
                                  size_of(pairs), kDefault),
                 cuda::kSuccess);
        CHECK(found == expected);

        std::vector<std::uint64_t> digests(ids.size() + 1, 77);
        std::vector<std::uint64_t> digests_expected = digests;
        kvcore::digest_pages({found.data() + offset, stride, bytes}, ids.data(), size_of(ids),
                             digests_expected.data());
        CHECK_EQ(cuda::digest_pages({found.data() + offset, stride, bytes}, ids.data(),
                                    size_of(ids), digests.data(), kDefault),
                 cuda::kSuccess);
        CHECK(digests == digests_expected);
        CHECK(found == expected);
    }
}

/// So many that a team takes more than one round of a page, and a page more than one team.
void many_pages_are_digested() {
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
    CHECK_EQ(cuda::digest_pages(pool, ids.data(), size_of(ids), found.data(), kDefault),
             cuda::kSuccess);
    CHECK(found == expected);
    CHECK_EQ(cuda::add_digests(pool, ids.data(), size_of(ids), 3, found.data(), kDefault),
             cuda::kSuccess);
    for (std::uint64_t& digest : expected) digest *= 4;
    CHECK(found == expected);
}

void batches_of_copies_move_their_bytes(Random& random) {
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

int main(int argc, char** argv) {
    Random random(seed_from(argc, argv, 63));
    cuda::emulation::reset(1);
    pages_move_as_on_the_cpu(random);
    starts_of_pages_are_copied_as_on_the_cpu(random);
    whole_pages_are_copied_and_digested(random);
    many_pages_are_digested();
    batches_of_copies_move_their_bytes(random);
    return 0;
}
