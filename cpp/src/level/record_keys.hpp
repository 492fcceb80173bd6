// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/page_keys.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// Keys of what the host tier of a replica has, as far as somebody asked for them.
///
/// Owns: a key for each record, by its id. Invariant: a known key is that of the tokens that the
/// record has in the tier's tree, and so are those of all records on the way to it; a record that
/// is taken anew has none.
/// Threads: none of its own; CacheManager locks around it. Cost: O(1); 33 bytes a record.
class RecordKeys {
   public:
    explicit RecordKeys(std::int64_t num_records)
        : keys_(static_cast<std::size_t>(num_records)),
          is_known_(static_cast<std::size_t>(num_records)) {}

    /// nullptr where it is not known.
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
