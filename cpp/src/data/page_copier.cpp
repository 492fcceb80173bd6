// SPDX-License-Identifier: Apache-2.0
#include "kvcore/host_store.hpp"

#include <array>

namespace kvcore {

// Copies in pieces that fit on the stack: an admission has one copy, a batch about one copy for
// each row.
void PageCopier::run(const PageMove* copies, std::int64_t n) const {
    std::array<PageStart, 64> piece;
    for (std::int64_t done = 0; done < n;) {
        const std::int32_t replica = copies[done].replica;
        std::size_t count = 0;
        for (; done < n && count < piece.size() && copies[done].replica == replica; ++done) {
            const PageMove& copy = copies[done];
            piece[count++] = {copy.source, copy.destination, copy.num_tokens};
        }
        for (const CacheView<std::byte>& cache : pools_[static_cast<std::size_t>(replica)]) {
            copy_partial(cache, piece.data(), static_cast<std::int64_t>(count));
        }
    }
}

std::int64_t PageCopier::bytes_of(const PageMove* copies, std::int64_t n) const noexcept {
    std::int64_t bytes = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        for (const CacheView<std::byte>& cache :
             pools_[static_cast<std::size_t>(copies[i].replica)]) {
            bytes += copies[i].num_tokens * cache.layers * cache.heads *
                     (cache.k.row_bytes + cache.v.row_bytes);
        }
    }
    return bytes;
}

}  // namespace kvcore
