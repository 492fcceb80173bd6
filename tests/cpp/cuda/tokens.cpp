// SPDX-License-Identifier: Apache-2.0
// Tokens moved by slots and by batches, by emulated lanes: the whole pool must equal the CPU's pool
// for every alignment. Covers padding, bad slots and missing pages.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulation/emulation.hpp"
#include "kvcore/cuda.hpp"
#include "support/cuda_scene.hpp"

namespace tests::cuda::tokens {

using cuda_scene::Bytes;
using cuda_scene::kDefault;
using cuda_scene::random_alignment;
using cuda_scene::random_bytes;
using cuda_scene::random_dim;
using cuda_scene::random_page_size;
using cuda_scene::round_up;
using cuda_scene::shuffled;
using cuda_scene::size_of;
using kvcore::DType;
using kvcore::PagedTensor;
using kvcore::PoolView;
namespace cuda = kvcore::cuda;

namespace {

/// A layer of K, and sometimes V, with gaps. In all memory of its size, it starts at the same
/// offset.
struct Layer {
    explicit Layer(Random& random) : alignment(random_alignment(random)) {
        view.pages = random.between(1, 6);
        view.page_size = random_page_size(random);
        view.heads = random.between(1, 5);
        const auto dtype = static_cast<DType>(random.below(kvcore::kNumDTypes));
        first_k = random.below(4) * alignment;
        first_v = lay_out(random, view.k, dtype, first_k);
        size = first_v + 64;
        if (random.chance(75)) size = lay_out(random, view.v, dtype, first_v) + 64;
    }

    /// Returns the offset of the first byte after a tensor that starts at `first`.
    std::int64_t lay_out(Random& random, PagedTensor<std::byte>& tensor, DType dtype,
                         std::int64_t first) const {
        const bool is_hnd = random.chance(40);
        tensor.dtype = dtype;
        tensor.dim = random_dim(random);
        const std::int64_t dense = tensor.dim * kvcore::item_size(dtype);
        const std::int64_t row = random.chance(60) ? dense : round_up(dense, alignment);
        const std::int64_t gap = random.below(3) * alignment;
        tensor.head_stride = is_hnd ? row * view.page_size + gap : row;
        tensor.token_stride = is_hnd ? row : row * view.heads + gap;
        tensor.page_stride = round_up(
            (is_hnd ? tensor.head_stride * view.heads : tensor.token_stride * view.page_size),
            alignment);
        return first + tensor.page_stride * view.pages + gap;
    }

    [[nodiscard]] PoolView<std::byte> at(Bytes& memory) const {
        PoolView<std::byte> found = view;
        found.k.data = memory.data() + first_k;
        found.v.data = memory.data() + first_v;
        return found;
    }

