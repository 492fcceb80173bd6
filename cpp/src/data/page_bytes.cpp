// SPDX-License-Identifier: Apache-2.0
#include "kvcore/page_bytes.hpp"

#include <algorithm>
#include <cstring>

#include "data/copy_runs.hpp"
#include "data/digest_word.hpp"
#include "support/parallel.hpp"

namespace kvcore {
namespace {

// Loads a little-endian word, on any machine.
std::uint64_t load_word(const std::byte* from, std::int64_t bytes = 8) noexcept {
    std::uint64_t word = 0;
    std::memcpy(&word, from, static_cast<std::size_t>(bytes));
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

std::uint64_t digest(const std::byte* page, std::int64_t bytes) noexcept {
    std::uint64_t sum = 0;
    std::uint64_t counter = 0;
    std::int64_t at = 0;
    for (; at + 8 <= bytes; at += 8)
        sum += digest_word(load_word(page + at), counter += kDigestStep);
    if (at < bytes) sum += digest_word(load_word(page + at, bytes - at), counter + kDigestStep);
    return sum;
}

}  // namespace

void copy_pages(const PageBytes<std::byte>& pool, const PagePair* pairs, std::int64_t n,
                int threads) {
    cpu::parallel_for(n, cpu::worth_a_thread(pool.page_bytes), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          RunCopier copier(n * pool.page_bytes);
                          for (std::int64_t i = begin; i < end; ++i) {
                              copier.copy(pool.page(pairs[i].destination),
                                          pool.page(pairs[i].source), pool.page_bytes);
                          }
                      });
}

void fill_pages(const PageBytes<std::byte>& pool, const std::int64_t* ids, std::int64_t n,
                std::byte value, int threads) {
    cpu::parallel_for(n, cpu::worth_a_thread(pool.page_bytes), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          const RunFiller filler(value, n * pool.page_bytes);
                          for (std::int64_t i = begin; i < end; ++i) {
                              filler.fill(pool.page(ids[i]), pool.page_bytes);
                          }
                      });
}

void digest_pages(const PageBytes<const std::byte>& pool, const std::int64_t* ids, std::int64_t n,
                  std::uint64_t* digests, int threads) {
    cpu::parallel_for(n, cpu::worth_a_thread(pool.page_bytes), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          for (std::int64_t i = begin; i < end; ++i) {
                              digests[i] = digest(pool.page(ids[i]), pool.page_bytes);
                          }
                      });
}

}  // namespace kvcore
