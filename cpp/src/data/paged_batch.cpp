// SPDX-License-Identifier: Apache-2.0
#include "kvcore/paged_batch.hpp"

#include "data/batch_ranges.hpp"
#include "data/row_runs.hpp"

namespace kvcore {
namespace {

// Returns the number of bytes that a call moves; RunCopier needs it.
std::int64_t bytes_of(TokenShape shape, const PageTable& table, const TokenRanges& ranges) {
    return shape.heads * shape.head_bytes *
           (std::int64_t{ranges.offsets[table.batch]} - *ranges.offsets);
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
    for_each_part(
        table, ranges, shape.heads * shape.head_bytes, threads, [&](const RangePart& part) {
            RunCopier copier(bytes_of(shape, table, ranges));
            part.for_each(
                [&](std::int64_t row, std::int64_t token, std::int64_t at, std::int64_t count) {
                    PagedRows<std::byte> sequence = pool;
                    sequence.blocks = pages_of(table, row);
                    append_runs(copier, shape, sequence, token, source.from(at), count);
                });
        });
}

void gather_batch(TokenShape shape, const PagedRows<const std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<std::byte>& destination, int threads) {
    for_each_part(
        table, ranges, shape.heads * shape.head_bytes, threads, [&](const RangePart& part) {
            RunCopier copier(bytes_of(shape, table, ranges));
            part.for_each(
                [&](std::int64_t row, std::int64_t token, std::int64_t at, std::int64_t count) {
                    PagedRows<const std::byte> sequence = pool;
                    sequence.blocks = pages_of(table, row);
                    gather_runs(copier, shape, sequence, token, destination.from(at), count);
                });
        });
}

}  // namespace kvcore
