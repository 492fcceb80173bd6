// SPDX-License-Identifier: Apache-2.0
// Transfers between all layouts, and copies of the first tokens of pages, byte by byte against the
// offsets of the layout. The tests compare whole caches, so they also check that no other byte is
// written.
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "data/copy_runs.hpp"
#include "kvcore/page_bytes.hpp"
#include "support/random.hpp"

namespace tests::data::transfer {

using kvcore::CacheLayout;
using kvcore::CacheSizes;
using kvcore::CacheView;
using kvcore::DType;
using kvcore::LayerRange;
using kvcore::LayoutName;
using kvcore::PagePair;
using kvcore::PageStart;
using kvcore::TensorLayout;
using Bytes = std::vector<std::byte>;

namespace {

Bytes random_bytes(Random& random, std::int64_t n) {
    Bytes bytes(static_cast<std::size_t>(n));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
    return bytes;
}

std::vector<std::int64_t> shuffled(Random& random, std::int64_t n) {
    std::vector<std::int64_t> ids(static_cast<std::size_t>(n));
    std::iota(ids.begin(), ids.end(), 0);
    if (random.chance(30)) return ids;  // consecutive ids
    for (std::int64_t i = n - 1; i > 0; --i) {
        std::swap(ids[static_cast<std::size_t>(i)],
                  ids[static_cast<std::size_t>(random.below(i + 1))]);
    }
    return ids;
}

/// A cache at an odd address, sometimes with a table of its layers.
struct Cache {
    Cache(Random& random, const CacheSizes& sizes, LayoutName name)
        : layout(kvcore::layout_of(name, sizes).value_or(CacheLayout{})),
          offset(random.below(70)),
          memory(random_bytes(random, layout.bytes + offset + 70)),
          has_tables(random.chance(30)) {}

    template <class Byte>
    CacheView<Byte> view(std::vector<Byte*>& k_table, std::vector<Byte*>& v_table) {
        CacheView<Byte> found = kvcore::view_of<Byte>(layout, memory.data() + offset);
        if (has_tables) {
            for (std::int64_t layer = 0; layer < found.layers; ++layer) {
                k_table.push_back(found.k.layer(layer));
                v_table.push_back(found.v.layer(layer));
            }
            found.k.layers = k_table.data();
            found.v.layers = v_table.data();
            found.k.layer_stride = found.v.layer_stride = 0;
            found.k.data = found.v.data = nullptr;
        }
        return found;
    }
    std::byte& at(const TensorLayout& tensor, std::int64_t page, std::int64_t layer,
                  std::int64_t token, std::int64_t head, std::int64_t byte) {
        return memory[static_cast<std::size_t>(offset + tensor.offset(page, layer, token, head) +
                                               byte)];
    }

