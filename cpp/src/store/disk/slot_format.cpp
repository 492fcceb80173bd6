// SPDX-License-Identifier: Apache-2.0
#include "store/disk/slot_format.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "kvcore/page_bytes.hpp"

namespace kvcore {
namespace {

constexpr std::array<char, 8> kSlotMagic{'K', 'V', 'C', 'P', 'A', 'G', 'E', '\n'};
constexpr std::array<char, 8> kShapeMagic{'K', 'V', 'C', 'S', 'T', 'O', 'R', '\n'};

struct ShapeBlock {
    std::array<char, 8> magic;
    std::uint32_t version;
    std::uint32_t reserved;
    std::uint64_t slot_bytes;
    std::uint64_t segment_slots;
    std::uint64_t floor;
};

template <class Fields>
void seal(const Fields& fields, std::byte* block) noexcept {
    std::fill(block, block + kHeaderBytes, std::byte{0});
    std::memcpy(block, &fields, sizeof fields);
    const std::uint32_t crc = crc32c(block, kHeaderCrcAt);
    std::memcpy(block + kHeaderCrcAt, &crc, sizeof crc);
}

// Reads the fields of a block, and checks its magic and its CRC.
template <class Fields>
HeaderState unseal(const std::byte* block, const std::array<char, 8>& magic,
                   Fields& fields) noexcept {
    std::memcpy(&fields, block, sizeof fields);
    std::uint32_t crc;
    std::memcpy(&crc, block + kHeaderCrcAt, sizeof crc);
    if (fields.magic == magic && crc == crc32c(block, kHeaderCrcAt)) return HeaderState::kRight;
    const bool is_empty =
        std::all_of(block, block + kHeaderBytes, [](std::byte b) { return b == std::byte{0}; });
    return is_empty ? HeaderState::kEmpty : HeaderState::kCorrupt;
}

// Returns true if sizes and bits of the parts agree and the page fits into a slot.
bool is_consistent(const SlotHeader& header, std::int64_t slot_bytes) noexcept {
    std::uint64_t sum = 0;
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < header.part.size(); ++i) {
        sum += header.part[i].bytes;
        if (header.part[i].bytes > 0) bits |= std::uint64_t{1} << i;
    }
    return bits == header.parts && bits != 0 && sum == header.payload_bytes &&
           sum <= static_cast<std::uint64_t>(slot_bytes - kHeaderBytes);
}

}  // namespace

void write_header(SlotHeader header, std::byte* block) noexcept {
    header.magic = kSlotMagic;
    header.version = kDiskFormatVersion;
    header.num_parts = kMaxStoreParts;
    seal(header, block);
}

HeaderState read_header(const std::byte* block, std::int64_t slot_bytes,
                        SlotHeader& header) noexcept {
    const HeaderState state = unseal(block, kSlotMagic, header);
    if (state != HeaderState::kRight) return state;
    const bool is_known =
        header.version == kDiskFormatVersion && header.num_parts == kMaxStoreParts;
    return is_known && is_consistent(header, slot_bytes) ? state : HeaderState::kCorrupt;
}

void write_shape(const StoreShape& shape, std::byte* block) noexcept {
    seal(
        ShapeBlock{kShapeMagic, kDiskFormatVersion, 0, static_cast<std::uint64_t>(shape.slot_bytes),
                   static_cast<std::uint64_t>(shape.segment_slots), shape.floor},
        block);
}

HeaderState read_shape(const std::byte* block, StoreShape& shape, std::uint32_t& version) noexcept {
    ShapeBlock fields;
    const HeaderState state = unseal(block, kShapeMagic, fields);
    version = kDiskFormatVersion;
    if (state != HeaderState::kRight) return state;
    version = fields.version;
    shape.slot_bytes = static_cast<std::int64_t>(fields.slot_bytes);
    shape.segment_slots = static_cast<std::int64_t>(fields.segment_slots);
    shape.floor = fields.floor;
    const bool is_sane = shape.slot_bytes > kHeaderBytes && shape.slot_bytes % kDiskBlock == 0 &&
                         shape.segment_slots > 0;
    return is_sane && version == kDiskFormatVersion ? state : HeaderState::kCorrupt;
}

std::string segment_name(std::int64_t segment) {
    std::array<char, 40> name{};
    std::snprintf(name.data(), name.size(), "segment-%06lld.kv", static_cast<long long>(segment));
    return name.data();
}

std::int64_t segment_number(const std::string& name) {
    long long number = -1;
    if (std::sscanf(name.c_str(), "segment-%lld.kv", &number) != 1 || number < 0) return -1;
    return name == segment_name(number) ? number : -1;
}

}  // namespace kvcore