    std::int64_t alignment;
    PoolView<std::byte> view;
    std::int64_t first_k = 0;
    std::int64_t first_v = 0;
    std::int64_t size = 0;
};

/// Slots of a layer, each at most once, mixed with padding and with slots out of range.
template <class Slot>
std::vector<Slot> random_slots(Random& random, std::int64_t capacity) {
    std::vector<Slot> slots;
    for (const Slot slot : shuffled<Slot>(random, capacity)) {
        if (random.chance(60)) slots.push_back(slot);
        if (random.chance(10)) slots.push_back(static_cast<Slot>(-1 - random.below(9)));
        if (random.chance(10)) slots.push_back(static_cast<Slot>(capacity + random.below(9)));
    }
    return slots;
}

template <class Slot>
void tokens_go_to_the_cpu_s_slots(Random& random) {
    for (int i = 0; i < 400; ++i) {
        const Layer layer(random);
        const auto slots = random_slots<Slot>(random, layer.view.pages * layer.view.page_size);
        const std::int64_t n = size_of(slots);
        // Fused rows: keys and values of all heads, and other data after them.
        const std::int64_t item = kvcore::item_size(layer.view.k.dtype);
        const std::int64_t k_head = layer.view.k.dim * item;
        const std::int64_t v_head = layer.view.v.dim * item;
        const std::int64_t of_k = round_up(layer.view.heads * k_head, layer.alignment);
        const std::int64_t fused =
            round_up(of_k + layer.view.heads * v_head + random.below(9), layer.alignment);
        const std::int64_t shift = random.below(3) * layer.alignment;
        const Bytes rows = random_bytes(random, shift + fused * (n + 2));
        const kvcore::TokenRows<const std::byte> k{rows.data() + shift, fused, k_head};
        const kvcore::TokenRows<const std::byte> v{rows.data() + shift + of_k, fused, v_head};

        Bytes found = random_bytes(random, layer.size);
        Bytes expected = found;
        const std::int64_t beyond = kvcore::append_slots(layer.at(expected), k, v, slots.data(), n);
        std::int32_t bad = 5;
        const bool counts = random.chance(80);
        CHECK_EQ(cuda::append_slots(layer.at(found), k, v, slots.data(), n, counts ? &bad : nullptr,
                                    kDefault),
                 cuda::kSuccess);
        CHECK_EQ(bad, counts ? 5 + beyond : 5);
        CHECK(found == expected);
    }
}

TEST(bad_slots_are_counted_once_even_without_bytes) {
    cuda::emulation::reset(1);
    PoolView<std::byte> pool{2, 4, 0, {}, {}, {}};
    pool.k.dim = 8;
    const std::vector<std::int64_t> slots = {0, 8, -1, 9, 7};
    std::int32_t bad = 0;
    CHECK_EQ(
        cuda::append_slots(pool, {nullptr, 0, 0}, {nullptr, 0, 0}, slots.data(), 5, &bad, kDefault),
        cuda::kSuccess);
    CHECK_EQ(bad, 2);
    // Rows that many teams copy together.
    Bytes memory(std::size_t{1} << 20);
    const Bytes row(std::size_t{1} << 16);
    pool.heads = 1;
    pool.k = {memory.data(), DType::kFloat16, 1 << 15, 1 << 18, 1 << 16, 1 << 16, {}};
    CHECK_EQ(cuda::append_slots(pool, {row.data(), 0, 0}, {nullptr, 0, 0}, slots.data(), 4, &bad,
                                kDefault),
             cuda::kSuccess);
    CHECK_EQ(bad, 4);
}

/// A batch over a pool [pages, page_size, heads, head_bytes]. Some columns have no page, and some
/// tokens are past the end of the table.
struct Batch {
    explicit Batch(Random& random)
        : alignment(random_alignment(random)),
          page_size(random_page_size(random)),
          shape{random.between(1, 5), random_dim(random)},
          batch(random.chance(4) ? random.below(120) : random.below(9)),
          is_even(random.chance(30)) {
        const std::int64_t of_all = random.below(3 * page_size);
        offsets.push_back(static_cast<std::uint32_t>(random.chance(20) ? random.below(4) : 0));
        const auto pages = shuffled<std::uint32_t>(random, batch * kWidth);
        num_pages = batch * kWidth + 1;
        for (std::int64_t row = 0; row < batch; ++row) {
            begin.push_back(static_cast<std::uint32_t>(random.below(2 * page_size)));
            const std::int64_t of_row = random.chance(20) ? 0 : random.below(3 * page_size);
            const std::int64_t added = is_even ? of_all : of_row;
            offsets.push_back(offsets.back() + static_cast<std::uint32_t>(added));
            for (std::int64_t column = 0; column < kWidth; ++column) {
                const std::uint32_t page = pages[static_cast<std::size_t>(row * kWidth + column)];
                const auto none = static_cast<std::uint32_t>(num_pages + random.below(3));
                // A window may have given up the pages before the tokens.
                const bool is_behind = (column + 1) * page_size <= begin.back();
                table.push_back(random.chance(is_behind ? 50 : 5) ? none : page);
            }
            table.push_back(0xffffffffU);  // padding of the table, not a column
        }
        num_tokens = offsets.back() + random.below(5);
        head_stride = random.chance(60) ? shape.head_bytes : round_up(shape.head_bytes, alignment);
        const std::int64_t gap = random.below(3) * alignment;
        token_stride = round_up(head_stride * shape.heads, alignment) + gap;
        page_stride = token_stride * page_size + gap;
        if (random.chance(40)) {  // heads outside tokens
            token_stride = round_up(shape.head_bytes, alignment);
            head_stride = token_stride * page_size + gap;
            page_stride = head_stride * shape.heads + gap;
        }
        row_head = random.chance(70) ? shape.head_bytes : round_up(shape.head_bytes, alignment);
        row_stride = round_up(row_head * shape.heads, alignment) + random.below(2) * alignment;
        has_begin = random.chance(80);
    }

    static constexpr std::int64_t kWidth = 4;

