// SPDX-License-Identifier: Apache-2.0
// Parts that all kernels use: division, alignment, grids, and chunks of copies.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "copy_body.hpp"
#include "copy_chunks.hpp"
#include "launch.hpp"
#include "support/cuda_scene.hpp"
#include "units.hpp"

namespace tests::cuda::launch {

using kvcore::cuda::alignment_of;
using kvcore::cuda::Divider;
using kvcore::cuda::Grid;
using kvcore::cuda::grid_for;

namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

void divide(std::int64_t dividend, std::int64_t divisor, const Divider& divider) {
    const std::int64_t quotient = divider.quotient(dividend);
    CHECK_EQ(quotient, dividend / divisor);
    CHECK_EQ(divider.remainder(dividend, quotient), dividend % divisor);
    if (dividend >= Divider::kSmall) return;
    const auto small = static_cast<std::uint32_t>(dividend);
    CHECK_EQ(std::int64_t{divider.small_quotient(small)}, dividend / divisor);
}

/// Divides numbers around multiples of the divisor: a wrong last bit of the multiplier shows at
/// these numbers.
void divide_at_edges(std::int64_t divisor, Random& random) {
    const Divider divider(divisor);
    CHECK_EQ(divider.divisor(), divisor);
    const std::int64_t most = kLargest / divisor;
    for (const std::int64_t times : {std::int64_t{0}, std::int64_t{1}, most / 2, most - 1, most,
                                     random.below(most), random.below(most)}) {
        const std::int64_t multiple = times < 0 ? 0 : times * divisor;
        divide(multiple, divisor, divider);
        if (multiple > 0) divide(multiple - 1, divisor, divider);
        if (multiple < kLargest) divide(multiple + 1, divisor, divider);
    }
    for (const std::int64_t dividend :
         {kLargest, kLargest - 1, std::int64_t{1} << 62, (std::int64_t{1} << 32) - 1,
          std::int64_t{1} << 31, (std::int64_t{1} << 31) - 1}) {
        divide(dividend, divisor, divider);
    }
    if (divisor >= Divider::kSmall) return;
    const std::int64_t last = (Divider::kSmall - 1) / divisor * divisor;
    divide(last, divisor, divider);
    divide(last - 1 + (last == 0), divisor, divider);
}

TEST(divisions_are_exact) {
    Random random(check::seed_or(61));
    for (std::int64_t divisor = 1; divisor <= 3000; ++divisor) divide_at_edges(divisor, random);
    for (int bits = 1; bits < 63; ++bits) {
        for (std::int64_t off = -2; off <= 2; ++off) {
            const std::int64_t divisor = (std::int64_t{1} << bits) + off;
            if (divisor > 0) divide_at_edges(divisor, random);
        }
    }
    for (const std::int64_t less : {0, 1, 2}) divide_at_edges(kLargest - less, random);
    for (int i = 0; i < 20000; ++i) {
        divide_at_edges(1 + random.below(std::int64_t{1} << random.between(1, 62)), random);
    }
}

TEST(alignments_are_the_largest_common_powers) {
    Random random(check::seed_or(61));
    CHECK_EQ(alignment_of(std::int64_t{0}), 16);
    CHECK_EQ(alignment_of(std::int64_t{-24}), 8);
    const std::byte memory[64] = {};
    for (int i = 0; i < 2000; ++i) {
        const std::byte* place = memory + random.below(64);
        const auto address = reinterpret_cast<std::uintptr_t>(place);
        const std::int64_t stride = random.between(-300, 300);
        std::int64_t expected = 16;
        while (address % static_cast<std::uintptr_t>(expected) != 0 || stride % expected != 0) {
            expected /= 2;
        }
        CHECK_EQ(alignment_of(place, stride), expected);
    }
    for (const std::int64_t bytes : {1, 2, 4, 8, 16}) {
        CHECK_EQ(kvcore::cuda::with_unit(
                     bytes, [](auto unit) { return static_cast<std::int64_t>(sizeof unit); }),
                 bytes);
    }
}

TEST(grids_cover_all_items_within_their_limits) {
    Random random(check::seed_or(61));
    const Grid none = grid_for(0);
    CHECK_EQ(none.blocks, 0);
    for (int i = 0; i < 20000; ++i) {
        const std::int64_t items = random.below(std::int64_t{1} << random.between(1, 62));
        const std::int64_t limit =
            random.chance(50) ? 0 : 1 + random.below(std::int64_t{1} << random.between(1, 40));
        const auto threads = static_cast<std::int32_t>(32 * random.between(1, 32));
        const Grid grid = grid_for(items, limit, threads);
        CHECK_EQ(grid.threads, threads);
        CHECK(grid.blocks <= kvcore::cuda::kMaxBlocks);
        CHECK(limit == 0 || grid.blocks <= limit);
        const bool is_limited = grid.blocks == kvcore::cuda::kMaxBlocks || grid.blocks == limit;
        CHECK(is_limited || grid.blocks * threads >= items);
        CHECK(grid.blocks == 0 || (grid.blocks - 1) * threads < items);
    }
}

TEST(every_lane_runs_once) {
    const Grid grid = grid_for(1000, 3, 96);
    std::vector<int> runs(static_cast<std::size_t>(grid.blocks * grid.threads));
    std::int64_t count = 0;
    kvcore::cuda::emulate(
        [&](kvcore::cuda::Lane lane) {
            ++runs[static_cast<std::size_t>(lane.index())];
            count = lane.count();
        },
        grid);
    CHECK(runs == std::vector<int>(288, 1));
    CHECK_EQ(count, 288);
}

TEST(shapes_are_merged_into_the_longest_runs) {
    using kvcore::cuda::CopyShape;
    const CopyShape whole = CopyShape{64, {16, 512, 512}, {8, 64, 64}}.merged();
    CHECK_EQ(whole.run, 64 * 8 * 16);
    CHECK_EQ(whole.outer.count * whole.inner.count, 1);
    const CopyShape rows = CopyShape{64, {16, 512, 700}, {8, 64, 64}}.merged();
    CHECK_EQ(rows.run, 512);
    CHECK_EQ(rows.outer.from, 700);
    // Heads outside tokens: one run, but only if the order of the tokens may change.
    const CopyShape heads{64, {16, 64, 64}, {8, 1024, 1024}};
    CHECK_EQ(heads.merged().run, 64);
    CHECK_EQ(heads.reordered().run, 64 * 8 * 16);
    const CopyShape across = CopyShape{64, {16, 64, 512}, {8, 1024, 64}}.reordered();
    CHECK_EQ(across.run, 64);
    CHECK_EQ(across.bytes(), 64 * 8 * 16);
}

/// The runs of all chunks together.
struct Issued {
    std::vector<void*> destinations;
    std::vector<std::size_t> bytes;
    int calls = 0;
};

TEST(empty_copies_are_left_out) {
    std::byte to[100];
    const std::byte from[100] = {};
    void* destinations[] = {to, to + 10, to + 50, to + 50};
    const void* sources[] = {from, from + 10, from + 51, from + 51};
    const std::int64_t bytes[] = {10, 10, 0, 10};
    Issued issued;
    const auto status = kvcore::cuda::for_each_chunk(
        destinations, sources, bytes, 4, [&](const kvcore::cuda::RunChunk& runs) {
            ++issued.calls;
            issued.destinations.assign(runs.destinations, runs.destinations + runs.count);
            issued.bytes.assign(runs.bytes, runs.bytes + runs.count);
            return kvcore::cuda::kSuccess;
        });
    CHECK_EQ(status, kvcore::cuda::kSuccess);
    CHECK_EQ(issued.calls, 1);
    CHECK(issued.destinations == (std::vector<void*>{to, to + 10, to + 50}));
    CHECK(issued.bytes == (std::vector<std::size_t>{10, 10, 10}));
}

TEST(copies_beyond_a_chunk_are_all_issued) {
    constexpr std::int64_t kCopies = 3 * kvcore::cuda::RunChunk::kCapacity + 5;
    std::vector<std::byte> to(kCopies * 2);
    std::vector<void*> destinations;
    std::vector<const void*> sources;
    const std::vector<std::int64_t> bytes(kCopies, 1);
    for (std::int64_t i = 0; i < kCopies; ++i) {
        destinations.push_back(to.data() + 2 * i);
        sources.push_back(to.data() + 2 * i + 1);
    }
    std::int64_t runs_found = 0;
    int calls = 0;
    const auto count = [&](kvcore::cuda::Status answer) {
        return [&runs_found, &calls, answer](const kvcore::cuda::RunChunk& runs) {
            runs_found += static_cast<std::int64_t>(runs.count);
            ++calls;
            return answer;
        };
    };
    CHECK_EQ(kvcore::cuda::for_each_chunk(destinations.data(), sources.data(), bytes.data(),
                                          kCopies, count(0)),
             0);
    CHECK_EQ(runs_found, kCopies);
    CHECK_EQ(calls, 4);
    CHECK_EQ(kvcore::cuda::for_each_chunk(destinations.data(), sources.data(), bytes.data(),
                                          kCopies, count(700)),
             700);
    CHECK_EQ(calls, 5);
}

}  // namespace

}  // namespace tests::cuda::launch
