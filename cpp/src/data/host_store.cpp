// SPDX-License-Identifier: Apache-2.0
#include "kvcore/host_store.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "data/present_ahead.hpp"
#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

// Bytes of memory that are made present before they are used.
constexpr std::size_t kAhead = std::size_t{1} << 30;

// K of a page, then V of the page, each [layers, page_size, heads, row], as pools are allocated. A
// page with the same layout on the device is one run.
CacheView<std::byte> packed_like(const CacheView<std::byte>& device, std::byte* at,
                                 std::int64_t page_stride) noexcept {
    const auto tensor = [&](const CacheTensor<std::byte>& like, std::byte* first) {
        const std::int64_t token = device.heads * like.row_bytes;
        return CacheTensor<std::byte>{
            first, nullptr,        page_stride,   device.page_size * token,
            token, like.row_bytes, like.row_bytes};
    };
    const std::int64_t rows = device.layers * device.page_size * device.heads;
    return {device.layers, device.page_size, device.heads, tensor(device.k, at),
            tensor(device.v, at + rows * device.k.row_bytes)};
}

std::int64_t bytes_of(const CacheView<std::byte>& cache) noexcept {
    return cache.layers * cache.page_size * cache.heads * (cache.k.row_bytes + cache.v.row_bytes);
}

CacheView<const std::byte> readable(const CacheView<std::byte>& cache) noexcept {
    const auto tensor = [](const CacheTensor<std::byte>& from) {
        return CacheTensor<const std::byte>{from.data,         from.layers,       from.page_stride,
                                            from.layer_stride, from.token_stride, from.head_stride,
                                            from.row_bytes};
    };
    return {cache.layers, cache.page_size, cache.heads, tensor(cache.k), tensor(cache.v)};
}

std::size_t size_of(std::int64_t pages, std::int64_t page_bytes) noexcept {
    return static_cast<std::size_t>(pages * page_bytes);
}

std::byte* map_memory(std::int64_t pages, std::int64_t page_bytes) {
    const bool is_countable = pages <= std::numeric_limits<std::int64_t>::max() / page_bytes;
    void* memory = MAP_FAILED;
    if (is_countable) {
        const std::size_t bytes = size_of(pages, page_bytes);
        // The system reserves no memory for the mapping: a page becomes present when it is written.
        memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        // Huge pages become present in a third of the time. The call is advice: the system may
        // refuse it.
        if (memory != MAP_FAILED) madvise(memory, bytes, MADV_HUGEPAGE);
    }
    if (memory == MAP_FAILED) {
        throw CapacityError(detail::concat("the host tier needs ", pages, " pages of ", page_bytes,
                                           " bytes, which cannot be mapped; give it less space"));
    }
    return static_cast<std::byte*>(memory);
}

}  // namespace

HostStore::HostStore(std::int64_t num_pages, const std::vector<CacheView<std::byte>>& caches)
    : num_pages_(num_pages) {
    for (const CacheView<std::byte>& cache : caches) page_bytes_ += bytes_of(cache);
    if (num_pages < 1 || page_bytes_ < 1) {
        throw std::invalid_argument(detail::concat("a host tier of ", num_pages, " pages of ",
                                                   page_bytes_, " bytes; both must be at least 1"));
    }
    parts_.reserve(caches.size());
    memory_ = map_memory(num_pages, page_bytes_);
    std::byte* at = memory_;
    for (const CacheView<std::byte>& cache : caches) {
        parts_.push_back({cache, packed_like(cache, at, page_bytes_)});
        at += bytes_of(cache);
    }
    try {
        ahead_ = std::make_unique<PresentAhead>(memory_, size_of(num_pages_, page_bytes_), kAhead);
    } catch (...) {
        munmap(memory_, size_of(num_pages_, page_bytes_));
        throw;
    }
}

HostStore::~HostStore() {
    if (ahead_->is_forked()) {
        [[maybe_unused]] const PresentAhead* left_alone = ahead_.release();
    }
    ahead_.reset();
    munmap(memory_, size_of(num_pages_, page_bytes_));
}

void HostStore::expect(std::int64_t last) const noexcept {
    ahead_->use(size_of(last + 1, page_bytes_));
}

void HostStore::store(const PagePair* pairs, std::int64_t n, int threads) const {
    std::int64_t last = -1;
    for (std::int64_t i = 0; i < n; ++i) last = std::max(last, pairs[i].destination);
    expect(last);
    for (const Part& part : parts_) {
        transfer(readable(part.device), part.host, pairs, n, {0, part.device.layers}, threads);
    }
}

void HostStore::load(const PagePair* pairs, std::int64_t n, int threads) const {
    for (const Part& part : parts_) {
        transfer(readable(part.host), part.device, pairs, n, {0, part.device.layers}, threads);
    }
}

}  // namespace kvcore