    [[nodiscard]] cuda::DeviceBatch view() const {
        return {{table.data(), kWidth + 1, kWidth, batch},
                {has_begin ? begin.data() : nullptr, offsets.data()},
                num_tokens,
                num_pages};
    }
    /// Calls visit(token, byte of the pool or -1) for all tokens and returns the number of tokens
    /// without a page.
    template <class Visit>
    std::int64_t for_each_token(const Visit& visit) const {
        std::int64_t missing = 0;
        for (std::int64_t row = 0; row < batch; ++row) {
            const auto i = static_cast<std::size_t>(row);
            for (std::int64_t at = offsets[i]; at < offsets[i + 1]; ++at) {
                const std::int64_t token = (has_begin ? begin[i] : 0) + at - offsets[i];
                const std::int64_t column = token / page_size;
                const std::int64_t page =
                    column < kWidth ? table[i * (kWidth + 1) + static_cast<std::size_t>(column)]
                                    : num_pages;
                if (page >= num_pages) {
                    ++missing;
                    continue;
                }
                visit(at, page * page_stride + token % page_size * token_stride);
            }
        }
        return missing;
    }
    [[nodiscard]] std::int64_t pool_bytes() const { return num_pages * page_stride + 64; }
    [[nodiscard]] std::int64_t rows_bytes() const {
        return std::max<std::int64_t>(1, num_tokens) * row_stride;
    }
    /// Copies a token head by head, byte by byte.
    void copy(std::byte* to, std::int64_t to_head, const std::byte* from,
              std::int64_t from_head) const {
        for (std::int64_t head = 0; head < shape.heads; ++head) {
            std::copy_n(from + head * from_head, shape.head_bytes, to + head * to_head);
        }
    }

    std::int64_t alignment;
    std::int64_t page_size;
    kvcore::TokenShape shape;
    std::int64_t batch;
    bool is_even;  // all rows have the same length
    std::int64_t num_pages = 0;
    std::int64_t num_tokens = 0;
    std::int64_t head_stride = 0;
    std::int64_t token_stride = 0;
    std::int64_t page_stride = 0;
    std::int64_t row_head = 0;
    std::int64_t row_stride = 0;
    bool has_begin = true;
    std::vector<std::uint32_t> table;
    std::vector<std::uint32_t> begin;
    std::vector<std::uint32_t> offsets;
};

TEST(batches_write_where_single_tokens_write) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(62));
    for (int i = 0; i < 600; ++i) {
        const Batch batch(random);
        const std::int64_t shift = random.below(3) * batch.alignment;
        Bytes rows = random_bytes(random, batch.rows_bytes());
        Bytes found = random_bytes(random, batch.pool_bytes());
        Bytes expected = found;
        const std::int64_t missing =
            batch.for_each_token([&](std::int64_t at, std::int64_t in_pool) {
                batch.copy(expected.data() + shift + in_pool, batch.head_stride,
                           rows.data() + at * batch.row_stride, batch.row_head);
            });
        std::int32_t bad = 1;
        CHECK_EQ(cuda::append_batch(batch.shape,
                                    {found.data() + shift, batch.page_stride, batch.token_stride,
                                     batch.head_stride, batch.page_size, nullptr},
                                    batch.view(), {rows.data(), batch.row_stride, batch.row_head},
                                    &bad, kDefault),
                 cuda::kSuccess);
        CHECK(found == expected);
        CHECK_EQ(bad, 1 + missing);

        Bytes gathered = random_bytes(random, batch.rows_bytes());
        Bytes rows_expected = gathered;
        batch.for_each_token([&](std::int64_t at, std::int64_t in_pool) {
            batch.copy(rows_expected.data() + at * batch.row_stride, batch.row_head,
                       found.data() + shift + in_pool, batch.head_stride);
        });
        CHECK_EQ(
            cuda::gather_batch(batch.shape,
                               {found.data() + shift, batch.page_stride, batch.token_stride,
                                batch.head_stride, batch.page_size, nullptr},
                               batch.view(), {gathered.data(), batch.row_stride, batch.row_head},
                               random.chance(50) ? &bad : nullptr, kDefault),
            cuda::kSuccess);
        CHECK(gathered == rows_expected);
        CHECK(found == expected);
    }
}

/// Moves the rows of one batch from or to a pool. Memory of equal size has equal offsets.
template <class Byte, class RowByte>
cuda::TokenMove<Byte, RowByte> move_of(const Batch& batch, Byte* pool, RowByte* rows) {
    return {
        batch.shape,
        {pool, batch.page_stride, batch.token_stride, batch.head_stride, batch.page_size, nullptr},
        {rows, batch.row_stride, batch.row_head}};
}

