// SPDX-License-Identifier: Apache-2.0
// The order of kernels by streams and events, calls that only enqueue work, and devices that do not
// exist.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kvcore/cuda.hpp"
#include "support/cuda_scene.hpp"

namespace tests::cuda::streams {

using cuda_scene::Bytes;
using cuda_scene::kDefault;
namespace cuda = kvcore::cuda;
namespace emulation = kvcore::cuda::emulation;

namespace {

/// Fills page 0 on one stream, copies it to page 1 on another, and returns a byte of page 1.
std::byte fill_and_copy(std::uint64_t seed, bool waits) {
    emulation::reset(1);
    emulation::set_order(emulation::Order::kAny, seed);
    cuda::Stream producer, consumer;
    cuda::Event event;
    CHECK_EQ(cuda::create_stream(0, &producer), cuda::kSuccess);
    CHECK_EQ(cuda::create_stream(0, &consumer), cuda::kSuccess);
    CHECK_EQ(cuda::create_event(0, &event), cuda::kSuccess);
    Bytes memory(128);
    const std::int64_t id = 0;
    const kvcore::PagePair pair{0, 1};
    const kvcore::PageBytes<std::byte> pool{memory.data(), 64, 64};
    CHECK_EQ(cuda::fill_pages(pool, 2, &id, 1, std::byte{9}, producer), cuda::kSuccess);
    CHECK_EQ(cuda::record(event, producer), cuda::kSuccess);
    if (waits) CHECK_EQ(cuda::wait(consumer, event), cuda::kSuccess);
    CHECK_EQ(cuda::copy_pages(pool, 2, &pair, 1, consumer), cuda::kSuccess);
    CHECK_EQ(cuda::synchronize(consumer), cuda::kSuccess);
    const std::byte arrived = memory[64];
    CHECK_EQ(cuda::synchronize(producer), cuda::kSuccess);
    return arrived;
}

TEST(events_order_kernels_of_two_streams) {
    emulation::reset(1);
    int wrong = 0;
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
        CHECK(fill_and_copy(seed, true) == std::byte{9});
        wrong += fill_and_copy(seed, false) != std::byte{9} ? 1 : 0;
    }
    CHECK(wrong > 0);  // without an event, some orders give a wrong byte
}

/// Every copying function on small sizes.
struct Calls {
    Bytes memory = Bytes(256, std::byte{1});
    Bytes rows = Bytes(64, std::byte{2});
    std::vector<std::int64_t> ids = {1};
    std::vector<std::int64_t> slots = {1};
    std::vector<std::int32_t> narrow_slots = {2};
    std::vector<kvcore::PagePair> pairs = {{0, 2}};
    std::vector<kvcore::PageStart> starts = {{0, 3, 1}};
    std::vector<std::uint32_t> table = {3};
    std::vector<std::uint32_t> offsets = {0, 1};
    std::vector<std::uint64_t> digests = {5};
    std::vector<cuda::TableEdit> edits = {{0, 0, 2}};
    void* to = memory.data() + 200;
    const void* from = rows.data();
    std::int64_t bytes = 8;

    [[nodiscard]] kvcore::PageBytes<std::byte> pages() { return {memory.data(), 64, 32}; }
    [[nodiscard]] kvcore::CacheView<std::byte> cache() {
        return {1, 2, 1, {memory.data(), nullptr, 64, 0, 16, 0, 16}, {}};
    }
    [[nodiscard]] kvcore::PoolView<std::byte> pool() {
        kvcore::PoolView<std::byte> view{4, 2, 1, {}, {}, {}};
        view.k = {memory.data(), kvcore::DType::kInt8, 16, 64, 16, 16, {}};
        return view;
    }
    [[nodiscard]] cuda::DeviceBatch batch() const {
        return {{table.data(), 1, 1, 1}, {nullptr, offsets.data()}, 1, 4};
    }

