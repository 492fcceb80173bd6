// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/page_keys.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// The keys of the records in the host tier of a replica, as far as a caller asked for them.
///
/// Owns: a key for each record, by its id. Invariant: a known key is the key of the record's tokens
/// in the tier's tree, and the keys of all records on the path to it are also known; a newly taken
/// record has no key.
/// Threads: no locks of its own; CacheManager locks around it. Cost: O(1); 33 bytes per record.
class RecordKeys {
   public:
    explicit RecordKeys(std::int64_t num_records)
        : keys_(static_cast<std::size_t>(num_records)),
          is_known_(static_cast<std::size_t>(num_records)) {}

    /// Returns nullptr if the key is not known.
    [[nodiscard]] const PageKey* find(BlockId record) const noexcept {
        const auto i = static_cast<std::size_t>(record);
        return is_known_[i] != 0 ? &keys_[i] : nullptr;
    }
    void set(BlockId record, const PageKey& key) noexcept {
        const auto i = static_cast<std::size_t>(record);
        keys_[i] = key;
        is_known_[i] = 1;
    }
    void forget(const BlockId* records, std::int64_t n) noexcept {
        std::for_each(records, records + n,
                      [this](BlockId each) { is_known_[static_cast<std::size_t>(each)] = 0; });
    }

   private:
    std::vector<PageKey> keys_;
    std::vector<std::uint8_t> is_known_;
};

}  // namespace kvcore
