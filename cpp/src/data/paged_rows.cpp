// SPDX-License-Identifier: Apache-2.0
#include "kvcore/paged_batch.hpp"

#include "data/row_runs.hpp"

namespace kvcore {

void append_rows(TokenShape shape, const PagedRows<std::byte>& pool, std::int64_t first,
                 const TokenRows<const std::byte>& source, std::int64_t count) noexcept {
    RunCopier copier(shape.heads * shape.head_bytes * count);
    append_runs(copier, shape, pool, first, source, count);
}

void gather_rows(TokenShape shape, const PagedRows<const std::byte>& pool, std::int64_t first,
                 const TokenRows<std::byte>& destination, std::int64_t count) noexcept {
    RunCopier copier(shape.heads * shape.head_bytes * count);
    gather_runs(copier, shape, pool, first, destination, count);
}

}  // namespace kvcore
