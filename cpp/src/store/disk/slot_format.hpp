// SPDX-License-Identifier: Apache-2.0
// The format of the files of a disk store; docs/tiers.md describes it for people.
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
/// The offset of the CRC that ends a header; the CRC covers all bytes before it.
constexpr std::size_t kHeaderCrcAt = kHeaderBytes - sizeof(std::uint32_t);

/// The first block of a slot. Little-endian, no gaps; the bytes from its end to the CRC are zero.
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
    std::uint64_t parts;  // a bit for each part of the page
    StoreKey key;
    StoreKey fingerprint;
    std::array<Part, kMaxStoreParts> part;  // by number; zero if the page lacks the part
};
static_assert(sizeof(SlotHeader) == 8 + 4 + 4 + 3 * 8 + 2 * 32 + kMaxStoreParts * 8);

enum class HeaderState { kEmpty, kRight, kCorrupt };

/// Writes a header's block, [kHeaderBytes].
void write_header(SlotHeader header, std::byte* block) noexcept;
/// Reads and checks a header. kEmpty: all zero, like a slot that was never written.
[[nodiscard]] HeaderState read_header(const std::byte* block, std::int64_t slot_bytes,
                                      SlotHeader& header) noexcept;

/// The content of the shape file: the layout of the slots of a directory.
struct StoreShape {
    std::int64_t slot_bytes = 0;
    std::int64_t segment_slots = 0;
    std::uint64_t floor = 0;  // a page with a lower sequence number was cleared
};
void write_shape(const StoreShape& shape, std::byte* block) noexcept;
/// Returns kCorrupt if the block is not a shape of this version; `version` is the version in the
/// block.
[[nodiscard]] HeaderState read_shape(const std::byte* block, StoreShape& shape,
                                     std::uint32_t& version) noexcept;

/// Names of files in a directory.
constexpr const char* kShapeName = "kvcore-store";
constexpr const char* kLockName = "kvcore-lock";
[[nodiscard]] std::string segment_name(std::int64_t segment);
/// The number of a segment's file, or -1 for another name.
[[nodiscard]] std::int64_t segment_number(const std::string& name);

}  // namespace kvcore
