// SPDX-License-Identifier: Apache-2.0
// Passes the rows of one sequence to a copier, as runs of bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "data/copy_runs.hpp"
#include "kvcore/paged_batch.hpp"

namespace kvcore {

inline void copy_tokens(RunCopier& copier, TokenShape shape, const TokenRows<std::byte>& to,
                        const TokenRows<const std::byte>& from, std::int64_t count) noexcept {
    const std::int64_t row = shape.heads * shape.head_bytes;
    const auto has_whole_tokens = [&](const auto& rows) {
        return shape.heads == 1 || rows.head_stride == shape.head_bytes;
    };
    if (!has_whole_tokens(to) || !has_whole_tokens(from)) {
        for (std::int64_t token = 0; token < count; ++token) {
            for (std::int64_t head = 0; head < shape.heads; ++head) {
                copier.copy(to.data + token * to.token_stride + head * to.head_stride,
                            from.data + token * from.token_stride + head * from.head_stride,
                            shape.head_bytes);
            }
        }
    } else if (to.token_stride == row && from.token_stride == row) {
        copier.copy(to.data, from.data, count * row);
    } else {
        for (std::int64_t token = 0; token < count; ++token) {
            copier.copy(to.data + token * to.token_stride, from.data + token * from.token_stride,
                        row);
        }
    }
}

/// Calls visit(token, tokens done before, tokens) for the part in each block.
template <class Visit>
void for_each_block(std::int64_t block_size, std::int64_t first, std::int64_t count,
                    Visit&& visit) noexcept {
    for (std::int64_t done = 0; done < count;) {
        const std::int64_t left = block_size - (first + done) % block_size;
        const std::int64_t tokens = std::min(left, count - done);
        visit(first + done, done, tokens);
        done += tokens;
    }
}

template <class Byte>
[[nodiscard]] TokenRows<Byte> rows_at(const PagedRows<Byte>& pool, std::int64_t token) noexcept {
    return {pool.data + pool.offset(token), pool.token_stride, pool.head_stride};
}

inline void append_runs(RunCopier& copier, TokenShape shape, const PagedRows<std::byte>& pool,
                        std::int64_t first, const TokenRows<const std::byte>& source,
                        std::int64_t count) noexcept {
    for_each_block(pool.block_size, first, count,
                   [&](std::int64_t token, std::int64_t done, std::int64_t tokens) {
                       copy_tokens(copier, shape, rows_at(pool, token), source.from(done), tokens);
                   });
}

inline void gather_runs(RunCopier& copier, TokenShape shape, const PagedRows<const std::byte>& pool,
                        std::int64_t first, const TokenRows<std::byte>& destination,
                        std::int64_t count) noexcept {
    for_each_block(pool.block_size, first, count,
                   [&](std::int64_t token, std::int64_t done, std::int64_t tokens) {
                       copy_tokens(copier, shape, destination.from(done), rows_at(pool, token),
                                   tokens);
                   });
}

}  // namespace kvcore
