// SPDX-License-Identifier: Apache-2.0
#include "kvcore/paged_batch.hpp"

#include <algorithm>

#include "cpu/parallel.hpp"

namespace kvcore {
namespace {

// Ids are not negative, so int32 and uint32 share their bytes.
const BlockId* pages_of(const PageTable& table, std::int64_t row) noexcept {
    return reinterpret_cast<const BlockId*>(table.pages + row * table.row_stride);
}

// Calls copy(row, token of its sequence, token of the contiguous memory, tokens) for all ranges,
// cut into parts of as many tokens for each thread.
template <class Copy>
void for_each_range(const PageTable& table, const TokenRanges& ranges, std::int64_t token_bytes,
                    int threads, const Copy& copy) {
    const std::uint32_t* offsets = ranges.offsets;
    const std::uint32_t* last = offsets + table.batch;
    cpu::parallel_for(std::int64_t{*last} - *offsets, cpu::worth_a_thread(token_bytes), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          const std::int64_t stop = *offsets + end;
                          std::int64_t at = *offsets + begin;
                          std::int64_t row = std::upper_bound(offsets, last + 1, at) - offsets - 1;
                          for (; at < stop; ++row) {
                              const std::int64_t count =
                                  std::min<std::int64_t>(offsets[row + 1], stop) - at;
                              if (count > 0)
                                  copy(row, ranges.first(row) + at - offsets[row], at, count);
                              at += std::max<std::int64_t>(0, count);
                          }
                      });
}

}  // namespace

MissingPage find_missing_page(const PageTable& table, const TokenRanges& ranges,
                              std::int64_t page_size, std::int64_t num_pages) noexcept {
    for (std::int64_t row = 0; row < table.batch; ++row) {
        const std::int64_t first = ranges.first(row);
        const std::int64_t end = first + ranges.offsets[row + 1] - ranges.offsets[row];
        const std::uint32_t* pages = table.pages + row * table.row_stride;
        for (std::int64_t token = first; token < end;) {
            const std::int64_t column = token / page_size;
            if (column >= table.width) return {row, token, static_cast<std::uint32_t>(num_pages)};
            if (pages[column] >= num_pages) return {row, token, pages[column]};
            token = (column + 1) * page_size;
        }
    }
    return {};
}

void append_batch(TokenShape shape, const PagedRows<std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<const std::byte>& source,
                  int threads) {
    for_each_range(table, ranges, shape.heads * shape.head_bytes, threads,
                   [&](std::int64_t row, std::int64_t token, std::int64_t at, std::int64_t count) {
                       PagedRows<std::byte> sequence = pool;
                       sequence.blocks = pages_of(table, row);
                       append_rows(shape, sequence, token,
                                   {source.data + at * source.token_stride, source.token_stride,
                                    source.head_stride},
                                   count);
                   });
}

void gather_batch(TokenShape shape, const PagedRows<const std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<std::byte>& destination, int threads) {
    for_each_range(table, ranges, shape.heads * shape.head_bytes, threads,
                   [&](std::int64_t row, std::int64_t token, std::int64_t at, std::int64_t count) {
                       PagedRows<const std::byte> sequence = pool;
                       sequence.blocks = pages_of(table, row);
                       gather_rows(shape, sequence, token,
                                   {destination.data + at * destination.token_stride,
                                    destination.token_stride, destination.head_stride},
                                   count);
                   });
}

}  // namespace kvcore
