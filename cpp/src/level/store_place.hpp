// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>
#include <vector>

#include "level/level.hpp"

namespace kvcore {

/// A place in a level. The destructor gives it up: see Level.
///
/// Owns: the place, or nothing. Threads: no locks of its own. Cost: O(1); never throws, except in
/// `advance` and `put`.
class StorePlace {
   public:
    StorePlace() noexcept = default;
    /// Takes over a place that the caller holds.
    StorePlace(Level& store, TreeNode* node) noexcept : store_(&store), node_(node) {}
    StorePlace(StorePlace&& other) noexcept : store_(other.store_), node_(other.release()) {}
    StorePlace& operator=(StorePlace&& other) noexcept {
        StorePlace moved(std::move(other));
        std::swap(store_, moved.store_);
        std::swap(node_, moved.node_);
        return *this;
    }
    ~StorePlace() { reset(); }

    [[nodiscard]] TreeNode* node() const noexcept { return node_; }
    [[nodiscard]] explicit operator bool() const noexcept { return node_ != nullptr; }
    /// Pages on the path to the place, which must exist.
    [[nodiscard]] std::int32_t depth() const noexcept { return PrefixTree::depth_of(node_); }
    [[nodiscard]] TreeNode* release() noexcept { return std::exchange(node_, nullptr); }
    void reset() noexcept {
        if (TreeNode* node = release()) store_->release(node);
    }

    /// Moves the place forward over stored pages that continue it by `tokens` [n]. If it throws
    /// std::bad_alloc, nothing has changed.
    void advance(const TokenId* tokens, std::int64_t n) {
        node_ = store_->advance(node_, tokens, n);
    }
    /// Puts taken pages [n] into the tree after the place, and moves the place to their end. Throws
    /// as `advance`.
    void put(const TokenId* tokens, const BlockId* ids, std::int32_t n,
             std::vector<DuplicatePage>* duplicates = nullptr, const Retention& retention = {}) {
        node_ = store_->put(node_, tokens, ids, n, duplicates, retention);
    }

   private:
    Level* store_ = nullptr;
    TreeNode* node_ = nullptr;
};

}  // namespace kvcore
