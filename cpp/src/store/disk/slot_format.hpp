// SPDX-License-Identifier: Apache-2.0
// What the files of a disk store look like; docs/tiers.md says the same for people.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kvcore/disk_store.hpp"
#include "store/disk/aligned_buffer.hpp"

namespace kvcore {

constexpr std::uint32_t kDiskFormatVersion = 1;
constexpr std::int64_t kHeaderBytes = kDiskBlock;
/// Behind which the CRC of what is in front of it ends a header.
constexpr std::size_t kHeaderCrcAt = kHeaderBytes - sizeof(std::uint32_t);

/// The first block of a slot. Little-endian, no gaps; what is behind it up to the CRC is zero.
struct SlotHeader {
    struct Part {
        std::uint32_t bytes;
        std::uint32_t crc;
    };

    std::array<char, 8> magic;
    std::uint32_t version;
    std::uint32_t num_parts;
    std::uint64_t sequence;  // of writes: higher is newer
    std::uint64_t payload_bytes;
    std::uint64_t parts;  // a bit for each that the page has
    StoreKey key;
    StoreKey fingerprint;
    std::array<Part, kMaxStoreParts> part;  // by number; zero for those that the page lacks
};
static_assert(sizeof(SlotHeader) == 8 + 4 + 4 + 3 * 8 + 2 * 32 + kMaxStoreParts * 8);

enum class HeaderState { kEmpty, kRight, kCorrupt };

/// Writes a header's block, [kHeaderBytes].
void write_header(SlotHeader header, std::byte* block) noexcept;
/// Reads it, and says whether it is one. kEmpty: all zero, as a slot that was never written.
[[nodiscard]] HeaderState read_header(const std::byte* block, std::int64_t slot_bytes,
                                      SlotHeader& header) noexcept;

/// The file that says how a directory's slots lie.
struct StoreShape {
    std::int64_t slot_bytes = 0;
    std::int64_t segment_slots = 0;
    std::uint64_t floor = 0;  // a page with a lower sequence number was cleared
};
void write_shape(const StoreShape& shape, std::byte* block) noexcept;
/// kCorrupt for what is no shape of this version; `version` is what the block says.
[[nodiscard]] HeaderState read_shape(const std::byte* block, StoreShape& shape,
                                     std::uint32_t& version) noexcept;

/// Names of files in a directory.
constexpr const char* kShapeName = "kvcore-store";
constexpr const char* kLockName = "kvcore-lock";
[[nodiscard]] std::string segment_name(std::int64_t segment);
/// The number of a segment's file, or -1 for another name.
[[nodiscard]] std::int64_t segment_number(const std::string& name);

}  // namespace kvcore
