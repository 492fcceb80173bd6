// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/types.hpp"

/// Return a word that depends on another word and a number.
[[nodiscard]] inline std::uint64_t mixed(std::uint64_t word, std::uint64_t number) noexcept {
    word ^= number + 0x9e3779b97f4a7c15U + (word << 6) + (word >> 2);
    word *= 0xff51afd7ed558ccdU;
    word ^= word >> 32;
    word *= 0xc4ceb9fe1a85ec53U;
    return word ^ (word >> 29);
}

/// A word for K and V of the last of `n` tokens, which depend on all of the tokens.
[[nodiscard]] inline std::uint64_t content_of(const kvcore::TokenId* tokens, std::int64_t n) {
    std::uint64_t content = 1;
    for (std::int64_t i = 0; i < n; ++i) {
        content = mixed(content, static_cast<std::uint32_t>(tokens[i]));
    }
    return content;
}

constexpr std::uint64_t kGarbage = 0;  // content of a slot that no request may read

/// Pages of a pool, with a word in place of K and V for each token slot.
class ExploredMemory {
   public:
    ExploredMemory(std::int64_t num_pages, std::int32_t page_size)
        : num_pages_(num_pages),
          page_size_(page_size),
          words_(static_cast<std::size_t>(num_pages * page_size), kGarbage) {}

    [[nodiscard]] std::uint64_t* page(kvcore::BlockId page) {
        return words_.data() + std::ptrdiff_t{page} * page_size_;
    }
    [[nodiscard]] const std::uint64_t* page(kvcore::BlockId page) const {
        return words_.data() + std::ptrdiff_t{page} * page_size_;
    }
    [[nodiscard]] std::int32_t page_size() const { return page_size_; }

    void spoil(kvcore::BlockId which, std::int64_t from = 0) {
        std::fill(page(which) + from, page(which) + page_size_, kGarbage);
    }
    /// Overwrite free pages: no reader may depend on their old content.
    void spoil_free_pages(const kvcore::BlockPool& pool) {
        for (kvcore::BlockId id = 0; id < num_pages_; ++id) {
            if (pool.ref_count(id) == 0) spoil(id);
        }
    }

   private:
    std::int64_t num_pages_;
    std::int32_t page_size_;
    std::vector<std::uint64_t> words_;
};
