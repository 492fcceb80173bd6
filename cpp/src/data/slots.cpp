// SPDX-License-Identifier: Apache-2.0
#include "kvcore/paged_batch.hpp"

#include <algorithm>
#include <atomic>

#include "data/copy_nest.hpp"
#include "support/parallel.hpp"

namespace kvcore {
namespace {

template <class Slot>
void write_slots(const PageTable& table, const TokenRanges& ranges, std::int64_t page_size,
                 std::int64_t num_pages, Slot* slots, std::int64_t capacity) noexcept {
    Slot* out = slots;
    for (std::int64_t row = 0; row < table.batch; ++row) {
        const std::uint32_t* pages = table.pages + row * table.row_stride;
        std::int64_t token = ranges.first(row);
        std::int64_t left = std::int64_t{ranges.offsets[row + 1]} - ranges.offsets[row];
        while (left > 0) {
            const std::int64_t column = token / page_size;
            const std::int64_t in_page = token - column * page_size;
            const std::int64_t count = std::min(page_size - in_page, left);
            const std::int64_t page = column < table.width ? pages[column] : num_pages;
            if (page < num_pages) {
                const std::int64_t slot = page * page_size + in_page;
                for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<Slot>(slot + i);
            } else {
                std::fill_n(out, count, Slot{-1});
            }
            out += count;
            token += count;
            left -= count;
        }
    }
    std::fill(out, slots + capacity, Slot{-1});
}

// Writes rows of K or V to consecutive slots of a page. Keeps the nest of the last block, because
// most blocks have the same size.
class BlockWriter {
   public:
    BlockWriter(const PagedTensor<std::byte>& to, const TokenRows<const std::byte>& from,
                std::int64_t heads) noexcept
        : to_(to), from_(from), heads_(heads) {}

    void write(std::int64_t page, std::int64_t in_page, std::int64_t token, std::int64_t count,
               RunCopier& copier) noexcept {
        if (to_.dim == 0) return;
        if (count != count_) {
            count_ = count;
            nest_ = {to_.dim * item_size(to_.dtype),
                     {{{count, to_.token_stride, from_.token_stride},
                       {heads_, to_.head_stride, from_.head_stride},
                       {1, 0, 0},
                       {1, 0, 0},
                       {1, 0, 0}}}};
        }
        nest_.copy(to_.at(page, in_page, 0), from_.data + token * from_.token_stride, copier);
    }

   private:
    const PagedTensor<std::byte>& to_;
    const TokenRows<const std::byte>& from_;
    std::int64_t heads_;
    std::int64_t count_ = 0;
    CopyNest nest_;
};

template <class Slot>
std::int64_t append_to(const PoolView<std::byte>& pool, const TokenRows<const std::byte>& k,
                       const TokenRows<const std::byte>& v, const Slot* slots, std::int64_t n,
                       int threads) {
    const std::int64_t token_bytes =
        pool.heads * (pool.k.dim * item_size(pool.k.dtype) + pool.v.dim * item_size(pool.v.dtype));
    const std::int64_t capacity = pool.pages * pool.page_size;
    std::atomic<std::int64_t> beyond{0};
    cpu::parallel_for(n, cpu::worth_a_thread(token_bytes), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          RunCopier copier(n * token_bytes);
                          BlockWriter keys(pool.k, k, pool.heads);
                          BlockWriter values(pool.v, v, pool.heads);
                          for (std::int64_t i = begin; i < end;) {
                              const std::int64_t slot = slots[i];
                              if (slot < 0 || slot >= capacity) {
                                  if (slot >= capacity) ++beyond;
                                  ++i;
                                  continue;
                              }
                              const std::int64_t page = slot / pool.page_size;
                              const std::int64_t in_page = slot - page * pool.page_size;
                              const std::int64_t room = std::min(end - i, pool.page_size - in_page);
                              std::int64_t count = 1;
                              while (count < room && slots[i + count] == slot + count) ++count;
                              keys.write(page, in_page, i, count, copier);
                              values.write(page, in_page, i, count, copier);
                              i += count;
                          }
                      });
    return beyond;
}

// Returns the length of the longest start of `kept` that ascends and names only rows.
std::int64_t count_ascending(const std::uint32_t* kept, std::int64_t n,
                             std::int64_t rows) noexcept {
    std::int64_t count = 0;
    while (count < n && kept[count] < rows && (count == 0 || kept[count] > kept[count - 1])) {
        ++count;
    }
    return count;
}

}  // namespace

void build_slots(const PageTable& table, const TokenRanges& ranges, std::int64_t page_size,
                 std::int64_t num_pages, std::int64_t* slots, std::int64_t capacity) noexcept {
    write_slots(table, ranges, page_size, num_pages, slots, capacity);
}

void build_slots(const PageTable& table, const TokenRanges& ranges, std::int64_t page_size,
                 std::int64_t num_pages, std::int32_t* slots, std::int64_t capacity) noexcept {
    write_slots(table, ranges, page_size, num_pages, slots, capacity);
}

std::int64_t append_slots(const PoolView<std::byte>& pool, const TokenRows<const std::byte>& k,
                          const TokenRows<const std::byte>& v, const std::int64_t* slots,
                          std::int64_t n, int threads) {
    return append_to(pool, k, v, slots, n, threads);
}

std::int64_t append_slots(const PoolView<std::byte>& pool, const TokenRows<const std::byte>& k,
                          const TokenRows<const std::byte>& v, const std::int32_t* slots,
                          std::int64_t n, int threads) {
    return append_to(pool, k, v, slots, n, threads);
}

void advance_lengths(const std::uint32_t* lengths, const std::uint32_t* offsets,
                     const std::uint8_t* active, std::uint32_t* advanced,
                     std::int64_t batch) noexcept {
    for (std::int64_t row = 0; row < batch; ++row) {
        const bool grows = active == nullptr || active[row] != 0;
        advanced[row] = lengths[row] + (grows ? offsets[row + 1] - offsets[row] : 0U);
    }
}

void compact_table(const BatchRows& batch, const std::uint32_t* kept, std::int64_t n, int threads) {
    const std::int64_t stay = count_ascending(kept, n, batch.rows);
    std::int64_t in_place = 0;
    while (in_place < stay && kept[in_place] == in_place) ++in_place;
    for (std::int64_t row = in_place; row < batch.rows; ++row) {
        const bool is_kept = row < stay;
        // The entries that are read here are not yet overwritten: kept[row] > row.
        if (batch.lengths != nullptr) {
            batch.lengths[row] = is_kept ? batch.lengths[kept[row]] : 0;
        }
        if (batch.offsets != nullptr) {
            const std::uint32_t* from = is_kept ? batch.offsets + kept[row] : nullptr;
            const std::uint32_t added = is_kept ? from[1] - from[0] : 0;
            batch.offsets[row + 1] = batch.offsets[row] + added;
        }
    }
    const std::int64_t column_bytes =
        (batch.rows - in_place) * static_cast<std::int64_t>(sizeof(std::uint32_t));
    cpu::parallel_for(batch.columns, cpu::worth_a_thread(column_bytes), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          for (std::int64_t row = in_place; row < batch.rows; ++row) {
                              std::uint32_t* to = batch.pages + row * batch.row_stride;
                              if (row < stay) {
                                  const std::uint32_t* from =
                                      batch.pages + kept[row] * batch.row_stride;
                                  std::copy(from + begin, from + end, to + begin);
                              } else {
                                  std::fill(to + begin, to + end, kNoPage);
                              }
                          }
                      });
}

}  // namespace kvcore