    using Call = std::function<cuda::Status(std::int64_t n, cuda::Stream stream)>;
    /// Each call has `n` items of work, or 1 item if `n` is not 0 or negative.
    std::vector<Call> all() {
        using N = std::int64_t;
        using S = cuda::Stream;
        const kvcore::TokenRows<const std::byte> k{rows.data(), 16, 16};
        return {
            [this, k](N n, S s) {
                return cuda::append_slots(pool(), k, {}, slots.data(), n, nullptr, s);
            },
            [this, k](N n, S s) {
                return cuda::append_slots(pool(), k, {}, narrow_slots.data(), n, nullptr, s);
            },
            [this, k](N n, S s) {
                cuda::DeviceBatch some = batch();
                some.num_tokens = n;
                return cuda::append_batch({1, 16}, {memory.data(), 64, 16, 16, 2, nullptr}, some, k,
                                          nullptr, s);
            },
            [this](N n, S s) {
                cuda::DeviceBatch some = batch();
                some.num_tokens = n;
                return cuda::gather_batch({1, 16}, {memory.data(), 64, 16, 16, 2, nullptr}, some,
                                          {rows.data(), 16, 16}, nullptr, s);
            },
            [this](N n, S s) { return cuda::copy_pages(pages(), 4, pairs.data(), n, s); },
            [this](N n, S s) {
                return cuda::fill_pages(pages(), 4, ids.data(), n, std::byte{3}, s);
            },
            [this](N n, S s) {
                return cuda::digest_pages({memory.data(), 64, 32}, 4, ids.data(), n, digests.data(),
                                          s);
            },
            [this](N n, S s) { return cuda::copy_partial(cache(), 4, starts.data(), n, s); },
            [this](N n, S s) {
                return cuda::transfer({1, 2, 1, {rows.data(), nullptr, 32, 0, 16, 0, 16}, {}},
                                      cache(), {2, 4}, pairs.data(), n, {0, 1}, 0, s);
            },
            [this](N n, S s) {
                return cuda::transfer({1, 2, 1, {rows.data(), nullptr, 32, 0, 16, 0, 16}, {}},
                                      cache(), {2, 4}, ids.data(), ids.data(), n, {0, 1}, 0, s);
            },
            [this](N n, S s) {
                return cuda::build_slots({table.data(), 1, 1, 1}, {nullptr, offsets.data()}, 2, 4,
                                         slots.data(), n, s);
            },
            [this](N n, S s) {
                return cuda::build_slots({table.data(), 1, 1, 1}, {nullptr, offsets.data()}, 2, 4,
                                         narrow_slots.data(), n, s);
            },
            [this](N n, S s) {
                return cuda::advance_lengths(table.data(), offsets.data(), nullptr, table.data(), n,
                                             s);
            },
            [this](N n, S s) {
                return cuda::compact_table({table.data(), 1, 1, n, nullptr, nullptr},
                                           offsets.data(), n, s);
            },
            [this](N n, S s) {
                return cuda::update_table(table.data(), 1, 1, 1, edits.data(), n, nullptr, s);
            },
            [this](N n, S s) { return cuda::copy_batch(&to, &from, &bytes, n, s); },
        };
    }
};

TEST(calls_only_enqueue_and_touch_no_memory) {
    emulation::reset(1);
    emulation::reset(1);
    emulation::set_order(emulation::Order::kAny, 1);
    Calls calls;
    const Bytes before = calls.memory;
    // The driver would copy at once from memory that is not pinned.
    for (Bytes* bytes : {&calls.memory, &calls.rows}) {
        CHECK_EQ(cuda::pin_memory(0, bytes->data(), cuda_scene::size_of(*bytes)), cuda::kSuccess);
    }
    for (const auto& call : calls.all()) {
        const std::int64_t waiting = emulation::num_waiting();
        CHECK_EQ(call(0, kDefault), cuda::kSuccess);
        CHECK_EQ(emulation::num_waiting(), waiting);
        CHECK_EQ(call(1, kDefault), cuda::kSuccess);
        CHECK(emulation::num_waiting() > waiting);
        CHECK(calls.memory == before);
    }
    CHECK(calls.digests[0] == 5 && calls.slots[0] == 1 && calls.table[0] == 3);
    CHECK_EQ(emulation::alive().allocations, 0);
    CHECK_EQ(cuda::synchronize(kDefault), cuda::kSuccess);
    CHECK(calls.memory != before);
    for (Bytes* bytes : {&calls.memory, &calls.rows}) {
        CHECK_EQ(cuda::unpin_memory(0, bytes->data()), cuda::kSuccess);
    }
}

TEST(invalid_calls_return_a_status) {
    emulation::reset(1);
    Calls calls;
    const Bytes before = calls.memory;
    emulation::reset(2);
    for (const auto& call : calls.all()) {
        CHECK_EQ(call(-1, {1, nullptr}), cuda::kInvalidCall);
        CHECK_EQ(call(1, {2, nullptr}), 101);
        CHECK_EQ(call(1, {-1, nullptr}), 101);
        CHECK_EQ(call(1, {0, &calls}), 400);
    }
    emulation::reset(0);
    for (const auto& call : calls.all()) {
        CHECK_EQ(call(1, kDefault), 35);
        CHECK_EQ(call(0, kDefault), cuda::kSuccess);
    }
    CHECK(calls.memory == before);
    calls.bytes = -1;
    CHECK_EQ(cuda::copy_batch(&calls.to, &calls.from, &calls.bytes, 1, kDefault),
             cuda::kInvalidCall);
}

}  // namespace

}  // namespace tests::cuda::streams
