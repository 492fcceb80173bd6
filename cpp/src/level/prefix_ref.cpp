// SPDX-License-Identifier: Apache-2.0
#include "level/prefix_ref.hpp"

namespace kvcore {

void PrefixRef::end_with(bool touch) noexcept {
    if (home_ == nullptr) return;
    unlink();
    windows_.reset();
    if (TreeNode* node = std::exchange(node_, nullptr)) home_->tree.unpin(node, touch);
    const Pages pages = std::exchange(references_, {});
    if (pages.n > 0) home_->pool.free(pages.ids, pages.n);
    home_ = nullptr;
}

}  // namespace kvcore
