// SPDX-License-Identifier: Apache-2.0
// Attention of a batch over the pages that its sequences hold, and over what they share.
//
// Common to all: the caller has checked sizes, dtypes and that what a query sees has pages; nothing
// is allocated but the stacks of `threads` - 1 more threads; scores, weights and sums are float32;
// results do not depend on the number of threads. x86-64-v3 and -v4 answer the same bytes, the
// baseline (which has no fused multiply-add) the same within rounding.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kvcore/dtype.hpp"
#include "kvcore/layout.hpp"
#include "kvcore/paged_batch.hpp"

namespace kvcore {

/// Vectors of this step's tokens, [tokens, heads, dim]; the elements of a head are contiguous, the
/// strides count bytes.
template <class Byte>
struct HeadVectors {
    Byte* data;
    DType dtype;  // wide
    std::int64_t heads;
    std::int64_t token_stride;
    std::int64_t head_stride;
};

/// What a query sees, and how scores become weights.
struct AttentionRule {
    float scale = 1.0F;
    bool is_causal = true;         // a token sees itself and what stands before it
    std::int64_t window = 0;       // of a token: itself and the window - 1 before it; 0: all
    std::int64_t chunk = 0;        // tokens of a chunk see none of another one; 0: there are none
    float soft_cap = 0.0F;         // scores become cap * tanh(score / cap); 0: they stay
    const float* sinks = nullptr;  // [query heads]: a score without a value that weights share with
};

/// The first position that a query at `position` sees; the queries behind it see no earlier one.
[[nodiscard]] inline std::int64_t first_seen(const AttentionRule& rule,
                                             std::int64_t position) noexcept {
    std::int64_t first = 0;
    if (rule.window > 0) first = std::max(first, position - rule.window + 1);
    if (rule.chunk > 0) first = std::max(first, position - position % rule.chunk);
    return first;
}

/// Rows of a batch that hold the same pages from their beginning: tokens [0, num_tokens) of each of
/// rows[0 .. num_rows) lie in the same pages, as far as a query of the row sees them. Groups lie in
/// each other or apart: of two groups with a common row, the rows of the longer are all rows of the
/// shorter.
struct SharedRows {
    const std::int64_t* rows;  // ascending
    std::int64_t num_rows;
    std::int64_t num_tokens;
};

/// The global scales of K and V in nvfp4 (kvcore/quantize.hpp): then `data` of a tensor are its
/// codes, `dim` counts elements, and its scales are bytes, one for each of `scales.group` = 16
/// elements.
struct Nvfp4Globals {
    bool is_nvfp4 = false;
    float k = 1.0F;
    float v = 1.0F;
};

/// Everything attention reads.
struct AttentionInput {
    PoolView<const std::byte> pool;
    PageTable table;
    const std::uint32_t* cached;           // [batch] tokens of each row before this step
    const std::uint32_t* offsets;          // [batch + 1], from 0: this step's tokens of each row
    HeadVectors<const std::byte> queries;  // [tokens, heads, k.dim + rope.dim]; heads divide by
                                           // those of the pool
    AttentionRule rule;
    const SharedRows* shared = nullptr;  // longest first
    std::int64_t num_shared = 0;
    Nvfp4Globals nvfp4 = {};
};

/// Where results go: `values` [tokens, heads, v.dim]; `lse` float32 [tokens, heads] in C order, the
/// natural logarithm of the sum of exponentials (sinks included), or nullptr.
struct AttentionOutput {
    HeadVectors<std::byte> values;
    float* lse;
};

/// Bytes of scratch, aligned to nothing, that `attention` needs for this input and number of
/// threads. O(tokens of this step, and rows times groups).
[[nodiscard]] std::int64_t attention_workspace_bytes(const AttentionInput& input, int threads);

/// Token j of row b stands at position cached[b] + j and attends over its row's tokens, those of
/// this step included, which are in their pages by now. A query that sees nothing returns zeros and
/// an LSE of -inf. Each group of `shared` is read once for all its rows. What no query of a row
/// sees is not read, and neither are its columns of the table.
/// Cost: reading the K and V that a row sees once, or 4 * dim flops per query head and token seen.
void attention(const AttentionInput& input, const AttentionOutput& output, std::byte* workspace,
               int threads = 1);

/// Partial results over disjoint keys, [n] states of `dim` elements in C order.
struct AttentionStates {
    const std::byte* values;
    const float* lse;  // -inf or +inf: an empty one
};

/// Merges states pairwise into `values` and `lse`, which may be those of `a`: with m the greater
/// LSE, (a * exp(lse_a - m) + b * exp(lse_b - m)) / (their sum), m + log(their sum). Two empty ones
/// give 0 and -inf.
void merge_states(std::int64_t n, std::int64_t dim, DType dtype, AttentionStates a,
                  AttentionStates b, std::byte* values, float* lse, int threads = 1);

}  // namespace kvcore
