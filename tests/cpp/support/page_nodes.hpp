// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <vector>

#include "kvcore/types.hpp"
#include "support/random.hpp"
#include "tree/tree_node.hpp"

using Page = std::vector<kvcore::TokenId>;

/// Tree nodes of one page each, without a tree. Their addresses and tokens stay valid.
class PageNodes {
   public:
    kvcore::TreeNode* make(kvcore::TreeNode* parent, const Page& page) {
        pages_.push_back(page);
        nodes_.emplace_back();
        kvcore::TreeNode& node = nodes_.back();
        node.parent = parent;
        node.tokens = pages_.back().data();
        node.num_pages = node.capacity = 1;
        node.id = static_cast<std::uint32_t>(nodes_.size());
        return &node;
    }

   private:
    std::deque<kvcore::TreeNode> nodes_;
    std::deque<Page> pages_;
};

/// Tokens from a small vocabulary that spans the int32 range, so that pages share long starts.
inline Page random_page(Random& random, std::int32_t page_size, std::int64_t vocabulary) {
    Page page;
    for (std::int32_t i = 0; i < page_size; ++i) {
        const std::int64_t token = random.below(vocabulary) - vocabulary / 2;
        page.push_back(static_cast<kvcore::TokenId>(token * (INT32_MAX / vocabulary)));
    }
    return page;
}

/// The number of different pages of this size and vocabulary, at most about 10^6.
inline std::int64_t most_pages(std::int32_t page_size, std::int64_t vocabulary) {
    std::int64_t n = 1;
    for (std::int32_t i = 0; i < page_size && n < 1'000'000; ++i) n *= vocabulary;
    return n;
}
