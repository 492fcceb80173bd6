// SPDX-License-Identifier: Apache-2.0
#include "tree/sum_chunks.hpp"

#include "support/baseline_isa.hpp"
#include "tree/token_hash.hpp"

namespace kvcore::detail {
namespace {

SumChunks choose() noexcept {
#if defined(__x86_64__)
    if (!wants_baseline_isa() && __builtin_cpu_supports("avx2")) return sum_chunks_avx2;
#endif
    return sum_chunks_portable;
}

}  // namespace

void sum_chunks_portable(std::uint64_t* sums, const TokenId* tokens, std::size_t n,
                         std::uint32_t s) {
    for (std::size_t i = 0; i < n; ++i, tokens += 16) sums[i] = sum_products<16>(tokens, s);
}

SumChunks sum_chunks() noexcept {
    static const SumChunks chosen = choose();
    return chosen;
}

}  // namespace kvcore::detail
