// SPDX-License-Identifier: Apache-2.0
// How attention over a batch is cut into items of work. Depends on the input alone: the same items
// and the same sums for every number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/attention.hpp"

namespace kvcore {

/// Keys that scores are worked out for at a time.
constexpr std::int64_t kTileKeys = 64;

/// Elements are padded to a multiple of this wherever they lie in scratch.
constexpr std::int64_t kPadding = 16;

[[nodiscard]] constexpr std::int64_t padded(std::int64_t n) noexcept {
    return (n + kPadding - 1) / kPadding * kPadding;
}

/// Tokens of this step that look at the same pages: those of a row, or of all rows of a group, one
/// row behind the other.
struct TokenStack {
    std::int64_t group = -1;  // of `AttentionInput::shared`; -1: of one row
    std::int64_t row = 0;     // whose pages are read
};

/// Some tokens of a stack, some heads of the pool, some keys.
struct WorkItem {
    TokenStack stack;
    std::int64_t first_token;  // of the stack
    std::int64_t num_tokens;
    std::int64_t first_head;
    std::int64_t num_heads;
    std::int64_t first_key;
    std::int64_t end_key;
    std::int64_t slot;  // of its first token's partial result; -1: writes results
};

/// A token of an item and the keys that it sees.
struct SeeingToken {
    std::int64_t token;  // of the step
    std::int64_t begin;
    std::int64_t end;
};

/// Sizes that all items have in common.
struct AttentionSizes {
    std::int64_t group;       // query heads that share a head of the pool
    std::int64_t key_dim;     // of `k` and `rope`
    std::int64_t key_floats;  // padded
    std::int64_t value_floats;
    bool values_are_keys;  // v is the beginning of k

    explicit AttentionSizes(const AttentionInput& input) noexcept;
};

/// Most that an item has.
struct ItemLimits {
    std::int64_t tokens = 0;
    std::int64_t vectors = 0;       // queries of one head of the pool
    std::int64_t head_vectors = 0;  // of all its heads
    bool stages = false;            // whether any item copies K and V before it computes
};

/// Queries of one head of the pool from which on K and V are better converted once for all of them.
constexpr std::int64_t kWorthStaging = 17;

/// Whether K and V become floats in scratch first: for many queries, and where a head of a token
/// has more than one scale or lies in more than one place, or codes are two in a byte.
[[nodiscard]] bool is_staged(const AttentionInput& input, std::int64_t vectors) noexcept;

/// What a plan needs room for.
struct PlanCounts {
    std::int64_t items = 0;
    std::int64_t parts = 0;  // partial results, at most
    std::int64_t cost = 0;   // keys times queries, about
    ItemLimits limits;
};

/// A partial result is in a slot: values of all heads of a token, and their LSEs.
struct AttentionPlan {
    WorkItem* items;       // [counts.items]
    std::int64_t* begins;  // [tokens + 2]: slots[begins[t]] .. [begins[t + 1]] are those of token
                           // t, none where an item writes its results
    std::int64_t* slots;   // [counts.parts]
    std::int64_t num_items = 0;
};

[[nodiscard]] PlanCounts count_plan(const AttentionInput& input) noexcept;
void write_plan(const AttentionInput& input, const PlanCounts& counts,
                AttentionPlan& plan) noexcept;

/// Writes the tokens of an item and what they see of its keys.
void list_tokens(const AttentionInput& input, const WorkItem& item, SeeingToken* tokens) noexcept;

/// Floats of scratch that an item needs, by use; each begins at a multiple of `kPadding`.
struct ScratchLayout {
    std::int64_t queries;
    std::int64_t sums;    // of weighted values
    std::int64_t maxima;  // of scores
    std::int64_t totals;  // of weights
    std::int64_t keeps;   // what earlier sums are multiplied by
    std::int64_t scores;  // then weights
    std::int64_t keys;    // staged, a key a row
    std::int64_t across;  // the same, a key a column
    std::int64_t values;  // staged
    std::int64_t tokens;  // SeeingToken
    std::int64_t size;

    ScratchLayout(const AttentionSizes& sizes, const ItemLimits& limits) noexcept;
};

/// What all items of a call share.
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
