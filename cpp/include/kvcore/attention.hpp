// SPDX-License-Identifier: Apache-2.0
// Attention of a batch over the pages that its sequences hold, including pages that they share.
//
// Common to all: the caller has checked sizes and dtypes, and that all visible tokens have pages;
// the functions allocate only the stacks of `threads` - 1 more threads; scores, weights and sums
// are float32; results do not depend on the number of threads. x86-64-v3 and -v4 return the same
// bytes; the baseline (which has no fused multiply-add) returns the same values within rounding.
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

/// The tokens that a query sees, and the conversion of scores to weights.
struct AttentionRule {
    float scale = 1.0F;
    bool is_causal = true;         // a token sees itself and the tokens before it
    std::int64_t window = 0;       // of a token: itself and the window - 1 before it; 0: all
    std::int64_t chunk = 0;        // a token sees only its own chunk of this length; 0: no chunks
    float soft_cap = 0.0F;         // scores become cap * tanh(score / cap); 0: unchanged
    const float* sinks = nullptr;  // [query heads]: a score without a value, in the softmax sum
};

/// The first position that a query at `position` sees; later queries see no earlier position.
[[nodiscard]] inline std::int64_t first_seen(const AttentionRule& rule,
                                             std::int64_t position) noexcept {
    std::int64_t first = 0;
    if (rule.window > 0) first = std::max(first, position - rule.window + 1);
    if (rule.chunk > 0) first = std::max(first, position - position % rule.chunk);
    return first;
}

/// Rows of a batch that hold the same pages from their beginning: tokens [0, num_tokens) of each of
/// rows[0 .. num_rows) are in the same pages, as far as a query of the row sees them. Groups are
/// nested or disjoint: if two groups have a common row, all rows of the group with more tokens are
/// rows of the other group.
struct SharedRows {
    const std::int64_t* rows;  // ascending
    std::int64_t num_rows;
    std::int64_t num_tokens;
};

/// The global scales of K and V in nvfp4 (kvcore/quantize.hpp). With nvfp4, `data` of a tensor are
/// its codes, `dim` counts elements, and its scales are bytes, a byte per `scales.group` = 16
/// elements.
struct Nvfp4Globals {
    bool is_nvfp4 = false;
    float k = 1.0F;
    float v = 1.0F;
};

/// All inputs of `attention`.
struct AttentionInput {
    PoolView<const std::byte> pool;
    PageTable table;
    const std::uint32_t* cached;           // [batch] tokens of each row before this step
    const std::uint32_t* offsets;          // [batch + 1], from 0: this step's tokens of each row
    HeadVectors<const std::byte> queries;  // [tokens, heads, k.dim + rope.dim]; heads is a multiple
                                           // of the pool's heads
    AttentionRule rule;
    const SharedRows* shared = nullptr;  // longest first
    std::int64_t num_shared = 0;
    Nvfp4Globals nvfp4 = {};
};

/// Destinations of the results: `values` [tokens, heads, v.dim]; `lse` float32 [tokens, heads] in C
/// order, the natural logarithm of the sum of exponentials (sinks included), or nullptr.
struct AttentionOutput {
    HeadVectors<std::byte> values;
    float* lse;
};

/// Bytes of scratch memory, of any alignment, that `attention` needs for this input and number of
/// threads. O(tokens of this step, and rows times groups).
[[nodiscard]] std::int64_t attention_workspace_bytes(const AttentionInput& input, int threads);

/// Token j of row b is at position cached[b] + j and attends over its row's tokens, including this
/// step's tokens, which must already be in their pages. A query that sees no token returns zeros
/// and an LSE of -inf. Each group of `shared` is read once for all its rows. Pages that no query of
/// a row sees are not read, nor are their columns of the table.
/// Cost: reading the K and V that a row sees once, or 4 * dim flops per query head and token seen.
void attention(const AttentionInput& input, const AttentionOutput& output, std::byte* workspace,
               int threads = 1);

/// Partial results over disjoint keys, [n] states of `dim` elements in C order.
struct AttentionStates {
    const std::byte* values;
    const float* lse;  // -inf or +inf: an empty state
};

/// Merges states pairwise into `values` and `lse`, which may be the arrays of `a`: with m the
/// greater LSE, (a * exp(lse_a - m) + b * exp(lse_b - m)) / (their sum), m + log(their sum). Two
/// empty states give 0 and -inf.
void merge_states(std::int64_t n, std::int64_t dim, DType dtype, AttentionStates a,
                  AttentionStates b, std::byte* values, float* lse, int threads = 1);

}  // namespace kvcore
