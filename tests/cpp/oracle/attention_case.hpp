// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kvcore/attention.hpp"
#include "oracle/elements.hpp"
#include "support/random.hpp"

/// A pool, a batch, and the expected attention results in double precision.
namespace attention_case {

using Bytes = std::vector<std::byte>;
using kvcore::DType;

enum class Layout { kTokensFirst, kHeadsFirst, kJoint, kSplit, kInlineScales };
enum class Scaling { kNone, kTensor, kHead, kTokenHead, kGroup };

/// The parameters of a case. Latent layouts have one head, and the values are the start of the
/// keys.
struct Shape {
    DType dtype = DType::kFloat32;
    DType query_dtype = DType::kFloat32;
    Layout layout = Layout::kTokensFirst;
    Scaling scaling = Scaling::kNone;
    std::int64_t page_size = 16;
    std::int64_t heads = 2;
    std::int64_t group = 1;
    std::int64_t key_dim = 64;  // in latent layouts without the rope part
    std::int64_t value_dim = 64;
    std::int64_t rope_dim = 0;
    std::vector<std::uint32_t> cached;
    std::vector<std::uint32_t> added;
    std::int64_t shared_tokens = 0;  // whole pages that all rows share at their start
    float spread = 2;                // of the scores
};

struct Result {
    std::vector<double> values;  // [tokens, query heads, value_dim]
    std::vector<double> lse;     // [tokens, query heads]
};

class Case {
   public:
    Case(Random& random, const Shape& shape) : shape_(shape) {
        lay_out_batch(random);
        lay_out_pool(random);
        fill_tokens(random);
        fill_queries(random);
        rule_.scale = shape.spread / std::sqrt(static_cast<float>(shape.key_dim + shape.rope_dim)) /
                      (magnitude_ * magnitude_);
    }
    Case(const Case&) = delete;
    Case& operator=(const Case&) = delete;

    kvcore::AttentionRule& rule() { return rule_; }
    const Shape& shape() const { return shape_; }
    std::int64_t query_heads() const { return shape_.heads * shape_.group; }
    std::int64_t tokens() const { return offsets_.back(); }
    std::int64_t batch() const { return static_cast<std::int64_t>(shape_.cached.size()); }
    float magnitude() const { return magnitude_; }
    kvcore::PoolView<const std::byte>& pool() { return pool_; }
    std::vector<std::uint32_t>& pages() { return pages_; }
    std::vector<kvcore::SharedRows>& shared() { return shared_; }

    /// Return an input that points into the case.
    kvcore::AttentionInput input() const {
        kvcore::AttentionInput input;
        input.pool = pool_;
        input.table = {pages_.data(), width_, width_, batch()};
        input.cached = shape_.cached.data();
        input.offsets = offsets_.data();
        input.queries = {queries_.data() + 3, shape_.query_dtype, query_heads(), query_stride_,
                         query_head_stride_};
        input.rule = rule_;
        input.shared = shared_.data();
        input.num_shared = static_cast<std::int64_t>(shared_.size());
        return input;
    }

    /// Set K and V of a token to NaN.
    void poison(std::int64_t row, std::int64_t token) {
        for (std::int64_t head = 0; head < shape_.heads; ++head) {
            for (const auto* view : {&pool_.k, &pool_.v}) {
                std::byte* at =
                    writable(view->at(page_of(row, token), token % shape_.page_size, head));
                std::fill(at, at + view->dim * kvcore::item_size(view->dtype), std::byte{255});
            }
        }
    }

    /// Replace table entries that no query reads by ids without a page.
    void leave_behind() {
        for (std::int64_t row = 0; row < batch(); ++row) {
            const auto at = static_cast<std::size_t>(row);
            const std::int64_t cached = shape_.cached[at];
            std::int64_t columns = 0;
            if (rule_.window > 0) {
                columns = std::max<std::int64_t>(0, cached + 1 - rule_.window) / shape_.page_size;
            }
            if (rule_.chunk > 0) {
                columns = std::max(columns, cached / rule_.chunk * rule_.chunk / shape_.page_size);
            }
            if (shape_.added[at] == 0) columns = width_;
            std::fill_n(pages_.begin() + row * width_, columns, ~std::uint32_t{0});
        }
    }

