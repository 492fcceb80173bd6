// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kvcore/disk_store.hpp"
#include "store/disk/aligned_buffer.hpp"
#include "store/disk/slot_files.hpp"

namespace kvcore {

/// The parts and the size of a page, known before it is read.
struct KnownPage {
    std::uint64_t parts;
    std::int64_t payload_bytes;
};

enum class PageOutcome {
    kRight,
    kFailed,    // a system call failed
    kCorrupt,   // the bytes differ from the written bytes
    kOtherwise  // a right page, with other parts or other part sizes
};

/// The parts of a page, a bit each, and their total bytes.
template <class Byte>
[[nodiscard]] KnownPage known(const StorePage<Byte>& page) noexcept {
    KnownPage sum{0, 0};
    for (const StorePart<Byte>& part : page.parts) {
        sum.parts |= std::uint64_t{1} << part.part;
        sum.payload_bytes += part.bytes;
    }
    return sum;
}

/// Reads and writes pages of slots, one at a time.
///
/// Owns: memory for one slot, as a buffer for pages that are not in whole blocks.
class PageIo {
   public:
    PageIo(std::int64_t slot_bytes, const StoreKey& fingerprint)
        : slot_bytes_(slot_bytes), fingerprint_(fingerprint), block_(slot_bytes) {}

    /// Reads the requested parts, and checks key, fingerprint, sizes and CRCs.
    [[nodiscard]] PageOutcome read(const SlotFiles& files, std::int64_t slot,
                                   const PageToRead& page, const KnownPage& stored);
    /// Returns kRight or kFailed.
    [[nodiscard]] PageOutcome write(const SlotFiles& files, std::int64_t slot,
                                    const PageToWrite& page, std::uint64_t sequence);

   private:
    [[nodiscard]] std::byte* payload() const noexcept { return block_.data() + kHeaderBytes; }
    [[nodiscard]] PageOutcome check(const PageToRead& page, SlotHeader& header) const noexcept;
    [[nodiscard]] PageOutcome read_in_place(const SlotFiles& files, std::int64_t slot,
                                            const PageToRead& page) const;
    [[nodiscard]] PageOutcome read_and_copy(const SlotFiles& files, std::int64_t slot,
                                            const PageToRead& page, std::int64_t stored) const;

    std::int64_t slot_bytes_;
    StoreKey fingerprint_;
    AlignedBuffer block_;
};

}  // namespace kvcore
