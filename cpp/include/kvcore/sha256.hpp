// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvcore {

/// SHA-256 (FIPS 180-4) of what is appended. A copy goes on from the same bytes.
///
/// Owns: the state behind the whole blocks so far, and the bytes of the block that is not full.
/// Threads: one. Allocates nothing.
/// Cost: O(bytes), with the processor's own instructions for it where it has any, unless the
/// environment variable KVCORE_ISA is "baseline".
class Sha256 {
   public:
    using Digest = std::array<std::uint8_t, 32>;
    /// Behind the bytes given to `digest_with`.
    static constexpr std::size_t kPadding = 72;

    [[nodiscard]] static Digest of(const void* data, std::size_t size) noexcept;

    Sha256() noexcept;

    /// Bytes so far.
    [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
    void append(const void* data, std::size_t size) noexcept;
    /// The digest of all bytes so far.
    [[nodiscard]] Digest digest() const noexcept;
    /// The digest of all bytes so far, whole blocks of 64, and these. Writes over kPadding bytes
    /// behind them.
    [[nodiscard]] Digest digest_with(std::uint8_t* bytes, std::size_t size) const noexcept;

   private:
    std::array<std::uint32_t, 8> state_;
    std::array<std::uint8_t, 64> block_{};  // size_ % 64 bytes of it
    std::uint64_t size_ = 0;                // bytes so far
};

}  // namespace kvcore
