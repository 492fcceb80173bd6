// SPDX-License-Identifier: Apache-2.0
// Slots: page * page_size + token of the page, one for each token of a step. Engines compute them
// once per step and write every layer by them. Lengths and tables of a batch from step to step.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/paged_batch.hpp"
#include "kvcore/pool_view.hpp"

namespace kvcore {

/// Writes the slots of the ranges' tokens, which lie one sequence behind the other, to `slots`
/// [capacity]; -1 for a token without a page and behind the last token. 0 < page_size, capacity >=
/// the tokens. O(capacity).
void build_slots(const PageTable& table, const TokenRanges& ranges, std::int64_t page_size,
                 std::int64_t num_pages, std::int64_t* slots, std::int64_t capacity) noexcept;
/// The same, where int32 holds num_pages * page_size.
void build_slots(const PageTable& table, const TokenRanges& ranges, std::int64_t page_size,
                 std::int64_t num_pages, std::int32_t* slots, std::int64_t capacity) noexcept;

/// Copies token i of `k` and of `v` (not read where the pool has no values) to slots[i], i < n, and
/// returns how many slots were beyond the pool; those are skipped, and so are negative ones, which
/// stand for padding. Rows may be parts of a fused QKV; they have the pool's dtype and share no
/// byte with it. Of a slot that is named twice, the bytes are those of either token, or of both
/// where threads meet. Cost: the bytes.
std::int64_t append_slots(const PoolView<std::byte>& pool, const TokenRows<const std::byte>& k,
                          const TokenRows<const std::byte>& v, const std::int64_t* slots,
                          std::int64_t n, int threads = 1);
std::int64_t append_slots(const PoolView<std::byte>& pool, const TokenRows<const std::byte>& k,
                          const TokenRows<const std::byte>& v, const std::int32_t* slots,
                          std::int64_t n, int threads = 1);

/// Writes lengths[i] + offsets[i + 1] - offsets[i] to advanced[i], and lengths[i] alone where
/// `active` says 0 (nullptr: all are active). `advanced` may be `lengths`. O(batch).
void advance_lengths(const std::uint32_t* lengths, const std::uint32_t* offsets,
                     const std::uint8_t* active, std::uint32_t* advanced,
                     std::int64_t batch) noexcept;

/// What an entry of a table without a page is made, which no pool has.
constexpr std::uint32_t kNoPage = 0xffffffffU;

/// The arrays of a batch that have a row for each request.
struct BatchRows {
    std::uint32_t* pages;     // [rows, columns]
    std::int64_t row_stride;  // elements
    std::int64_t columns;
    std::int64_t rows;
    std::uint32_t* lengths;  // [rows]; nullptr: none
    std::uint32_t* offsets;  // [rows + 1], of the rows' new tokens, from 0 on; nullptr: none
};

/// Moves the rows `kept` [n], n <= rows, to the front, in place and in their order. `kept` ascends;
/// the first number that does not, or that is no row, ends it. Rows behind those that stay become
/// empty: `kNoPage` in all columns, length 0, no new tokens. The arrays share no byte. Cost: the
/// bytes of the rows that move and of those that become empty.
void compact_table(const BatchRows& batch, const std::uint32_t* kept, std::int64_t n,
                   int threads = 1);

}  // namespace kvcore