TEST(pairs_move_like_two_single_calls) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(62));
    for (int i = 0; i < 200; ++i) {
        const Batch batch(random);
        const std::int64_t apart = random.chance(60) ? 0 : 2;  // 2: V has another alignment than K
        const Bytes k = random_bytes(random, batch.rows_bytes());
        const Bytes v = random_bytes(random, batch.rows_bytes() + apart);
        Bytes k_pool = random_bytes(random, batch.pool_bytes());
        Bytes v_pool = random_bytes(random, batch.pool_bytes() + apart);
        Bytes k_expected = k_pool;
        Bytes v_expected = v_pool;
        const std::int64_t missing =
            batch.for_each_token([&](std::int64_t at, std::int64_t in_pool) {
                batch.copy(k_expected.data() + in_pool, batch.head_stride,
                           k.data() + at * batch.row_stride, batch.row_head);
                batch.copy(v_expected.data() + apart + in_pool, batch.head_stride,
                           v.data() + apart + at * batch.row_stride, batch.row_head);
            });
        std::int32_t bad = 1;
        CHECK_EQ(cuda::append_batch(move_of(batch, k_pool.data(), k.data()),
                                    move_of(batch, v_pool.data() + apart, v.data() + apart),
                                    batch.view(), &bad, kDefault),
                 cuda::kSuccess);
        CHECK(k_pool == k_expected);
        CHECK(v_pool == v_expected);
        CHECK_EQ(bad, 1 + missing);

        Bytes k_out(k.size());
        Bytes v_out(v.size());
        Bytes k_rows = k_out;
        Bytes v_rows = v_out;
        batch.for_each_token([&](std::int64_t at, std::int64_t in_pool) {
            batch.copy(k_rows.data() + at * batch.row_stride, batch.row_head,
                       k_pool.data() + in_pool, batch.head_stride);
            batch.copy(v_rows.data() + apart + at * batch.row_stride, batch.row_head,
                       v_pool.data() + apart + in_pool, batch.head_stride);
        });
        const std::byte* of_k = k_pool.data();
        const std::byte* of_v = v_pool.data() + apart;
        CHECK_EQ(cuda::gather_batch(move_of(batch, of_k, k_out.data()),
                                    move_of(batch, of_v, v_out.data() + apart), batch.view(), &bad,
                                    kDefault),
                 cuda::kSuccess);
        CHECK(k_out == k_rows);
        CHECK(v_out == v_rows);
        CHECK_EQ(bad, 1 + 2 * missing);
    }
}

TEST(pairs_move_in_one_launch) {
    cuda::emulation::reset(1);
    constexpr std::int64_t kBytes = 256;
    Bytes pools(4 * kBytes);
    const Bytes rows(4 * kBytes);
    const std::uint32_t pages[] = {0};
    const std::uint32_t offsets[] = {0, 1};
    const cuda::DeviceBatch batch{{pages, 1, 1, 1}, {nullptr, offsets}, 1, 1};
    const auto move = [&](std::int64_t at, std::int64_t page_size) {
        return cuda::TokenMove<std::byte, const std::byte>{
            {1, kBytes},
            {pools.data() + at, kBytes, kBytes, kBytes, page_size, nullptr},
            {rows.data() + at, kBytes, kBytes}};
    };
    CHECK_EQ(cuda::append_batch(move(0, 1), move(kBytes, 2), batch, nullptr, kDefault),
             cuda::kInvalidCall);
    cuda::emulation::set_order(cuda::emulation::Order::kAny);
    CHECK_EQ(cuda::append_batch(move(0, 1), move(kBytes, 1), batch, nullptr, kDefault),
             cuda::kSuccess);
    CHECK_EQ(cuda::emulation::num_waiting(), 1);
    // Units of two bytes would also be slow for K, so V gets its own launch.
    CHECK_EQ(cuda::append_batch(move(0, 1), move(kBytes + 2, 1), batch, nullptr, kDefault),
             cuda::kSuccess);
    CHECK_EQ(cuda::emulation::num_waiting(), 3);
    cuda::emulation::set_order(cuda::emulation::Order::kAtOnce);
}

TEST(tokens_go_to_the_cpu_s_slots) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(62));
    tokens_go_to_the_cpu_s_slots<std::int64_t>(random);
    tokens_go_to_the_cpu_s_slots<std::int32_t>(random);
}

}  // namespace

}  // namespace tests::cuda::tokens
