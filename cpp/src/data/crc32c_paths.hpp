// SPDX-License-Identifier: Apache-2.0
// The implementations of CRC-32C: crc32c() chooses one, and tests compare them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcore {

/// Computes a CRC-32C with tables, on any processor.
[[nodiscard]] std::uint32_t crc32c_by_tables(const void* data, std::size_t bytes,
                                             std::uint32_t before) noexcept;

/// True if the processor has the instruction that `crc32c_by_instruction` uses.
[[nodiscard]] bool has_crc32c_instruction() noexcept;
[[nodiscard]] std::uint32_t crc32c_by_instruction(const void* data, std::size_t bytes,
                                                  std::uint32_t before) noexcept;

}  // namespace kvcore
