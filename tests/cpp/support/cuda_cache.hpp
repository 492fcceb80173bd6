// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/cuda.hpp"
#include "support/cuda_scene.hpp"

/// Caches of random bytes in any layout, and pairs of their pages.
namespace cuda_scene {

inline kvcore::CacheSizes random_sizes(Random& random) {
    kvcore::CacheSizes sizes{random.between(1, 7),
                             random.between(1, 4),
                             random_page_size(random),
                             random.between(1, 4),
                             random_dim(random),
                             0,
                             static_cast<kvcore::DType>(random.below(kvcore::kNumDTypes))};
    sizes.dim_v = random.chance(60) ? sizes.dim_k : random.chance(50) ? 0 : random_dim(random);
    return sizes;
}

/// A cache in any layout: in one block, or with tables of layers that have addresses of different
/// alignments.
class Cache {
   public:
    Cache(Random& random, const kvcore::CacheSizes& sizes)
        : layout_(kvcore::layout_of(
                      static_cast<kvcore::LayoutName>(random.below(kvcore::kNumLayouts)), sizes)
                      .value_or(kvcore::CacheLayout{})),
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

    [[nodiscard]] const kvcore::CacheSizes& sizes() const { return layout_.sizes; }

    [[nodiscard]] kvcore::CacheView<std::byte> view() {
        kvcore::CacheView<std::byte> found =
            kvcore::view_of<std::byte>(layout_, memory.data() + offset_);
        fill_table(found.k, k_table_);
        fill_table(found.v, v_table_);
        return found;
    }
    [[nodiscard]] kvcore::CacheView<const std::byte> source() {
        const kvcore::CacheView<std::byte> found = view();
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
        tensor.layer_stride = 1;  // must not be used
    }

    kvcore::CacheLayout layout_;
    std::int64_t offset_;
    std::vector<std::int64_t> shifts_;
    std::vector<std::byte*> k_table_;
    std::vector<std::byte*> v_table_;
};

inline std::vector<kvcore::PagePair> random_pairs(Random& random, std::int64_t sources,
                                                  std::int64_t targets) {
    std::vector<kvcore::PagePair> pairs;
    for (const auto target : shuffled<std::int64_t>(random, targets)) {
        if (random.chance(20)) pairs.push_back({-1, target});
        if (random.chance(10)) pairs.push_back({0, -1 - random.below(5)});
        if (random.chance(70)) pairs.push_back({random.below(sources), target});
    }
    return pairs;
}

/// Return the pairs, mixed with pairs whose pages are missing in one or both caches.
inline std::vector<kvcore::PagePair> with_strange_pairs(Random& random,
                                                        const std::vector<kvcore::PagePair>& pairs,
                                                        kvcore::cuda::PageCounts pages) {
    return with_strangers(random, pairs, [&]() -> kvcore::PagePair {
        const std::int64_t source = random_stranger(random, pages.source);
        const std::int64_t destination = random_stranger(random, pages.destination);
        if (random.chance(40)) return {source, destination};
        return random.chance(50) ? kvcore::PagePair{source, random.below(pages.destination)}
                                 : kvcore::PagePair{random.below(pages.source), destination};
    });
}

}  // namespace cuda_scene
