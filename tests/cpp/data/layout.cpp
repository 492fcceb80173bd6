// SPDX-License-Identifier: Apache-2.0
// Layouts against counting: every byte of a cache is a byte of exactly one row, at the place that
// follows from the order of the axes.
#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "kvcore/layout.hpp"
#include "support/random.hpp"

namespace tests::data::layout {

using kvcore::CacheLayout;
using kvcore::CacheSizes;
using kvcore::DType;
using kvcore::LayoutName;
using kvcore::RowFormat;
using kvcore::TensorLayout;

namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

/// The axes as KERNELS.md writes shapes: p page, k K or V, l layer, t token, h head.
constexpr std::string_view kShapes[] = {"pklth", "klpth", "lpkth", "klpht", "lpkht",
                                        "kptlh", "kplth", "kphtl", "plkth"};

CacheLayout laid_out(LayoutName name, const CacheSizes& sizes) {
    const auto layout = kvcore::layout_of(name, sizes);
    CHECK(layout.has_value());
    return layout.value_or(CacheLayout{});
}

struct Row {
    std::int64_t page, kv, layer, token, head;
    std::int64_t& operator[](char axis) {
        switch (axis) {
            case 'p':
                return page;
            case 'k':
                return kv;
            case 'l':
                return layer;
            case 't':
                return token;
            default:
                return head;
        }
    }
};

std::int64_t count_of(const CacheSizes& sizes, char axis) {
    switch (axis) {
        case 'p':
            return sizes.pages;
        case 'k':
            return 2;
        case 'l':
            return sizes.layers;
        case 't':
            return sizes.page_size;
        default:
            return sizes.heads;
    }
}

/// Calls visit(row) in the order of the rows in memory.
template <class Visit>
void walk(const CacheSizes& sizes, std::string_view shape, std::size_t depth, Row& row,
          const Visit& visit) {
    if (depth == shape.size()) return visit(row);
    for (std::int64_t i = 0; i < count_of(sizes, shape[depth]); ++i) {
        row[shape[depth]] = i;
        walk(sizes, shape, depth + 1, row, visit);
    }
}

CacheSizes random_sizes(Random& random) {
    CacheSizes sizes{random.between(1, 4),
                     random.between(1, 4),
                     random.between(1, 5),
                     random.between(1, 4),
                     random.between(1, 20),
                     random.below(20),
                     static_cast<DType>(random.below(kvcore::kNumDTypes))};
    if (random.chance(30)) {
        sizes.format = RowFormat::kInlineScale;
        sizes.dtype = DType::kFloat8E4M3FN;
    }
    return sizes;
}

TEST(rows_follow_each_other_in_the_order_of_the_axes) {
    Random random(check::seed_or(11));
    for (int i = 0; i < 300; ++i) {
        const CacheSizes sizes = random_sizes(random);
        const std::int64_t extra = sizes.format == RowFormat::kInlineScale ? 16 : 0;
        const std::int64_t item = kvcore::item_size(sizes.dtype);
        const std::int64_t k_bytes = sizes.dim_k * item + extra;
        const std::int64_t v_bytes = sizes.dim_v == 0 ? 0 : sizes.dim_v * item + extra;
        for (std::size_t name = 0; name < std::size(kShapes); ++name) {
            check::note = kShapes[name];
            const CacheLayout layout = laid_out(static_cast<LayoutName>(name), sizes);
            CHECK_EQ(layout.k.row_bytes, k_bytes);
            CHECK_EQ(layout.v.row_bytes, v_bytes);
            std::int64_t expected = 0;
            Row row{};
            walk(sizes, kShapes[name], 0, row, [&](const Row& at) {
                const TensorLayout& tensor = at.kv == 0 ? layout.k : layout.v;
                CHECK_EQ(tensor.offset(at.page, at.layer, at.token, at.head), expected);
                expected += tensor.row_bytes;
            });
            CHECK_EQ(layout.bytes, expected);
        }
    }
    check::note.clear();
}

TEST(offsets_do_not_wrap) {
    // A page of 2^20 bytes: offsets around 2^31 and 2^32, and at 2^40.
    const CacheSizes sizes{1 << 21, 8, 16, 8, 256, 256, DType::kBFloat16};
    const CacheLayout layout = laid_out(LayoutName::kMax, sizes);
    constexpr std::int64_t kPage = 1 << 20;
    CHECK_EQ(layout.k.page_stride, kPage);
    CHECK_EQ(layout.k.offset(2047, 0, 0, 0), (std::int64_t{1} << 31) - kPage);
    CHECK_EQ(layout.v.offset(2047, 7, 15, 7) + 512, std::int64_t{1} << 31);
    CHECK_EQ(layout.k.offset(2048, 0, 0, 0), std::int64_t{1} << 31);
    CHECK_EQ(layout.k.offset(4096, 0, 0, 0), std::int64_t{1} << 32);
    CHECK_EQ(layout.v.offset(4096, 0, 0, 1), (std::int64_t{1} << 32) + (1 << 19) + 512);
    CHECK_EQ(layout.k.offset(1 << 20, 0, 0, 0), std::int64_t{1} << 40);
    CHECK_EQ(layout.bytes, std::int64_t{1} << 41);
    // Rows of one byte, for example at 2^31 - 1.
    const CacheSizes tiny{std::int64_t{1} << 41, 1, 1, 1, 1, 0, DType::kInt8};
    const CacheLayout bytes = laid_out(LayoutName::kPageUnified, tiny);
    const std::int64_t places[] = {(std::int64_t{1} << 31) - 1, std::int64_t{1} << 31,
                                   std::int64_t{1} << 32, std::int64_t{1} << 40};
    for (const std::int64_t place : places) {
        CHECK_EQ(bytes.k.offset(place, 0, 0, 0), place);
        CHECK_EQ(laid_out(LayoutName::kPageFirst, {1, 1, place + 1, 1, 1, 0, DType::kInt8})
                     .k.offset(0, 0, place, 0),
                 place);
    }
}

TEST(sizes_beyond_int64_are_refused) {
    for (int name = 0; name < kvcore::kNumLayouts; ++name) {
        const auto layout = static_cast<LayoutName>(name);
        const CacheSizes half{std::int64_t{1} << 60, 1, 1, 1, 2, 2, DType::kInt8};
        CHECK_EQ(laid_out(layout, half).bytes, std::int64_t{1} << 62);
        for (int axis = 0; axis < 6; ++axis) {
            CacheSizes sizes = half;
            std::int64_t* const counts[] = {&sizes.pages, &sizes.layers, &sizes.page_size,
                                            &sizes.heads, &sizes.dim_k,  &sizes.dim_v};
            *counts[axis] *= axis < 4 ? 2 : 8;
            CHECK(!kvcore::layout_of(layout, sizes).has_value());
            *counts[axis] = -1;
            CHECK(!kvcore::layout_of(layout, sizes).has_value());
        }
        CHECK(!kvcore::layout_of(layout, {1, 1, 1, 1, kLargest, 1, DType::kInt8}).has_value());
        CHECK(!kvcore::layout_of(layout, {1, 1, 1, 1, kLargest, 0, DType::kFloat32}).has_value());
        CHECK_EQ(laid_out(layout, {0, 1, 1, 1, 1, 1, DType::kInt8}).bytes, 0);
    }
    CHECK_EQ(kvcore::row_bytes(RowFormat::kInlineScale, DType::kInt8, kLargest), -1);
}

TEST(layer_views_have_the_rows_of_the_layout) {
    Random random(check::seed_or(11));
    for (int i = 0; i < 200; ++i) {
        CacheSizes sizes = random_sizes(random);
        const auto name = static_cast<LayoutName>(random.below(kvcore::kNumLayouts));
        const CacheLayout layout = laid_out(name, sizes);
        std::vector<std::byte> memory(static_cast<std::size_t>(layout.bytes));
        const std::int64_t layer = random.below(sizes.layers);
        const auto view = kvcore::layer_view(layout, memory.data(), layer);
        CHECK_EQ(view.pages, sizes.pages);
        CHECK_EQ(view.page_size, sizes.page_size);
        CHECK_EQ(view.heads, sizes.heads);
        CHECK_EQ(view.k.dim, sizes.dim_k);
        CHECK_EQ(view.v.dim, sizes.dim_v);
        CHECK_EQ(view.rope.dim, 0);
        const std::int64_t page = random.below(sizes.pages);
        const std::int64_t token = random.below(sizes.page_size);
        const std::int64_t head = random.below(sizes.heads);
        CHECK_EQ(view.k.at(page, token, head) - memory.data(),
                 layout.k.offset(page, layer, token, head));
        if (sizes.dim_v > 0) {
            CHECK_EQ(view.v.at(page, token, head) - memory.data(),
                     layout.v.offset(page, layer, token, head));
        }
        if (sizes.format == RowFormat::kPlain) {
            CHECK(view.k.scales.data == nullptr);
            continue;
        }
        const auto& scales = view.k.scales;
        CHECK_EQ(scales.group, sizes.dim_k);
        CHECK_EQ(scales.data + page * scales.page_stride + token * scales.token_stride +
                     head * scales.head_stride,
                 view.k.at(page, token, head) + sizes.dim_k);
    }
}

TEST(latents_are_keys_and_values) {
    std::vector<std::byte> memory(std::size_t{1} << 20);
    // Joint rows: 512 elements of latent and 64 of rope.
    const CacheSizes joint{3, 2, 4, 1, 576, 0, DType::kBFloat16};
    const CacheLayout layout = laid_out(LayoutName::kMax, joint);
    auto view = kvcore::latent_view(layout, memory.data(), 1, 512);
    const std::byte* row = memory.data() + layout.k.offset(2, 1, 3, 0);
    CHECK_EQ(view.k.at(2, 3, 0), row);
    CHECK_EQ(view.v.at(2, 3, 0), row);
    CHECK_EQ(view.rope.at(2, 3, 0), row + 1024);
    CHECK_EQ(view.k.dim, 512);
    CHECK_EQ(view.v.dim, 512);
    CHECK_EQ(view.rope.dim, 64);
    CHECK_EQ(kvcore::latent_view(layout, memory.data(), 1, 576).rope.dim, 0);
    // Separate rows: the rope part is in the place of V.
    const CacheSizes apart{3, 2, 4, 1, 512, 64, DType::kBFloat16};
    const CacheLayout pair = laid_out(LayoutName::kLayerFirstNhd, apart);
    view = kvcore::latent_view(pair, memory.data(), 1, 512);
    CHECK_EQ(view.v.at(2, 3, 0), memory.data() + pair.k.offset(2, 1, 3, 0));
    CHECK_EQ(view.rope.at(2, 3, 0), memory.data() + pair.v.offset(2, 1, 3, 0));
    CHECK_EQ(view.rope.dim, 64);
    // The 656-byte row.
    const CacheSizes fp8{3, 2, 4, 1, 512, 0, DType::kFloat8E4M3FN, RowFormat::kLatentFp8};
    const CacheLayout narrow = laid_out(LayoutName::kPageUnified, fp8);
    CHECK_EQ(narrow.k.row_bytes, 656);
    CHECK_EQ(kvcore::kLatentFp8Bytes, 656);
    CHECK_EQ(narrow.bytes, 24 * kvcore::kLatentFp8Bytes);
    view = kvcore::latent_view(narrow, memory.data(), 0, 512);
    row = memory.data() + narrow.k.offset(1, 0, 2, 0);
    const auto& scales = view.k.scales;
    CHECK_EQ(view.k.at(1, 2, 0), row);
    CHECK_EQ(scales.data + scales.page_stride + 2 * scales.token_stride, row + 512);
    CHECK_EQ(view.k.scales.group, 128);
    CHECK_EQ(view.rope.at(1, 2, 0), row + 528);
    CHECK(view.rope.dtype == DType::kBFloat16);
    CHECK(view.rope.scales.data == nullptr);
}

static_assert(kvcore::layout_of(LayoutName::kMax, {2, 3, 4, 5, 6, 6, DType::kFloat16})
                  .value_or(CacheLayout{})
                  .bytes == 2880);

}  // namespace

}  // namespace tests::data::layout
