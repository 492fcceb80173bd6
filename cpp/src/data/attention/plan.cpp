// SPDX-License-Identifier: Apache-2.0
#include "data/attention/plan.hpp"

#include <algorithm>

#include "kvcore/types.hpp"

namespace kvcore {
namespace {

// Floats of an item's queries and sums: about the number that a core's close caches hold in
// addition to a tile.
constexpr std::int64_t kItemFloats = std::int64_t{128} * 1024;
// Bytes of K and V of a tile: two tiles fit in a core's cache.
constexpr std::int64_t kTileBytes = std::int64_t{256} * 1024;
constexpr std::int64_t kFewestKeys = 512;  // of an item that has only a part of a token's keys
constexpr std::int64_t kPieces = 32;       // least number of items for the whole work
constexpr std::int64_t kReadingCost = 16;  // cost of reading a key, in queries

struct Range {
    std::int64_t begin;
    std::int64_t end;
};

std::int64_t new_tokens(const AttentionInput& input, std::int64_t row) noexcept {
    return std::int64_t{input.offsets[row + 1]} - input.offsets[row];
}

// Returns the keys that token j of a row sees.
Range visible(const AttentionInput& input, std::int64_t row, std::int64_t j) noexcept {
    const std::int64_t position = input.cached[row] + j;
    const std::int64_t length = input.cached[row] + new_tokens(input, row);
    const std::int64_t chunk = input.rule.chunk;
    std::int64_t end = input.rule.is_causal ? position + 1 : length;
    if (chunk > 0) end = std::min(end, position - position % chunk + chunk);
    return {first_seen(input.rule, position), end};
}

bool has_row(const SharedRows& group, std::int64_t row) noexcept {
    return std::binary_search(group.rows, group.rows + group.num_rows, row);
}

// Returns the number of a row's tokens that a group reads for the row. It searches the groups from
// `first`; the longest group comes first.
std::int64_t shared_tokens(const AttentionInput& input, std::int64_t row,
                           std::int64_t first) noexcept {
    for (std::int64_t g = first; g < input.num_shared; ++g) {
        if (has_row(input.shared[g], row)) return input.shared[g].num_tokens;
    }
    return 0;
}

// A stack, the number of its tokens, and the keys that its items may read.
struct StackRange {
    TokenStack stack;
    std::int64_t num_tokens;
    Range keys;
};

// Visits the groups, then the rows. The pages of a group are read from the row whose first query
// has the lowest position: the windows or chunks of other rows may have passed some of these pages,
// and those rows no longer hold them.
template <class Visit>
void for_each_stack(const AttentionInput& input, const Visit& visit) noexcept {
    for (std::int64_t g = input.num_shared; g-- > 0;) {
        const SharedRows& group = input.shared[g];
        std::int64_t tokens = 0;
        std::int64_t reader = -1;
        for (std::int64_t i = 0; i < group.num_rows; ++i) {
            const std::int64_t row = group.rows[i];
            const std::int64_t added = new_tokens(input, row);
            if (added == 0) continue;
            if (reader < 0 || input.cached[row] < input.cached[reader]) reader = row;
            tokens += added;
        }
        if (tokens == 0) continue;
        visit(StackRange{
            {g, reader}, tokens, {shared_tokens(input, reader, g + 1), group.num_tokens}});
    }
    for (std::int64_t row = 0; row < input.table.batch; ++row) {
        const std::int64_t tokens = new_tokens(input, row);
        if (tokens == 0) continue;
        visit(StackRange{{-1, row},
                         tokens,
                         {shared_tokens(input, row, 0), std::int64_t{input.cached[row]} + tokens}});
    }
}

// Calls visit(row, j of the row) for tokens [first, first + n) of a stack.
template <class Visit>
void for_each_token(const AttentionInput& input, TokenStack stack, std::int64_t first,
                    std::int64_t n, const Visit& visit) noexcept {
    if (stack.group < 0) {
        for (std::int64_t j = first; j < first + n; ++j) visit(stack.row, j);
        return;
    }
    const SharedRows& group = input.shared[stack.group];
    std::int64_t at = 0;
    for (std::int64_t i = 0; i < group.num_rows && at < first + n; ++i) {
        const std::int64_t tokens = new_tokens(input, group.rows[i]);
        const std::int64_t begin = std::max<std::int64_t>(0, first - at);
        const std::int64_t end = std::min(tokens, first + n - at);
        for (std::int64_t j = begin; j < end; ++j) visit(group.rows[i], j);
        at += tokens;
    }
}

// A range of a stack's tokens, the keys that any of these tokens sees, and the number of heads of
// an item.
struct Tile {
    TokenStack stack;
    std::int64_t first_token;
    std::int64_t num_tokens;
    std::int64_t heads;
    Range keys;
};

Range seen_keys(const AttentionInput& input, const StackRange& range, std::int64_t first,
                std::int64_t n) noexcept {
    Range seen{range.keys.end, range.keys.begin};
    for_each_token(input, range.stack, first, n, [&](std::int64_t row, std::int64_t j) {
        const Range keys = visible(input, row, j);
        seen.begin = std::min(seen.begin, keys.begin);
        seen.end = std::max(seen.end, keys.end);
    });
    seen.begin = std::max(seen.begin, range.keys.begin);
    seen.end = std::max(seen.begin, std::min(seen.end, range.keys.end));
    return seen;
}

template <class Visit>
void for_each_tile(const AttentionInput& input, const Visit& visit) noexcept {
    const AttentionSizes sizes(input);
    const std::int64_t token_floats = sizes.group * (sizes.key_floats + sizes.value_floats);
    const std::int64_t token_elements = input.pool.k.dim + input.pool.v.dim;
    const std::int64_t tile_bytes =
        std::max<std::int64_t>(1, kTileKeys * token_elements * item_size(input.pool.k.dtype));
    const std::int64_t most_heads =
        std::clamp<std::int64_t>(kTileBytes / tile_bytes, 1, input.pool.heads);
    for_each_stack(input, [&](const StackRange& range) {
        const std::int64_t most =
            std::clamp<std::int64_t>(kItemFloats / token_floats, 1, range.num_tokens);
        const std::int64_t tiles = ceil_div(range.num_tokens, most);
        for (std::int64_t i = 0; i < tiles; ++i) {
            const std::int64_t first = range.num_tokens * i / tiles;
            const std::int64_t n = range.num_tokens * (i + 1) / tiles - first;
            const std::int64_t heads =
                std::clamp<std::int64_t>(kItemFloats / (token_floats * n), 1, most_heads);
            visit(Tile{range.stack, first, n, heads, seen_keys(input, range, first, n)});
        }
    });
}

std::int64_t cost_of_key(const AttentionSizes& sizes, const Tile& tile) noexcept {
    return tile.num_tokens * sizes.group + kReadingCost;
}

std::int64_t cost_of(const AttentionInput& input) noexcept {
    const AttentionSizes sizes(input);
    std::int64_t cost = 0;
    for_each_tile(input, [&](const Tile& tile) {
        cost += (tile.keys.end - tile.keys.begin) * cost_of_key(sizes, tile) * input.pool.heads;
    });
    return cost;
}

// Calls visit(tile, chunks) with the number of chunks to cut the tile's keys into, so that each
// item is a small part of the whole `cost`. A tile of a row has at least one chunk, so that its
// tokens get results. A tile of a group has no chunk if its tokens see no key of the tile.
template <class Visit>
void for_each_cut_tile(const AttentionInput& input, std::int64_t cost,
                       const Visit& visit) noexcept {
    const AttentionSizes sizes(input);
    for_each_tile(input, [&](const Tile& tile) {
        const std::int64_t keys = tile.keys.end - tile.keys.begin;
        const std::int64_t wanted = cost / kPieces / (cost_of_key(sizes, tile) * tile.heads);
        const std::int64_t chunks = ceil_div(keys, std::max(wanted, kFewestKeys));
        visit(tile, std::max<std::int64_t>(tile.stack.group < 0 ? 1 : 0, chunks));
    });
}

// Writes the items of a tile; returns the number of slots that they use.
std::int64_t write_items(const Tile& tile, std::int64_t heads, std::int64_t chunks,
                         std::int64_t slot, AttentionPlan& plan) noexcept {
    const std::int64_t keys = tile.keys.end - tile.keys.begin;
    for (std::int64_t i = 0; i < chunks; ++i) {
        for (std::int64_t head = 0; head < heads; head += tile.heads) {
            plan.items[plan.num_items++] = {tile.stack,
                                            tile.first_token,
                                            tile.num_tokens,
                                            head,
                                            std::min(tile.heads, heads - head),
                                            tile.keys.begin + keys * i / chunks,
                                            tile.keys.begin + keys * (i + 1) / chunks,
                                            slot};
        }
        if (slot >= 0) slot += tile.num_tokens;
    }
    return slot >= 0 ? chunks * tile.num_tokens : 0;
}

}  // namespace

AttentionSizes::AttentionSizes(const AttentionInput& input) noexcept
    : group(input.queries.heads / std::max<std::int64_t>(1, input.pool.heads)),
      key_dim(input.pool.k.dim + input.pool.rope.dim),
      key_floats(padded(key_dim)),
      value_floats(padded(input.pool.v.dim)) {
    const auto& k = input.pool.k;
    const auto& v = input.pool.v;
    values_are_keys = k.data == v.data && k.dtype == v.dtype && v.dim <= k.dim &&
                      k.page_stride == v.page_stride && k.token_stride == v.token_stride &&
                      k.head_stride == v.head_stride && k.scales.data == v.scales.data &&
                      input.nvfp4.k == input.nvfp4.v;
}

bool is_staged(const AttentionInput& input, std::int64_t vectors) noexcept {
    const auto has_one_scale = [](const PagedTensor<const std::byte>& tensor) {
        return tensor.scales.data == nullptr || tensor.scales.group >= tensor.dim;
    };
    return vectors >= kWorthStaging || input.nvfp4.is_nvfp4 || input.pool.rope.dim > 0 ||
           !has_one_scale(input.pool.k) || !has_one_scale(input.pool.v);
}

ScratchLayout::ScratchLayout(const AttentionSizes& sizes, const ItemLimits& limits) noexcept
    : size(0) {
    const auto take = [this](std::int64_t floats) {
        const std::int64_t at = size;
        size += padded(floats);
        return at;
    };
    const std::int64_t staged = limits.stages ? kTileKeys : 0;
    queries = take(limits.head_vectors * sizes.key_floats);
    sums = take(limits.head_vectors * sizes.value_floats);
    maxima = take(limits.head_vectors);
    totals = take(limits.head_vectors);
    keeps = take(limits.vectors);
    scores = take(limits.vectors * kTileKeys);
    keys = take(staged * sizes.key_floats);
    across = take(staged * sizes.key_floats);
    values = sizes.values_are_keys ? keys : take(staged * sizes.value_floats);
    tokens = take(limits.tokens * static_cast<std::int64_t>(sizeof(SeeingToken) / sizeof(float)));
}

PlanCounts count_plan(const AttentionInput& input) noexcept {
    const AttentionSizes sizes(input);
    PlanCounts counts;
    counts.cost = cost_of(input);
    for_each_cut_tile(input, counts.cost, [&](const Tile& tile, std::int64_t chunks) {
        const std::int64_t vectors = tile.num_tokens * sizes.group;
        counts.items += chunks * ceil_div(input.pool.heads, tile.heads);
        if (chunks > 1 || input.num_shared > 0) counts.parts += chunks * tile.num_tokens;
        ItemLimits& limits = counts.limits;
        limits.tokens = std::max(limits.tokens, tile.num_tokens);
        const bool stages = is_staged(input, vectors);
        limits.vectors = std::max(limits.vectors, vectors);
        limits.head_vectors = std::max(limits.head_vectors, vectors * tile.heads);
        limits.stages = limits.stages || stages;
    });
    return counts;
}

void write_plan(const AttentionInput& input, const PlanCounts& counts,
                AttentionPlan& plan) noexcept {
    const std::int64_t num_tokens = input.offsets[input.table.batch];
    // While slots are counted and written, the slots of token t begin at cursors[t + 1].
    std::int64_t* cursors = plan.begins;
    std::fill(cursors, cursors + num_tokens + 2, 0);
    std::int64_t slot = 0;
    plan.num_items = 0;
    for_each_cut_tile(input, counts.cost, [&](const Tile& tile, std::int64_t chunks) {
        const auto for_each = [&](const auto& visit) {
            for_each_token(input, tile.stack, tile.first_token, tile.num_tokens,
                           [&](std::int64_t row, std::int64_t j) {
                               visit(cursors[input.offsets[row] + j + 2]);
                           });
        };
        bool is_alone = tile.stack.group < 0 && chunks == 1;
        for_each([&](std::int64_t& count) { is_alone = is_alone && count == 0; });
        if (!is_alone) for_each([&](std::int64_t& count) { count += chunks; });
        slot += write_items(tile, input.pool.heads, chunks, is_alone ? -1 : slot, plan);
    });
    for (std::int64_t t = 1; t < num_tokens + 2; ++t) cursors[t] += cursors[t - 1];
    for (std::int64_t i = 0; i < plan.num_items; ++i) {
        const WorkItem& item = plan.items[i];
        if (item.slot < 0 || item.first_head > 0) continue;
        std::int64_t at = item.slot;
        for_each_token(input, item.stack, item.first_token, item.num_tokens,
                       [&](std::int64_t row, std::int64_t j) {
                           plan.slots[cursors[input.offsets[row] + j + 1]++] = at++;
                       });
    }
}

void list_tokens(const AttentionInput& input, const WorkItem& item, SeeingToken* tokens) noexcept {
    for_each_token(input, item.stack, item.first_token, item.num_tokens,
                   [&](std::int64_t row, std::int64_t j) {
                       const Range keys = visible(input, row, j);
                       const std::int64_t begin = std::max(keys.begin, item.first_key);
                       const std::int64_t end = std::min(keys.end, item.end_key);
                       *tokens++ = {input.offsets[row] + j, begin, std::max(begin, end)};
                   });
}

}  // namespace kvcore
