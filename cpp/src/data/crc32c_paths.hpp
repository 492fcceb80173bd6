// SPDX-License-Identifier: Apache-2.0
// The ways to compute a CRC-32C, for crc32c() to choose from and for tests to compare.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcore {

/// With tables, on any processor.
[[nodiscard]] std::uint32_t crc32c_by_tables(const void* data, std::size_t bytes,
                                             std::uint32_t before) noexcept;

/// Whether the processor has the instruction of `crc32c_by_instruction`.
[[nodiscard]] bool has_crc32c_instruction() noexcept;
[[nodiscard]] std::uint32_t crc32c_by_instruction(const void* data, std::size_t bytes,
                                                  std::uint32_t before) noexcept;

}  // namespace kvcore