    CacheLayout layout;
    std::int64_t offset;
    Bytes memory;
    bool has_tables;
};

/// Copies rows byte by byte.
void copy_rows(Cache& to, Cache& from, const PagePair& pair, LayerRange layers,
               std::int64_t tokens) {
    for (const bool is_k : {true, false}) {
        const TensorLayout& of_to = is_k ? to.layout.k : to.layout.v;
        const TensorLayout& of_from = is_k ? from.layout.k : from.layout.v;
        for (std::int64_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
            for (std::int64_t token = 0; token < tokens; ++token) {
                for (std::int64_t head = 0; head < to.layout.sizes.heads; ++head) {
                    for (std::int64_t byte = 0; byte < of_to.row_bytes; ++byte) {
                        to.at(of_to, pair.destination, layer, token, head, byte) =
                            from.at(of_from, pair.source, layer, token, head, byte);
                    }
                }
            }
        }
    }
}

CacheSizes random_sizes(Random& random) {
    CacheSizes sizes{random.between(1, 9),
                     random.between(1, 4),
                     random.between(1, 5),
                     random.between(1, 4),
                     random.between(1, 70),
                     0,
                     static_cast<DType>(random.below(kvcore::kNumDTypes))};
    sizes.dim_v = random.chance(60) ? sizes.dim_k : random.below(70);
    return sizes;
}

LayoutName random_name(Random& random) {
    return static_cast<LayoutName>(random.below(kvcore::kNumLayouts));
}

std::vector<PagePair> random_pairs(Random& random, std::int64_t sources, std::int64_t targets) {
    const auto from = shuffled(random, sources);
    const auto to = shuffled(random, targets);
    std::vector<PagePair> pairs;
    for (std::size_t i = 0; i < std::min(from.size(), to.size()); ++i) {
        if (random.chance(20)) pairs.push_back({-1, to[i]});
        if (random.chance(10)) pairs.push_back({from[i], -1 - random.below(5)});
        pairs.push_back({from[i], to[i]});
        if (random.chance(10)) break;
    }
    return pairs;
}

TEST(pages_move_between_all_layouts) {
    Random random(check::seed_or(12));
    for (int i = 0; i < check::rounds(4000); ++i) {
        CacheSizes sizes = random_sizes(random);
        Cache from(random, sizes, random_name(random));
        sizes.pages = random.between(1, 9);
        Cache to(random, sizes, random_name(random));
        const auto pairs = random_pairs(random, from.layout.sizes.pages, sizes.pages);
        LayerRange layers{random.below(sizes.layers), 0};
        layers.count = random.chance(50) ? sizes.layers - layers.first
                                         : random.between(0, sizes.layers - layers.first);
        Cache expected = to;
        for (const PagePair& pair : pairs) {
            if (pair.source >= 0 && pair.destination >= 0) {
                copy_rows(expected, from, pair, layers, sizes.page_size);
            }
        }
        std::vector<const std::byte*> from_k, from_v;
        std::vector<std::byte*> to_k, to_v;
        kvcore::transfer(from.view<const std::byte>(from_k, from_v), to.view<std::byte>(to_k, to_v),
                         pairs.data(), static_cast<std::int64_t>(pairs.size()), layers,
                         static_cast<int>(random.between(1, 3)));
        CHECK(to.memory == expected.memory);
    }
}

TEST(starts_of_pages_are_copied) {
    Random random(check::seed_or(12));
    for (int i = 0; i < check::rounds(2000); ++i) {
        const CacheSizes sizes = random_sizes(random);
        Cache cache(random, sizes, random_name(random));
        const auto ids = shuffled(random, sizes.pages);
        const std::size_t half = ids.size() / 2;
        std::vector<PageStart> copies;
        for (std::size_t j = half; j < ids.size() && half > 0; ++j) {
            copies.push_back({ids[j % half], ids[j], random.between(0, sizes.page_size)});
        }
        Cache expected = cache;
        for (const PageStart& copy : copies) {
            copy_rows(expected, expected, {copy.source, copy.destination}, {0, sizes.layers},
                      copy.tokens);
        }
        std::vector<std::byte*> k, v;
        kvcore::copy_partial(cache.view<std::byte>(k, v), copies.data(),
                             static_cast<std::int64_t>(copies.size()),
                             static_cast<int>(random.between(1, 3)));
        CHECK(cache.memory == expected.memory);
    }
}

/// K [pages, heads, dim / x, page_size, x] and V [pages, heads, dim, page_size] of each layer.
struct PackedCache {
    PackedCache(Random& random, const CacheSizes& from)
        : sizes(from),
          item(kvcore::item_size(from.dtype)),
          k(random_bytes(random, size(from.dim_k))),
          v(random_bytes(random, size(from.dim_v))) {}

    [[nodiscard]] std::int64_t size(std::int64_t dim) const {
        return sizes.layers * sizes.pages * sizes.heads * dim * sizes.page_size * item;
    }
    [[nodiscard]] std::int64_t head(std::int64_t dim, std::int64_t page, std::int64_t layer,
                                    std::int64_t h) const {
        return ((layer * sizes.pages + page) * sizes.heads + h) * dim * sizes.page_size * item;
    }
    std::byte& k_at(std::int64_t page, std::int64_t layer, std::int64_t token, std::int64_t h,
                    std::int64_t byte) {
        return k[static_cast<std::size_t>(head(sizes.dim_k, page, layer, h) +
                                          (byte / 16 * sizes.page_size + token) * 16 + byte % 16)];
    }
    std::byte& v_at(std::int64_t page, std::int64_t layer, std::int64_t token, std::int64_t h,
                    std::int64_t byte) {
        const std::int64_t element = byte / item;
        return v[static_cast<std::size_t>(head(sizes.dim_v, page, layer, h) +
                                          (element * sizes.page_size + token) * item +
                                          byte % item)];
    }
    template <class Byte>
    kvcore::PackedCacheView<Byte> view() {
        const auto tensor = [&](Bytes& memory, std::int64_t dim, std::int64_t unit) {
            const std::int64_t of_head = dim * sizes.page_size * item;
            return kvcore::PackedTensor<Byte>{memory.data(),
                                              nullptr,
                                              of_head * sizes.heads,
                                              of_head * sizes.heads * sizes.pages,
                                              of_head,
                                              dim * item / unit,
                                              unit};
        };
        return {tensor(k, sizes.dim_k, 16), tensor(v, sizes.dim_v, item)};
    }