    Result expected() const {
        Result result;
        for (std::int64_t row = 0; row < batch(); ++row) {
            const auto at = static_cast<std::size_t>(row);
            for (std::int64_t j = 0; j < shape_.added[at]; ++j) {
                for (std::int64_t head = 0; head < query_heads(); ++head) {
                    answer(row, j, head, result);
                }
            }
        }
        return result;
    }

   private:
    void lay_out_batch(Random& random) {
        std::int64_t longest = 1;
        offsets_.push_back(0);
        for (std::size_t row = 0; row < shape_.cached.size(); ++row) {
            offsets_.push_back(offsets_.back() + shape_.added[row]);
            longest = std::max<std::int64_t>(longest,
                                             std::int64_t{shape_.cached[row]} + shape_.added[row]);
        }
        const std::int64_t size = shape_.page_size;
        width_ = (longest + size - 1) / size + random.below(3);
        const std::int64_t common = shape_.shared_tokens / size;
        const std::int64_t all = width_ * batch() + 2;
        num_pages_ = all;
        std::vector<std::uint32_t> free;
        for (std::int64_t i = 0; i < all; ++i) free.push_back(static_cast<std::uint32_t>(i));
        for (std::size_t i = free.size(); i > 1; --i) {
            std::swap(free[i - 1],
                      free[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
        }
        for (std::int64_t row = 0; row < batch(); ++row) {
            for (std::int64_t column = 0; column < width_; ++column) {
                const bool is_common = row > 0 && column < common;
                pages_.push_back(is_common ? pages_[static_cast<std::size_t>(column)]
                                           : free[static_cast<std::size_t>(row * width_ + column)]);
            }
        }
    }

    // A tensor in its own buffer, filled with bytes that are NaN in every dtype that has a NaN.
    kvcore::PagedTensor<const std::byte> tensor(Random& random, DType dtype, std::int64_t dim,
                                                Bytes& bytes) {
        const std::int64_t item = kvcore::item_size(dtype);
        const std::int64_t gap = random.below(3) * item;
        kvcore::PagedTensor<const std::byte> view;
        view.dtype = dtype;
        view.dim = dim;
        const std::int64_t head_bytes = dim * item + gap;
        if (shape_.layout == Layout::kHeadsFirst) {
            view.token_stride = head_bytes;
            view.head_stride = head_bytes * shape_.page_size + gap;
            view.page_stride = view.head_stride * shape_.heads;
        } else {
            view.head_stride = head_bytes;
            view.token_stride = head_bytes * shape_.heads + gap;
            view.page_stride = view.token_stride * shape_.page_size;
        }
        const std::int64_t base = random.below(5);
        bytes.assign(static_cast<std::size_t>(view.page_stride * num_pages_ + base),
                     std::byte{255});
        view.data = bytes.data() + base;
        return view;
    }

    void add_scales(kvcore::PagedTensor<const std::byte>& view, std::vector<float>& scales) {
        if (shape_.scaling == Scaling::kNone) return;
        const std::int64_t size = sizeof(float);
        kvcore::ScaleView<const std::byte>& of = view.scales;
        of.group = view.dim;
        std::int64_t n = 1;
        if (shape_.scaling == Scaling::kHead) {
            of.head_stride = size;
            n = shape_.heads;
        } else if (shape_.scaling != Scaling::kTensor) {
            if (shape_.scaling == Scaling::kGroup) of.group = (view.dim + 3) / 4;
            const std::int64_t groups = (view.dim + of.group - 1) / of.group;
            of.head_stride = groups * size;
            of.token_stride = of.head_stride * shape_.heads;
            of.page_stride = of.token_stride * shape_.page_size;
            n = num_pages_ * shape_.page_size * shape_.heads * groups;
        }
        scales.assign(static_cast<std::size_t>(n), std::numeric_limits<float>::quiet_NaN());
        of.data = reinterpret_cast<const std::byte*>(scales.data());
    }

    void lay_out_pool(Random& random) {
        pool_.pages = num_pages_;
        pool_.page_size = shape_.page_size;
        pool_.heads = shape_.heads;
        magnitude_ =
            shape_.dtype == DType::kInt8 && shape_.scaling == Scaling::kNone ? 40.0F : 1.0F;
        if (shape_.layout == Layout::kTokensFirst || shape_.layout == Layout::kHeadsFirst) {
            pool_.k = tensor(random, shape_.dtype, shape_.key_dim, k_bytes_);
            pool_.v = tensor(random, shape_.dtype, shape_.value_dim, v_bytes_);
            add_scales(pool_.k, k_scales_);
            add_scales(pool_.v, v_scales_);
            return;
        }
        lay_out_latent(random);
        pool_.v = pool_.k;
        pool_.v.dim = shape_.value_dim;
    }

    void lay_out_latent(Random& random) {
        const std::int64_t rope = shape_.rope_dim;
        if (shape_.layout == Layout::kJoint) {
            pool_.k = tensor(random, shape_.dtype, shape_.key_dim + rope, k_bytes_);
        } else if (shape_.layout == Layout::kSplit) {
            pool_.k = tensor(random, shape_.dtype, shape_.key_dim, k_bytes_);
            pool_.rope = tensor(random, DType::kBFloat16, rope, rope_bytes_);
        } else {  // codes, a scale for each quarter, rope
            const std::int64_t row = shape_.key_dim + 16 + 2 * rope;
            k_bytes_.assign(static_cast<std::size_t>(row * shape_.page_size * num_pages_),
                            std::byte{255});
            pool_.k = {k_bytes_.data(), shape_.dtype, shape_.key_dim, row * shape_.page_size, row};
            pool_.k.scales = {k_bytes_.data() + shape_.key_dim, row * shape_.page_size, row, 0,
                              shape_.key_dim / 4};
            pool_.rope = {k_bytes_.data() + shape_.key_dim + 16, DType::kBFloat16, rope,
                          row * shape_.page_size, row};
        }
    }

    static std::byte* writable(const std::byte* at) { return const_cast<std::byte*>(at); }

    float draw(Random& random) const {
        return static_cast<float>(random.between(-1000, 1000)) / 600.0F * magnitude_;
    }

    void fill_head(Random& random, const kvcore::PagedTensor<const std::byte>& view,
                   std::int64_t page, std::int64_t token, std::int64_t head) {
        const kvcore::ScaleView<const std::byte>& scales = view.scales;
        for (std::int64_t i = 0; i < view.dim; ++i) {
            float scale = 1;
            if (scales.data != nullptr) {
                std::byte* at = writable(scales.data) + page * scales.page_stride +
                                token * scales.token_stride + head * scales.head_stride +
                                i / scales.group * 4;
                std::memcpy(&scale, at, sizeof scale);
                if (!(scale > 0)) scale = static_cast<float>(random.between(5, 20)) / 1000.0F;
                std::memcpy(at, &scale, sizeof scale);
            }
            write_element(view.dtype,
                          writable(view.at(page, token, head)) + i * kvcore::item_size(view.dtype),
                          draw(random) / scale);
        }
    }

    // Write the tokens of the rows; everything else stays NaN.
    void fill_tokens(Random& random) {
        for (std::int64_t row = 0; row < batch(); ++row) {
            const auto at = static_cast<std::size_t>(row);
            const std::int64_t length = std::int64_t{shape_.cached[at]} + shape_.added[at];
            for (std::int64_t token = 0; token < length; ++token) {
                if (row > 0 && token < shape_.shared_tokens / shape_.page_size * shape_.page_size &&
                    token < std::int64_t{shape_.cached[0]} + shape_.added[0]) {
                    continue;
                }
                const std::int64_t page = page_of(row, token);
                const std::int64_t slot = token % shape_.page_size;
                for (std::int64_t head = 0; head < shape_.heads; ++head) {
                    fill_head(random, pool_.k, page, slot, head);
                    if (pool_.v.data != pool_.k.data) fill_head(random, pool_.v, page, slot, head);
                    if (pool_.rope.dim > 0) fill_head(random, pool_.rope, page, slot, head);
                }
            }
        }
    }

    void fill_queries(Random& random) {
        const std::int64_t item = kvcore::item_size(shape_.query_dtype);
        const std::int64_t dim = shape_.key_dim + shape_.rope_dim;
        query_head_stride_ = (dim + random.below(4)) * item;
        query_stride_ = query_head_stride_ * query_heads() + random.below(3) * item;
        queries_.assign(static_cast<std::size_t>(query_stride_ * tokens() + 3), std::byte{255});
        for (std::int64_t token = 0; token < tokens(); ++token) {
            for (std::int64_t head = 0; head < query_heads(); ++head) {
                for (std::int64_t i = 0; i < dim; ++i) {
                    write_element(shape_.query_dtype,
                                  queries_.data() + 3 + token * query_stride_ +
                                      head * query_head_stride_ + i * item,
                                  draw(random));
                }
            }
        }
    }

    std::int64_t page_of(std::int64_t row, std::int64_t token) const {
        return pages_[static_cast<std::size_t>(row * width_ + token / shape_.page_size)];
    }

    double element(const kvcore::PagedTensor<const std::byte>& view, std::int64_t row,
                   std::int64_t token, std::int64_t head, std::int64_t i) const {
        const std::int64_t page = page_of(row, token);
        const std::int64_t slot = token % shape_.page_size;
        double value =
            read_element(view.dtype, view.at(page, slot, head) + i * kvcore::item_size(view.dtype));
        const kvcore::ScaleView<const std::byte>& scales = view.scales;
        if (scales.data != nullptr) {
            float scale;
            std::memcpy(&scale,
                        scales.data + page * scales.page_stride + slot * scales.token_stride +
                            head * scales.head_stride + i / scales.group * 4,
                        sizeof scale);
            value *= scale;
        }
        return value;
    }

    double score(std::int64_t row, std::int64_t key, std::int64_t token, std::int64_t head) const {
        const std::int64_t dim = shape_.key_dim + shape_.rope_dim;
        double sum = 0;
        for (std::int64_t i = 0; i < dim; ++i) {
            const double q =
                read_element(shape_.query_dtype, queries_.data() + 3 + token * query_stride_ +
                                                     head * query_head_stride_ +
                                                     i * kvcore::item_size(shape_.query_dtype));
            sum += q * (i < pool_.k.dim
                            ? element(pool_.k, row, key, head / shape_.group, i)
                            : element(pool_.rope, row, key, head / shape_.group, i - pool_.k.dim));
        }
        sum *= rule_.scale;
        return rule_.soft_cap > 0 ? rule_.soft_cap * std::tanh(sum / rule_.soft_cap) : sum;
    }

    void answer(std::int64_t row, std::int64_t j, std::int64_t head, Result& result) const {
        const auto at = static_cast<std::size_t>(row);
        const std::int64_t position = shape_.cached[at] + j;
        const std::int64_t length = std::int64_t{shape_.cached[at]} + shape_.added[at];
        const std::int64_t end = rule_.is_causal ? position + 1 : length;
        std::vector<std::int64_t> keys;
        for (std::int64_t key = 0; key < end; ++key) {
            const bool is_near = rule_.window == 0 || position - key < rule_.window;
            const bool is_beside = rule_.chunk == 0 || position / rule_.chunk == key / rule_.chunk;
            if (is_near && is_beside) keys.push_back(key);
        }
        std::vector<double> scores;
        double most =
            rule_.sinks == nullptr ? -std::numeric_limits<double>::infinity() : rule_.sinks[head];
        for (const std::int64_t key : keys) {
            scores.push_back(score(row, key, offsets_[at] + j, head));
            most = std::max(most, scores.back());
        }
        double total = rule_.sinks == nullptr ? 0 : std::exp(rule_.sinks[head] - most);
        std::vector<double> sums(static_cast<std::size_t>(shape_.value_dim));
        for (std::size_t i = 0; i < keys.size(); ++i) scores[i] = std::exp(scores[i] - most);
        for (const std::int64_t key : keys) {
            const double weight = scores[static_cast<std::size_t>(key - keys.front())];
            total += weight;
            for (std::int64_t i = 0; i < shape_.value_dim; ++i) {
                sums[static_cast<std::size_t>(i)] +=
                    weight * element(pool_.v, row, key, head / shape_.group, i);
            }
        }
        for (const double sum : sums) result.values.push_back(total > 0 ? sum / total : 0);
        result.lse.push_back(most + std::log(total));
    }

    Shape shape_;
    kvcore::AttentionRule rule_;
    std::vector<std::uint32_t> offsets_;
    std::vector<std::uint32_t> pages_;
    std::int64_t width_ = 0;
    std::int64_t num_pages_ = 0;
    float magnitude_ = 1;
    kvcore::PoolView<const std::byte> pool_;
    Bytes k_bytes_;
    Bytes v_bytes_;
    Bytes rope_bytes_;
    std::vector<float> k_scales_;
    std::vector<float> v_scales_;
    Bytes queries_;
    std::int64_t query_stride_ = 0;
    std::int64_t query_head_stride_ = 0;
    std::vector<kvcore::SharedRows> shared_;
};

}  // namespace attention_case
