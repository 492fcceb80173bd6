// SPDX-License-Identifier: Apache-2.0
#include "store/disk/page_io.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "kvcore/page_bytes.hpp"

namespace kvcore {
namespace {

/// A header and all parts of a page.
struct SlotParts {
    explicit SlotParts(std::byte* header) { add(header, kHeaderBytes); }
    void add(const void* data, std::int64_t bytes) noexcept {
        parts[static_cast<std::size_t>(n++)] = {const_cast<void*>(data),
                                                static_cast<std::size_t>(bytes)};
    }
    std::array<iovec, 1 + kMaxStoreParts> parts{};
    int n = 0;
};

template <class Byte>
bool lies_in_blocks(const StorePage<Byte>& page) noexcept {
    return std::all_of(page.parts.begin(), page.parts.end(), [](const StorePart<Byte>& part) {
        return is_block_aligned(part.data, part.bytes);
    });
}

bool has_crc(const void* data, const SlotHeader::Part& part) noexcept {
    return crc32c(data, part.bytes) == part.crc;
}

// A file that ends too soon has lost the page's bytes; after other errors the next try may work.
PageOutcome outcome_of(int error) noexcept {
    return error == kEndOfFile ? PageOutcome::kCorrupt : PageOutcome::kFailed;
}

}  // namespace

PageOutcome PageIo::read(const SlotFiles& files, std::int64_t slot, const PageToRead& page,
                         const KnownPage& stored) {
    const KnownPage wanted = known(page);
    const bool is_whole =
        wanted.parts == stored.parts && wanted.payload_bytes == stored.payload_bytes;
    return is_whole && lies_in_blocks(page)
               ? read_in_place(files, slot, page)
               : read_and_copy(files, slot, page, stored.payload_bytes);
}

PageOutcome PageIo::check(const PageToRead& page, SlotHeader& header) const noexcept {
    if (read_header(block_.data(), slot_bytes_, header) != HeaderState::kRight ||
        !(header.key == page.key) || !(header.fingerprint == fingerprint_)) {
        return PageOutcome::kCorrupt;
    }
    const bool fits = std::all_of(page.parts.begin(), page.parts.end(), [&](const auto& part) {
        return header.part[static_cast<std::size_t>(part.part)].bytes == part.bytes;
    });
    return fits ? PageOutcome::kRight : PageOutcome::kOtherwise;
}

PageOutcome PageIo::read_in_place(const SlotFiles& files, std::int64_t slot,
                                  const PageToRead& page) const {
    SlotParts all(block_.data());
    for (const auto& part : page.parts) all.add(part.data, part.bytes);
    const int error = files.read(slot, all.parts.data(), all.n);
    if (error != 0) return outcome_of(error);
    SlotHeader header;
    const PageOutcome outcome = check(page, header);
    if (outcome != PageOutcome::kRight) return outcome;
    for (const auto& part : page.parts) {
        if (!has_crc(part.data, header.part[static_cast<std::size_t>(part.part)])) {
            return PageOutcome::kCorrupt;
        }
    }
    return PageOutcome::kRight;
}

PageOutcome PageIo::read_and_copy(const SlotFiles& files, std::int64_t slot, const PageToRead& page,
                                  std::int64_t stored) const {
    SlotParts all(block_.data());
    all.parts[0].iov_len += static_cast<std::size_t>(whole_blocks(stored));
    const int error = files.read(slot, all.parts.data(), all.n);
    if (error != 0) return outcome_of(error);
    SlotHeader header;
    const PageOutcome outcome = check(page, header);
    if (outcome != PageOutcome::kRight) return outcome;
    if (static_cast<std::int64_t>(header.payload_bytes) != stored) return PageOutcome::kCorrupt;
    const std::byte* at = payload();
    std::size_t part = 0;
    for (const auto& wanted : page.parts) {
        for (; part < static_cast<std::size_t>(wanted.part); ++part) at += header.part[part].bytes;
        if (!has_crc(at, header.part[part])) return PageOutcome::kCorrupt;
        std::memcpy(wanted.data, at, static_cast<std::size_t>(wanted.bytes));
    }
    return PageOutcome::kRight;
}

PageOutcome PageIo::write(const SlotFiles& files, std::int64_t slot, const PageToWrite& page,
                          std::uint64_t sequence) {
    SlotHeader header{};
    header.sequence = sequence;
    header.key = page.key;
    header.fingerprint = fingerprint_;
    for (const auto& part : page.parts) {
        header.parts |= std::uint64_t{1} << part.part;
        header.payload_bytes += static_cast<std::uint64_t>(part.bytes);
        header.part[static_cast<std::size_t>(part.part)] = {
            static_cast<std::uint32_t>(part.bytes),
            crc32c(part.data, static_cast<std::size_t>(part.bytes))};
    }
    write_header(header, block_.data());
    SlotParts all(block_.data());
    if (lies_in_blocks(page)) {
        for (const auto& part : page.parts) all.add(part.data, part.bytes);
    } else {
        std::byte* at = payload();
        for (const auto& part : page.parts) {
            at = std::copy_n(part.data, part.bytes, at);
        }
        std::byte* end = payload() + whole_blocks(at - payload());
        std::fill(at, end, std::byte{0});
        all.parts[0].iov_len += static_cast<std::size_t>(end - payload());
    }
    return files.write(slot, all.parts.data(), all.n) == 0 ? PageOutcome::kRight
                                                           : PageOutcome::kFailed;
}

}  // namespace kvcore
