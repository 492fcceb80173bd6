// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "fakes/conversion_memory.hpp"
#include "kvcore/cuda.hpp"
#include "kvcore/paged_batch.hpp"

namespace conversion {

/// Rows of a batch with pages at any place in a pool, in strides of any alignment.
struct Scene {
    explicit Scene(Random& random)
        : page_size(random.chance(50) ? random.between(1, 9) : 16), heads(random.between(1, 3)) {
        static constexpr std::int64_t kGroups[] = {1, 3, 16, 24, 40, 59, 64, 80, 128};
        group = kGroups[random.below(9)];
        groups = random.between(1, 3);
        is_aligned = random.chance(60);
        const std::uint32_t first =
            random.chance(70) ? 0 : static_cast<std::uint32_t>(random.below(5));
        offsets.push_back(first);
        std::uint32_t next = 0;
        for (std::int64_t row = random.below(5); row > 0; --row) {
            begin.push_back(static_cast<std::uint32_t>(random.below(2 * page_size)));
            offsets.push_back(offsets.back() +
                              static_cast<std::uint32_t>(random.below(3 * page_size)));
            for (std::int64_t column = 0; column < kWidth; ++column) table.push_back(next++);
        }
        for (std::size_t i = table.size(); i > 1; --i) {
            std::swap(table[i - 1],
                      table[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
        }
        pages = next + 1;
    }

    static constexpr std::int64_t kWidth = 6;
    static constexpr std::int64_t kPadding = 3;  // tokens with memory but without a page

    [[nodiscard]] std::int64_t dim() const { return group * groups; }
    [[nodiscard]] std::int64_t end() const { return offsets.back(); }
    [[nodiscard]] kvcore::PageTable page_table() const {
        return {table.data(), kWidth, kWidth, static_cast<std::int64_t>(begin.size())};
    }
    [[nodiscard]] kvcore::TokenRanges ranges() const { return {begin.data(), offsets.data()}; }
    [[nodiscard]] kvcore::PageShape page_shape() const { return {page_size, heads}; }
    /// A batch as in a captured graph: with room for more tokens than it has.
    [[nodiscard]] kvcore::cuda::DeviceBatch device_batch() const {
        return {page_table(), ranges(), end() + kPadding, pages};
    }

    std::int64_t page_size;
    std::int64_t heads;
    std::int64_t group = 1;
    std::int64_t groups = 1;
    bool is_aligned = false;
    std::int64_t pages = 0;
    std::vector<std::uint32_t> table;
    std::vector<std::uint32_t> begin;
    std::vector<std::uint32_t> offsets;
};

/// Memory [tokens, heads, dim] with gaps. It is filled with NaN, so that a read of a gap shows.
class TokenMemory {
   public:
    TokenMemory(Random& random, const Scene& scene, kvcore::DType dtype)
        : item_(kvcore::item_size(dtype)) {
        const auto gap = [&] {
            return scene.is_aligned ? 16 * random.below(3) : random.below(9);  // bytes
        };
        head_stride_ = scene.dim() * item_ + gap();
        token_stride_ = scene.heads * head_stride_ + gap();
        bytes_.assign(
            static_cast<std::size_t>((scene.end() + Scene::kPadding) * token_stride_ + 64),
            std::byte{0xff});
        const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
        first_ = static_cast<std::int64_t>((16 - address % 16) % 16) +
                 (scene.is_aligned ? 0 : random.below(9));
    }
    /// Fill the elements of the batch's tokens.
    void fill(Random& random, const Scene& scene, kvcore::DType dtype) {
        for (std::int64_t token = scene.offsets.front(); token < scene.end(); ++token) {
            for (std::int64_t head = 0; head < scene.heads; ++head) {
                fill_elements(random, dtype, data() + token * token_stride_ + head * head_stride_,
                              scene.dim());
            }
        }
    }
    [[nodiscard]] std::byte* data() { return bytes_.data() + first_; }
    [[nodiscard]] kvcore::TokenRows<std::byte> rows() {
        return {data(), token_stride_, head_stride_};
    }
    [[nodiscard]] kvcore::TokenRows<const std::byte> seen() {
        return {data(), token_stride_, head_stride_};
    }
    /// All bytes, including the gaps.
    [[nodiscard]] Bytes& bytes() { return bytes_; }

   private:
    std::int64_t item_;
    std::int64_t head_stride_ = 0;
    std::int64_t token_stride_ = 0;
    std::int64_t first_ = 0;
    Bytes bytes_;
};

/// A pool [pages, page_size, heads, dim] ("HND": heads before tokens) and its scales, with gaps.
class PoolMemory {
   public:
    PoolMemory(Random& random, const Scene& scene, kvcore::DType dtype)
        : dtype_(dtype), dim_(scene.dim()), group_(scene.group) {
        const auto gap = [&] { return scene.is_aligned ? 16 * random.below(3) : random.below(9); };
        const bool is_hnd = random.chance(50);
        inner_ = dim_ * kvcore::item_size(dtype) + gap();
        outer_ = (is_hnd ? scene.page_size : scene.heads) * inner_ + gap();
        page_ = (is_hnd ? scene.heads : scene.page_size) * outer_ + gap();
        if (is_hnd) std::swap(inner_, outer_);  // strides of heads and of tokens
        bytes_.assign(static_cast<std::size_t>(scene.pages * page_ + 64), std::byte{0xff});
        const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
        first_ = static_cast<std::int64_t>((16 - address % 16) % 16) +
                 (scene.is_aligned ? 0 : random.below(9));
        scale_head_ = scene.groups * 4 + (scene.is_aligned ? 0 : random.below(3));
        scale_token_ = scene.heads * scale_head_;
        scale_page_ = scene.page_size * scale_token_;
        scales_.assign(static_cast<std::size_t>(scene.pages * scale_page_), std::byte{0xff});
    }
    template <class Byte>
    [[nodiscard]] kvcore::PagedTensor<Byte> view(bool has_scales) {
        kvcore::PagedTensor<Byte> found{
            bytes_.data() + first_, dtype_, dim_, page_, outer_, inner_, {}};
        if (has_scales)
            found.scales = {scales_.data(), scale_page_, scale_token_, scale_head_, group_};
        return found;
    }
    /// Fill in scales.
    void fill_scales(Random& random) {
        for (std::size_t i = 0; i + 4 <= scales_.size(); i += 4) {
            write_element(kvcore::DType::kFloat32, scales_.data() + i,
                          static_cast<float>(random.between(1, 99)) / 50.0F);
        }
    }
    [[nodiscard]] const Bytes& bytes() const { return bytes_; }
    [[nodiscard]] const Bytes& scales() const { return scales_; }

   private:
    kvcore::DType dtype_;
    std::int64_t dim_;
    std::int64_t group_;
    std::int64_t inner_ = 0;
    std::int64_t outer_ = 0;
    std::int64_t page_ = 0;
    std::int64_t first_ = 0;
    std::int64_t scale_head_ = 0;
    std::int64_t scale_token_ = 0;
    std::int64_t scale_page_ = 0;
    Bytes bytes_;
    Bytes scales_;
};

}  // namespace conversion
