// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <limits>

#include "cache_buffers.hpp"
#include "handlers.hpp"
#include "kvcore/paged_batch.hpp"

namespace kvcore::jax {
namespace {

using ffi::AnyBuffer;
using ffi::Error;
using ffi::Result;

/// Copies an operand to its result. XLA may use the same memory for both, if the operand is not
/// read again.
void take_over(const AnyBuffer& from, const AnyBuffer& to) {
    if (from.untyped_data() == to.untyped_data()) return;
    std::memcpy(to.untyped_data(), from.untyped_data(), from.size_bytes());
}

/// Refuses a block that is twice in the row: other tokens of the row would overwrite it.
Error check_written_once(const CacheBuffers& cache, std::int64_t row, std::int64_t first,
                         std::int64_t end) {
    const BlockId* blocks = cache.blocks(row);
    for (std::int64_t written = first; written < end; ++written) {
        const auto* found = std::find(blocks, blocks + end, blocks[written]);
        const auto* again = std::find(found + 1, blocks + end, blocks[written]);
        if (again == blocks + end) continue;
        return refusal("block ", blocks[written], " is in row ", row, " twice, in columns ",
                       found - blocks, " and ", again - blocks, "; use each block once in a row");
    }
    return Error::Success();
}

Error check_append(const CacheBuffers& cache, std::int64_t row, std::int64_t count) {
    if (const Error wrong = cache.check_row(row); wrong.failure()) return wrong;
    const std::int64_t length = cache.length(row);
    const std::int64_t end = ceil_div(length + count, cache.block_size());
    if (end > cache.columns() || length + count > std::numeric_limits<std::int32_t>::max()) {
        return refusal("row ", row, " of the block table would hold ", length + count,
                       " tokens, needs ", end, " blocks of ", cache.block_size(), " and has ",
                       cache.columns(), " columns; raise max_blocks_per_seq or append fewer");
    }
    if (count == 0) return Error::Success();
    const std::int64_t first = length / cache.block_size();
    if (const Error wrong = cache.check_blocks(row, first, end); wrong.failure()) return wrong;
    return check_written_once(cache, row, first, end);
}

Error append(AnyBuffer keys, AnyBuffer values, Int32s table, Int32s lengths, Int32s index,
             AnyBuffer new_keys, AnyBuffer new_values, Result<AnyBuffer> out_keys,
             Result<AnyBuffer> out_values, Result<Int32s> out_lengths) {
    return guarded([&] {
        const CacheBuffers cache(keys, table, lengths);
        const std::int64_t row = *index.typed_data();
        const std::int64_t count = new_keys.dimensions()[0];
        if (Error wrong = check_append(cache, row, count); wrong.failure()) return wrong;
        const std::int64_t length = cache.length(row);
        const std::int64_t first = length / cache.block_size();
        const auto write = [&](const AnyBuffer& from, const AnyBuffer& pool) {
            append_rows(cache.token(), cache.rows(bytes_of(pool), row, first),
                        length % cache.block_size(),
                        cache.tokens(static_cast<const std::byte*>(from.untyped_data())), count);
        };
        take_over(keys, *out_keys);
        take_over(values, *out_values);
        write(new_keys, *out_keys);
        write(new_values, *out_values);
        if (out_lengths->typed_data() != lengths.typed_data()) {
            std::copy_n(lengths.typed_data(), cache.batch(), out_lengths->typed_data());
        }
        out_lengths->typed_data()[row] = static_cast<std::int32_t>(length + count);
        return Error::Success();
    });
}

Error gather(AnyBuffer keys, AnyBuffer values, Int32s table, Int32s lengths, Int32s index,
             Result<AnyBuffer> out_keys, Result<AnyBuffer> out_values, Result<Int32s> out_length) {
    return guarded([&] {
        const CacheBuffers cache(keys, table, lengths);
        const std::int64_t row = *index.typed_data();
        if (Error wrong = cache.check_row(row); wrong.failure()) return wrong;
        const std::int64_t length = cache.length(row);
        const std::int64_t end = ceil_div(length, cache.block_size());
        if (Error wrong = cache.check_blocks(row, 0, end); wrong.failure()) return wrong;
        const auto read = [&](const AnyBuffer& pool, const AnyBuffer& to) {
            gather_rows(cache.token(),
                        cache.rows(static_cast<const std::byte*>(pool.untyped_data()), row), 0,
                        cache.tokens(bytes_of(to)), length);
            const auto used = static_cast<std::size_t>(length * cache.heads() * cache.head_bytes());
            std::memset(bytes_of(to) + used, 0, to.size_bytes() - used);
        };
        read(keys, *out_keys);
        read(values, *out_values);
        *out_length->typed_data() = static_cast<std::int32_t>(length);
        return Error::Success();
    });
}

}  // namespace

XLA_FFI_Error* append_handler(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(kHandler, append);
    return kHandler(frame);
}

XLA_FFI_Error* gather_handler(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(kHandler, gather);
    return kHandler(frame);
}

}  // namespace kvcore::jax
