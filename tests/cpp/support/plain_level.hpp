// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "layers/grouping.hpp"
#include "level/level.hpp"

struct PlainLayout {
    kvcore::Grouping layout;
};

/// A level of a cache in which all layers keep every token.
struct PlainLevel : private PlainLayout, public kvcore::Level {
    PlainLevel(std::int64_t num_pages, std::int32_t page_size)
        : PlainLayout{kvcore::Grouping(page_size, {})}, Level(layout, Size{num_pages}) {}

    /// Puts pages after a place, gives back the pages that were cached meanwhile, and returns the
    /// place at the end of the pages.
    kvcore::TreeNode* publish(kvcore::TreeNode* place, const kvcore::TokenId* tokens,
                              const kvcore::BlockId* ids, std::int32_t n) {
        std::vector<kvcore::DuplicatePage> duplicates;
        kvcore::TreeNode* end = put(place, tokens, ids, n, duplicates, {});
        for (const kvcore::DuplicatePage& each : duplicates) give_back(ids + each.index, 1);
        return end;
    }
    /// Moves a place back to a depth in pages.
    kvcore::TreeNode* retreat(kvcore::TreeNode* place, std::int32_t depth) {
        kvcore::TreeNode* nearer = hold({place, depth});
        release(place);
        return nearer;
    }
};
