// SPDX-License-Identifier: Apache-2.0
#include "kvcore/paged_rows.hpp"

#include <algorithm>
#include <cstring>

namespace kvcore {

namespace {

using Source = TokenRows<const std::byte>;
using Destination = TokenRows<std::byte>;

void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) noexcept {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void copy_tokens(TokenShape shape, const Destination& to, const Source& from,
                 std::int64_t count) noexcept {
    const std::int64_t row = shape.heads * shape.head_bytes;
    const auto has_whole_tokens = [&](const auto& rows) {
        return shape.heads == 1 || rows.head_stride == shape.head_bytes;
    };
    if (!has_whole_tokens(to) || !has_whole_tokens(from)) {
        for (std::int64_t token = 0; token < count; ++token) {
            for (std::int64_t head = 0; head < shape.heads; ++head) {
                copy_bytes(to.data + token * to.token_stride + head * to.head_stride,
                           from.data + token * from.token_stride + head * from.head_stride,
                           shape.head_bytes);
            }
        }
    } else if (to.token_stride == row && from.token_stride == row) {
        copy_bytes(to.data, from.data, count * row);
    } else {
        for (std::int64_t token = 0; token < count; ++token) {
            copy_bytes(to.data + token * to.token_stride, from.data + token * from.token_stride,
                       row);
        }
    }
}

/// Calls copy(rows of the pool, tokens done before, tokens) for the part in each block.
template <class Byte, class Copy>
void for_each_block(const PagedRows<Byte>& pool, std::int64_t first, std::int64_t count,
                    Copy&& copy) noexcept {
    for (std::int64_t done = 0; done < count;) {
        const std::int64_t left = pool.block_size - (first + done) % pool.block_size;
        const std::int64_t tokens = std::min(left, count - done);
        copy(TokenRows<Byte>{pool.data + pool.offset(first + done), pool.token_stride,
                             pool.head_stride},
             done, tokens);
        done += tokens;
    }
}

}  // namespace

void append_rows(TokenShape shape, const PagedRows<std::byte>& pool, std::int64_t first,
                 const TokenRows<const std::byte>& source, std::int64_t count) noexcept {
    for_each_block(pool, first, count,
                   [&](const Destination& to, std::int64_t done, std::int64_t tokens) {
                       const Source from{source.data + done * source.token_stride,
                                         source.token_stride, source.head_stride};
                       copy_tokens(shape, to, from, tokens);
                   });
}

void gather_rows(TokenShape shape, const PagedRows<const std::byte>& pool, std::int64_t first,
                 const TokenRows<std::byte>& destination, std::int64_t count) noexcept {
    for_each_block(pool, first, count,
                   [&](const Source& from, std::int64_t done, std::int64_t tokens) {
                       const Destination to{destination.data + done * destination.token_stride,
                                            destination.token_stride, destination.head_stride};
                       copy_tokens(shape, to, from, tokens);
                   });
}

}  // namespace kvcore