    CacheSizes sizes;
    std::int64_t item;
    Bytes k;
    Bytes v;
};

/// Calls copy(byte of the packed cache, byte of the plain cache) for all bytes of a page.
template <class Copy>
void for_each_byte(PackedCache& packed, Cache& plain, std::int64_t packed_page,
                   std::int64_t plain_page, LayerRange layers, const Copy& copy) {
    const CacheSizes& sizes = packed.sizes;
    for (std::int64_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
        for (std::int64_t token = 0; token < sizes.page_size; ++token) {
            for (std::int64_t head = 0; head < sizes.heads; ++head) {
                for (std::int64_t i = 0; i < plain.layout.k.row_bytes; ++i) {
                    copy(packed.k_at(packed_page, layer, token, head, i),
                         plain.at(plain.layout.k, plain_page, layer, token, head, i));
                }
                for (std::int64_t i = 0; i < plain.layout.v.row_bytes; ++i) {
                    copy(packed.v_at(packed_page, layer, token, head, i),
                         plain.at(plain.layout.v, plain_page, layer, token, head, i));
                }
            }
        }
    }
}

TEST(vllm_pages_are_packed_and_unpacked) {
    Random random(check::seed_or(12));
    const std::vector<std::int64_t> page_sizes = {1, 3, 8, 16, 24, 33};
    for (int i = 0; i < check::rounds(600); ++i) {
        CacheSizes sizes = random_sizes(random);
        sizes.page_size = page_sizes[static_cast<std::size_t>(random.below(6))];
        sizes.dim_k = 16 / kvcore::item_size(sizes.dtype) * random.between(1, 6);
        PackedCache packed(random, sizes);
        Cache plain(random, sizes, random_name(random));
        const LayerRange layers{sizes.layers > 1 ? 1 : 0, sizes.layers > 1 ? sizes.layers - 1 : 1};
        const auto pairs = random_pairs(random, sizes.pages, sizes.pages);
        const auto n = static_cast<std::int64_t>(pairs.size());
        const auto threads = static_cast<int>(random.between(1, 3));
        PackedCache packed_expected = packed;
        Cache plain_expected = plain;
        for (const PagePair& pair : pairs) {
            if (pair.source < 0 || pair.destination < 0) continue;
            for_each_byte(packed_expected, plain, pair.destination, pair.source, layers,
                          [](std::byte& to, const std::byte& from) { to = from; });
            for_each_byte(packed, plain_expected, pair.source, pair.destination, layers,
                          [](const std::byte& from, std::byte& to) { to = from; });
        }
        std::vector<const std::byte*> from_k, from_v;
        std::vector<std::byte*> to_k, to_v;
        PackedCache target = packed;
        kvcore::transfer_to_packed(plain.view<const std::byte>(from_k, from_v),
                                   target.view<std::byte>(), pairs.data(), n, layers, threads);
        CHECK(target.k == packed_expected.k);
        CHECK(target.v == packed_expected.v);
        kvcore::transfer_from_packed(packed.view<const std::byte>(),
                                     plain.view<std::byte>(to_k, to_v), pairs.data(), n, layers,
                                     threads);
        CHECK(plain.memory == plain_expected.memory);
    }
}

/// Runs of all lengths at all offsets in a cache line, streamed and not streamed.
TEST(runs_are_copied_and_filled_exactly) {
    Random random(check::seed_or(12));
    constexpr std::int64_t kSize = 1 << 16;
    const Bytes source = random_bytes(random, kSize);
    for (const std::int64_t call_bytes : {std::int64_t{0}, kvcore::kStreamedBytes}) {
        for (int i = 0; i < 200; ++i) {
            Bytes copied = random_bytes(random, kSize);
            Bytes filled = copied;
            Bytes copied_expected = copied;
            Bytes filled_expected = copied;
            {
                kvcore::RunCopier copier(call_bytes);
                const kvcore::RunFiller filler(std::byte{0xff}, call_bytes);
                for (std::int64_t at = random.below(70); at < kSize;) {
                    const std::int64_t longest = random.chance(20) ? 9000 : 400;
                    const std::int64_t bytes = std::min(random.below(longest), kSize - at);
                    const std::int64_t from = random.below(kSize - bytes + 1);
                    copier.copy(copied.data() + at, source.data() + from, bytes);
                    filler.fill(filled.data() + at, bytes);
                    std::copy_n(source.begin() + from, bytes, copied_expected.begin() + at);
                    std::fill_n(filled_expected.begin() + at, bytes, std::byte{0xff});
                    at += bytes + random.below(70);
                }
            }
            CHECK(copied == copied_expected);
            CHECK(filled == filled_expected);
        }
    }
}

/// The transfer has enough bytes to be streamed, on one thread and on three threads.
TEST(large_transfers_are_the_same_for_all_threads) {
    Random random(check::seed_or(12));
    const CacheSizes sizes{40, 2, 16, 4, 256, 256, DType::kFloat16};
    for (const LayoutName name : {LayoutName::kLayerFirstHnd, LayoutName::kPageHead}) {
        Cache from(random, sizes, LayoutName::kMax);
        Cache one(random, sizes, name);
        Cache three = one;
        Cache expected = one;
        CHECK(from.layout.bytes * 39 / 40 > kvcore::kStreamedBytes);
        std::vector<PagePair> pairs;
        for (std::int64_t page = 1; page < 40; ++page) pairs.push_back({page, page * 7 % 40});
        for (const PagePair& pair : pairs) copy_rows(expected, from, pair, {0, 2}, 16);
        for (Cache* to : {&one, &three}) {
            std::vector<const std::byte*> from_k, from_v;
            std::vector<std::byte*> to_k, to_v;
            kvcore::transfer(from.view<const std::byte>(from_k, from_v),
                             to->view<std::byte>(to_k, to_v), pairs.data(), 39, {0, 2},
                             to == &one ? 1 : 3);
            CHECK(to->memory == expected.memory);
        }
    }
}

}  // namespace

}  // namespace tests::data::transfer
