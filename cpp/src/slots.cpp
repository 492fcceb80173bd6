// SPDX-License-Identifier: Apache-2.0
#include "kvcore/slots.hpp"

#include <algorithm>
#include <atomic>

#include "copy_runs.hpp"
#include "cpu/parallel.hpp"

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

// Writes the rows of one of K and V, and counts the slots that are beyond the pool.
template <class Slot>
std::int64_t append_tensor(const PagedTensor<std::byte>& to, const PoolView<std::byte>& pool,
                           const TokenRows<const std::byte>& from, const Slot* slots,
                           std::int64_t begin, std::int64_t end, RunCopier& copier) noexcept {
    const std::int64_t row = to.dim * item_size(to.dtype);
    const bool is_dense = pool.heads == 1 || (to.head_stride == row && from.head_stride == row);
    const std::int64_t heads = is_dense ? 1 : pool.heads;
    const std::int64_t run = is_dense ? row * pool.heads : row;
    const std::int64_t capacity = pool.pages * pool.page_size;
    std::int64_t beyond = 0;
    for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t slot = slots[i];
        if (slot < 0) continue;
        if (slot >= capacity) {
            ++beyond;
            continue;
        }
        const std::int64_t page = slot / pool.page_size;
        std::byte* target = to.at(page, slot - page * pool.page_size, 0);
        const std::byte* source = from.data + i * from.token_stride;
        for (std::int64_t head = 0; head < heads; ++head) {
            copier.copy(target + head * to.head_stride, source + head * from.head_stride, run);
        }
    }
    return beyond;
}

template <class Slot>
std::int64_t append_to(const PoolView<std::byte>& pool, const TokenRows<const std::byte>& k,
                       const TokenRows<const std::byte>& v, const Slot* slots, std::int64_t n,
                       int threads) {
    const std::int64_t token_bytes =
        pool.heads * (pool.k.dim * item_size(pool.k.dtype) + pool.v.dim * item_size(pool.v.dtype));
    std::atomic<std::int64_t> beyond{0};
    cpu::parallel_for(n, cpu::worth_a_thread(token_bytes), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          RunCopier copier(n * token_bytes);
                          beyond += append_tensor(pool.k, pool, k, slots, begin, end, copier);
                          if (pool.v.dim > 0) {
                              append_tensor(pool.v, pool, v, slots, begin, end, copier);
                          }
                      });
    return beyond;
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

}  // namespace kvcore
