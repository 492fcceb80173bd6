// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvcore/block_pool.hpp"
#include "kvcore/prefix_tree.hpp"
#include "layers/column_pages.hpp"
#include "layers/recurrent_slots.hpp"
#include "level/record_keys.hpp"

namespace kvcore {

/// Passes the pages that a tree forgets to the pool, and to the data of these pages or columns.
///
/// Owns: no pages and no data. Threads: no locks of its own; CacheManager locks around it. Cost:
/// O(1) per page.
class ForgottenPages final : public ForgottenListener {
   public:
    /// Sets the objects to call; nullptr for an object that the replica does not have.
    void watch(PrefixTree& tree, BlockPool& pool, ColumnPages* columns, RecurrentSlots* states,
               RecordKeys* keys) noexcept {
        pool_ = &pool;
        columns_ = columns;
        states_ = states;
        keys_ = keys;
        tree.set_forgotten_listener(this);
    }

    void left(const BlockId* ids, std::int32_t n) noexcept override {
        if (columns_ != nullptr) {
            std::for_each(ids, ids + n, [this](BlockId column) { columns_->disown(column); });
        }
        if (states_ != nullptr) states_->forget_columns(ids, n);
        if (keys_ != nullptr) keys_->forget(ids, n);
    }
    void let_go(const BlockId* ids, std::int32_t n) noexcept override { pool_->free(ids, n); }

   private:
    BlockPool* pool_ = nullptr;
    ColumnPages* columns_ = nullptr;
    RecurrentSlots* states_ = nullptr;
    RecordKeys* keys_ = nullptr;
};

}  // namespace kvcore
