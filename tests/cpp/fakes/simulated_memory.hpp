// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <vector>

#include "support/request.hpp"

/// The memory of the pages: one digest per token slot. A check then finds a read of a page that
/// belongs to another request, is not written, or is overwritten.
class SimulatedMemory {
   public:
    explicit SimulatedMemory(const kvcore::CacheConfig& config)
        : page_size_(config.page_size),
          replicas_(static_cast<std::size_t>(config.num_replicas),
                    std::vector<Digest>(static_cast<std::size_t>(config.num_pages * page_size_))) {}

    /// The slots of a page [page_size].
    [[nodiscard]] Digest* page(std::int32_t replica, BlockId id) {
        return &item(item(replicas_, replica), id * page_size_);
    }

    void copy(const kvcore::PageMove& copy) {
        std::memcpy(page(copy.replica, copy.destination), page(copy.replica, copy.source),
                    static_cast<std::size_t>(copy.num_tokens) * sizeof(Digest));
    }

    /// The writes of one step's kernels: positions first .. last - 1 of a request.
    void write(std::int32_t replica, const std::vector<BlockId>& row, const Request& request,
               std::int64_t first, std::int64_t last) {
        for (std::int64_t i = first; i < last; ++i) {
            page(replica, item(row, i / page_size_))[i % page_size_] = request.contents()[i];
        }
    }

    /// Fail unless the request's pages have the content of its first `n` tokens.
    void check_contents(std::int32_t replica, const std::vector<BlockId>& row,
                        const Request& request, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i) {
            const Digest found = page(replica, item(row, i / page_size_))[i % page_size_];
            if (found == request.contents()[i]) continue;
            check::fail(__FILE__, __LINE__,
                        "position " + std::to_string(i) + " of " + std::to_string(n) + " in page " +
                            std::to_string(item(row, i / page_size_)) +
                            " is not what the request wrote");
        }
    }

   private:
    std::int64_t page_size_;
    std::vector<std::vector<Digest>> replicas_;
};
