// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvcore/layout.hpp"
#include "support/check.hpp"

namespace attention_case {

/// A copy of a tensor with pages so far apart that the last pages start after 2^32 bytes. The view
/// uses the copy during the copy's lifetime.
class SparseCopy {
   public:
    SparseCopy(kvcore::PagedTensor<const std::byte>& view, std::int64_t pages)
        : view_(view), was_(view) {
        constexpr std::int64_t kPageSize = 4096;
        const std::int64_t page_bytes = view.page_stride;
        view.page_stride =
            ((std::int64_t{5} << 30) / pages + kPageSize) / kPageSize * kPageSize + 8;
        size_ = view.page_stride * pages;
        void* memory = mmap(nullptr, static_cast<std::size_t>(size_), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(memory != MAP_FAILED);
        auto* data = static_cast<std::byte*>(memory);
        for (std::int64_t page = 0; page < pages; ++page) {
            std::memcpy(data + page * view.page_stride, view.data + page * page_bytes,
                        static_cast<std::size_t>(page_bytes));
        }
        view.data = data;
    }
    ~SparseCopy() {
        munmap(const_cast<std::byte*>(view_.data), static_cast<std::size_t>(size_));
        view_ = was_;
    }
    SparseCopy(const SparseCopy&) = delete;
    SparseCopy& operator=(const SparseCopy&) = delete;

    std::int64_t size() const { return size_; }

   private:
    kvcore::PagedTensor<const std::byte>& view_;
    kvcore::PagedTensor<const std::byte> was_;
    std::int64_t size_;
};

}  // namespace attention_case
