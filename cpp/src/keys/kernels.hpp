// SPDX-License-Identifier: Apache-2.0
// Code for each kind of processor: the rounds of SHA-256 and the encoding of tokens. All kinds give
// the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcore::keys {

/// FIPS 180-4, 4.2.2.
extern const std::uint32_t kRoundConstants[64];

/// Mixes whole blocks [n] of 64 bytes into the state.
using Compress = void (*)(std::uint32_t* state, const std::uint8_t* blocks, std::size_t n);
/// Writes tokens [n] as CBOR integers; returns their bytes. `out` has kTokenRoom bytes a token.
using WriteTokens = std::size_t (*)(std::uint8_t* out, const std::int32_t* tokens, std::size_t n);

constexpr std::size_t kTokenRoom = 8;  // a token takes at most 5; the next one overwrites the rest

void compress_portable(std::uint32_t* state, const std::uint8_t* blocks, std::size_t n);
std::size_t write_tokens_portable(std::uint8_t* out, const std::int32_t* tokens, std::size_t n);
#if defined(__x86_64__)
/// For processors with SHA and SSE4.1.
void compress_sha_ni(std::uint32_t* state, const std::uint8_t* blocks, std::size_t n);
/// For processors with SSE4.1.
std::size_t write_tokens_sse4(std::uint8_t* out, const std::int32_t* tokens, std::size_t n);
#endif

struct Kernels {
    Compress compress;
    WriteTokens write_tokens;
};

/// The fastest kernels that this processor has; the portable kernels if the environment variable
/// KVCORE_ISA is "baseline".
[[nodiscard]] const Kernels& kernels() noexcept;

}  // namespace kvcore::keys
