// SPDX-License-Identifier: Apache-2.0
// K13: fills pages with a byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/cuda.hpp"
#include "launch.hpp"
#include "page_lists.hpp"
#include "units.hpp"

namespace kvcore::cuda {

/// Each lane writes a unit of a page; the lanes of a page are neighbours.
template <class Unit>
struct FillBody {
    PageBytes<std::byte> pool;
    std::int64_t num_pages;
    const std::int64_t* ids;  // [n]
    std::int64_t n;
    Divider units;  // of a page
    Unit value;
    static constexpr std::int64_t kSize = sizeof(Unit);

    KVCORE_HOST_DEVICE void operator()(Lane lane) const {
        KVCORE_KEEP_LOOP
        for (std::int64_t i = lane.index(); i < n * units.divisor(); i += lane.count()) {
            const std::int64_t page = units.quotient(i);
            const std::int64_t id = ids[page];
            if (!is_page(id, num_pages)) continue;
            store_unit(pool.page(id) + units.remainder(i, page) * kSize, value);
        }
    }
};

Status fill_pages(const PageBytes<std::byte>& pool, std::int64_t num_pages, const std::int64_t* ids,
                  std::int64_t n, std::byte value, Stream stream) noexcept {
    if (n < 0) return kInvalidCall;
    if (pool.page_bytes == 0) return kSuccess;
    return with_unit(alignment_of(pool.data, pool.page_stride, pool.page_bytes), [&](auto unit) {
        using Unit = decltype(unit);
        std::memset(&unit, std::to_integer<int>(value), sizeof unit);
        const std::int64_t units = pool.page_bytes / FillBody<Unit>::kSize;
        return launch(FillBody<Unit>{pool, num_pages, ids, n, Divider(units), unit},
                      grid_for(n * units), stream);
    });
}

}  // namespace kvcore::cuda
