// SPDX-License-Identifier: Apache-2.0
// Where tenants have quotas: which pages of columns are held.
#include "layers/column_pages.hpp"

namespace kvcore {

// A column with another reference stays held: see PageOwners.
void ColumnPages::protect(const BlockId* ids, std::int32_t n, bool is_protected) noexcept {
    for (std::int32_t i = 0; i < n; ++i) {
        if (!is_protected && columns_.ref_count(ids[i]) > 1) continue;
        for_each_full_page(ids[i], [&](BlockId page) {
            is_protected ? owners_->hold(&page, 1) : owners_->let_go(&page, 1);
        });
    }
}

void ColumnPages::tell_window(BlockId column, std::size_t window, bool is_held) const noexcept {
    for_each_window_page(column, window, [&](BlockId page) {
        is_held ? owners_->hold(&page, 1) : owners_->let_go(&page, 1);
    });
}

// Nothing that could be evicted is left in the tree but idle pages of windows.
void ColumnPages::tell_held() const noexcept {
    for (std::int64_t c = 0; c < columns_.num_blocks(); ++c) {
        const auto column = static_cast<BlockId>(c);
        if (columns_.ref_count(column) == 0) continue;
        for_each_full_page(column, [&](BlockId page) { owners_->hold(&page, 1); });
        for (std::size_t w = 0; w < num_windows_; ++w) {
            if (!is_idle(column, w)) tell_window(column, w, true);
        }
    }
}

}  // namespace kvcore
