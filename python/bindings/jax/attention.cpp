// SPDX-License-Identifier: Apache-2.0
#include "kvcore/attention.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cache_buffers.hpp"
#include "handlers.hpp"

namespace kvcore::jax {
namespace {

using ffi::AnyBuffer;
using ffi::Error;
using ffi::Result;

/// Rows [first, first + count) of the table. The queries of each row are its last `new_tokens`
/// tokens.
struct Rows {
    std::int64_t first;
    std::int64_t count;
    std::int64_t new_tokens;
};

/// The vectors of each head of every token of a C-contiguous array [tokens, heads, dim].
template <class Byte>
HeadVectors<Byte> head_vectors(const AnyBuffer& buffer, std::int64_t first_token) {
    const auto shape = buffer.dimensions();
    const DType dtype = dtype_of(buffer);
    const std::int64_t head = shape[2] * item_size(dtype);
    Byte* data = bytes_of(buffer) + first_token * shape[1] * head;
    return {data, dtype, shape[1], shape[1] * head, head};
}

PagedTensor<const std::byte> tensor_of(const CacheBuffers& cache, const AnyBuffer& pool) {
    const auto rows = cache.rows(static_cast<const std::byte*>(pool.untyped_data()), 0);
    return {rows.data,         dtype_of(pool),   cache.dim(), rows.block_stride,
            rows.token_stride, rows.head_stride, {}};
}

Error check_rows(const CacheBuffers& cache, const Rows& rows, const AttentionRule& rule) {
    for (std::int64_t row = rows.first; row < rows.first + rows.count; ++row) {
        if (Error wrong = cache.check_row(row); wrong.failure()) return wrong;
        const std::int64_t length = cache.length(row);
        if (length < rows.new_tokens) {
            return refusal("row ", row, " has ", length, " tokens, queries of its last ",
                           rows.new_tokens, " are given; append their K and V first");
        }
        const std::int64_t seen = first_seen(rule, length - rows.new_tokens);
        const Error wrong = cache.check_blocks(row, seen / cache.block_size(),
                                               ceil_div(length, cache.block_size()));
        if (wrong.failure()) return wrong;
    }
    return Error::Success();
}

/// Computes attention for rows that have all their tokens; `token` is the first token of the rows
/// in queries and results.
Error attend(const CacheBuffers& cache, const AnyBuffer& keys, const AnyBuffer& values,
             const AnyBuffer& queries, const AnyBuffer& out, const Rows& rows, std::int64_t token,
             const AttentionRule& rule, int threads) {
    if (Error wrong = check_rows(cache, rows, rule); wrong.failure()) return wrong;
    std::vector<std::uint32_t> cached;
    std::vector<std::uint32_t> offsets{0};
    for (std::int64_t row = rows.first; row < rows.first + rows.count; ++row) {
        cached.push_back(static_cast<std::uint32_t>(cache.length(row) - rows.new_tokens));
        offsets.push_back(offsets.back() + static_cast<std::uint32_t>(rows.new_tokens));
    }
    // As uint32 an unused entry, -1, is the largest number. No query reads its page.
    const auto* table = reinterpret_cast<const std::uint32_t*>(cache.blocks(rows.first));
    const AttentionInput input{{cache.num_blocks(),
                                cache.block_size(),
                                cache.heads(),
                                tensor_of(cache, keys),
                                tensor_of(cache, values),
                                {}},
                               {table, cache.columns(), cache.columns(), rows.count},
                               cached.data(),
                               offsets.data(),
                               head_vectors<const std::byte>(queries, token),
                               rule};
    const AttentionOutput output{head_vectors<std::byte>(out, token), nullptr};
    const auto bytes = static_cast<std::size_t>(attention_workspace_bytes(input, threads));
    const std::unique_ptr<std::byte[]> scratch(new std::byte[bytes]);
    attention(input, output, scratch.get(), threads);
    return Error::Success();
}

/// Computes a query for each row of the table. The result of a row without tokens is zero.
Error attend_batch(const CacheBuffers& cache, const AnyBuffer& keys, const AnyBuffer& values,
                   const AnyBuffer& queries, const AnyBuffer& out, const AttentionRule& rule,
                   int threads) {
    std::memset(out.untyped_data(), 0, out.size_bytes());
    std::int64_t row = 0;
    while (row < cache.batch()) {
        const std::int64_t first = row;
        while (row < cache.batch() && cache.length(row) != 0) ++row;
        if (row > first) {
            Error wrong = attend(cache, keys, values, queries, out, {first, row - first, 1}, first,
                                 rule, threads);
            if (wrong.failure()) return wrong;
        }
        if (row < cache.batch()) ++row;
    }
    return Error::Success();
}

Error attend_call(AnyBuffer keys, AnyBuffer values, Int32s table, Int32s lengths, Int32s index,
                  AnyBuffer queries, Result<AnyBuffer> out, bool is_batch, double scale,
                  std::int64_t window, double soft_cap, std::int64_t threads) {
    return guarded([&] {
        const CacheBuffers cache(keys, table, lengths);
        AttentionRule rule;
        rule.scale = static_cast<float>(scale);
        rule.window = window;
        rule.soft_cap = static_cast<float>(soft_cap);
        const int workers = static_cast<int>(threads);
        if (is_batch) return attend_batch(cache, keys, values, queries, *out, rule, workers);
        const std::int64_t row = *index.typed_data();
        const std::int64_t count = queries.dimensions()[0];
        if (Error wrong = cache.check_row(row); wrong.failure() || count == 0) return wrong;
        return attend(cache, keys, values, queries, *out, {row, 1, count}, 0, rule, workers);
    });
}

}  // namespace

XLA_FFI_Error* attention_handler(XLA_FFI_CallFrame* frame) {
    XLA_FFI_DEFINE_HANDLER(kHandler, attend_call,
                           ffi::Ffi::Bind()
                               .Arg<AnyBuffer>()
                               .Arg<AnyBuffer>()
                               .Arg<Int32s>()
                               .Arg<Int32s>()
                               .Arg<Int32s>()
                               .Arg<AnyBuffer>()
                               .Ret<AnyBuffer>()
                               .Attr<bool>("is_batch")
                               .Attr<double>("scale")
                               .Attr<std::int64_t>("window")
                               .Attr<double>("soft_cap")
                               .Attr<std::int64_t>("threads"));
    return kHandler(frame);
}

}  // namespace kvcore::jax
