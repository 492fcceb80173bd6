// SPDX-License-Identifier: Apache-2.0
// Code for each kind of processor: the sums of products in `hash_tokens`. All kinds give the same
// sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/types.hpp"

namespace kvcore::detail {

/// Writes the sums of products of chunks [n] of 16 tokens, as `sum_products<16>` returns them.
using SumChunks = void (*)(std::uint64_t* sums, const TokenId* tokens, std::size_t n,
                           std::uint32_t s);

void sum_chunks_portable(std::uint64_t* sums, const TokenId* tokens, std::size_t n,
                         std::uint32_t s);
#if defined(__x86_64__)
/// For processors with AVX2.
void sum_chunks_avx2(std::uint64_t* sums, const TokenId* tokens, std::size_t n, std::uint32_t s);
#endif

/// The fastest kernel that this processor has; the portable kernel if the environment variable
/// KVCORE_ISA is "baseline".
[[nodiscard]] SumChunks sum_chunks() noexcept;

}  // namespace kvcore::detail
