// SPDX-License-Identifier: Apache-2.0
// Cuts attention over a batch into items of work. The cut depends only on the input: every number
// of threads computes the same items and the same sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/attention.hpp"

namespace kvcore {

/// The number of keys in a tile. Scores are computed for one tile at a time.
constexpr std::int64_t kTileKeys = 64;

/// In scratch memory, rows of elements are padded to a multiple of this number.
constexpr std::int64_t kPadding = 16;

[[nodiscard]] constexpr std::int64_t padded(std::int64_t n) noexcept {
    return (n + kPadding - 1) / kPadding * kPadding;
}

/// Tokens of this step that read the same pages: the tokens of one row, or the tokens of all rows
/// of a group, row after row.
struct TokenStack {
    std::int64_t group = -1;  // index into `AttentionInput::shared`; -1: tokens of one row
    std::int64_t row = 0;     // the row whose pages are read
};

/// A unit of work: a range of a stack's tokens, of the pool's heads, and of keys.
struct WorkItem {
    TokenStack stack;
    std::int64_t first_token;  // of the stack
    std::int64_t num_tokens;
    std::int64_t first_head;
    std::int64_t num_heads;
    std::int64_t first_key;
    std::int64_t end_key;
    std::int64_t slot;  // of its first token's partial result; -1: the item writes final results
};

/// A token of an item and the keys that it sees.
struct SeeingToken {
    std::int64_t token;  // of the step
    std::int64_t begin;
    std::int64_t end;
};

/// Sizes that all items share.
struct AttentionSizes {
    std::int64_t group;       // query heads that share a head of the pool
    std::int64_t key_dim;     // of `k` and `rope`
    std::int64_t key_floats;  // padded
    std::int64_t value_floats;
    bool values_are_keys;  // v is the beginning of k

    explicit AttentionSizes(const AttentionInput& input) noexcept;
};

/// The largest sizes of any item.
struct ItemLimits {
    std::int64_t tokens = 0;
    std::int64_t vectors = 0;       // queries of one head of the pool
    std::int64_t head_vectors = 0;  // queries of all heads of an item
    bool stages = false;            // true if any item converts K and V in scratch first
};

/// From this number of queries for one head of the pool, K and V are converted once for all
/// queries.
constexpr std::int64_t kWorthStaging = 17;

/// True if K and V are first converted to floats in scratch: if there are many queries, if a
/// token's head has more than one scale or is stored in more than one place, or if a byte holds two
/// codes.
[[nodiscard]] bool is_staged(const AttentionInput& input, std::int64_t vectors) noexcept;

/// The sizes of a plan.
struct PlanCounts {
    std::int64_t items = 0;
    std::int64_t parts = 0;  // upper bound of the partial results
    std::int64_t cost = 0;   // about keys times queries
    ItemLimits limits;
};

/// The items, and the slots of partial results. A slot holds the values of all heads of a token,
/// and their LSEs.
struct AttentionPlan {
    WorkItem* items;       // [counts.items]
    std::int64_t* begins;  // [tokens + 2]: token t has slots[begins[t]] .. [begins[t + 1]];
                           // an empty range if an item writes its final result
    std::int64_t* slots;   // [counts.parts]
    std::int64_t num_items = 0;
};

[[nodiscard]] PlanCounts count_plan(const AttentionInput& input) noexcept;
void write_plan(const AttentionInput& input, const PlanCounts& counts,
                AttentionPlan& plan) noexcept;

/// Writes the tokens of an item, and the range of the item's keys that each token sees.
void list_tokens(const AttentionInput& input, const WorkItem& item, SeeingToken* tokens) noexcept;

/// The offsets of the parts of an item's scratch memory, in floats; each part begins at a multiple
/// of `kPadding`.
struct ScratchLayout {
    std::int64_t queries;
    std::int64_t sums;    // of weighted values
    std::int64_t maxima;  // of scores
    std::int64_t totals;  // of weights
    std::int64_t keeps;   // factors of the earlier sums
    std::int64_t scores;  // later the weights
    std::int64_t keys;    // staged, one key in each row
    std::int64_t across;  // staged, one key in each column
    std::int64_t values;  // staged
    std::int64_t tokens;  // SeeingToken
    std::int64_t size;

    ScratchLayout(const AttentionSizes& sizes, const ItemLimits& limits) noexcept;
};

/// The data that all items of a call share.
struct AttentionJob {
    const AttentionInput* input;
    const AttentionOutput* output;
    AttentionSizes sizes;
    ScratchLayout layout;
    AttentionPlan plan;
    float* part_values;  // [slots, query heads, v.dim]
    float* part_lse;     // [slots, query heads]
};

}  // namespace kvcore
