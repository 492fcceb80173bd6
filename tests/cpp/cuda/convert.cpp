// SPDX-License-Identifier: Apache-2.0
// Tokens of a batch are converted into pools of another dtype and back by emulated lanes. The whole
// pool and the whole token memory must have the bytes of the CPU.
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "emulation/emulation.hpp"
#include "kvcore/cuda.hpp"
#include "support/conversion_scene.hpp"

namespace tests::cuda::convert {

namespace cuda = kvcore::cuda;
using conversion::Bytes;
using conversion::PoolMemory;
using conversion::Scene;
using conversion::TokenMemory;
using kvcore::DType;
using kvcore::Scales;

namespace {

constexpr cuda::Stream kStream{0, nullptr};

/// The source of a pool's scales.
enum class Kind : std::uint8_t { kFound, kGiven, kNone };

void append_and_gather(Random& random, const Scene& scene, DType wide, DType stored, Kind kind) {
    TokenMemory source(random, scene, wide);
    source.fill(random, scene, wide);
    PoolMemory expected(random, scene, stored);
    if (kind == Kind::kGiven) expected.fill_scales(random);
    PoolMemory pool = expected;
    const bool is_scaled = kind != Kind::kNone;
    const Scales scales = kind == Kind::kFound ? Scales::kFound : Scales::kGiven;
    std::int32_t bad = 5;
    kvcore::append_batch(scene.page_shape(), expected.view<std::byte>(is_scaled),
                         scene.page_table(), scene.ranges(), source.seen(), wide, scales);
    CHECK(cuda::append_batch(scene.page_shape(), pool.view<std::byte>(is_scaled),
                             scene.device_batch(), source.seen(), wide, scales, &bad,
                             kStream) == cuda::kSuccess);
    CHECK(pool.bytes() == expected.bytes());
    CHECK(pool.scales() == expected.scales());

    const DType back = random.pick(conversion::kWide);
    TokenMemory values(random, scene, back);
    TokenMemory found = values;
    kvcore::gather_batch(scene.page_shape(), expected.view<const std::byte>(is_scaled),
                         scene.page_table(), scene.ranges(), values.rows(), back);
    CHECK(cuda::gather_batch(scene.page_shape(), pool.view<const std::byte>(is_scaled),
                             scene.device_batch(), found.rows(), back, &bad,
                             kStream) == cuda::kSuccess);
    CHECK(found.bytes() == values.bytes());
    CHECK_EQ(bad, 5);
}

TEST(narrow_pools_have_the_cpu_s_bytes) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(63));
    for (int round = 0; round < 900; ++round) {
        const Scene scene(random);
        append_and_gather(random, scene, random.pick(conversion::kWide),
                          random.pick(conversion::kNarrow), static_cast<Kind>(random.below(3)));
    }
}

TEST(wide_pools_have_the_cpu_s_bytes) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(63));
    for (int round = 0; round < 300; ++round) {
        const Scene scene(random);
        append_and_gather(random, scene, random.pick(conversion::kWide),
                          random.pick(conversion::kWide), Kind::kNone);
    }
}

// K and V in one call: with equal or different group sizes, dtypes and alignments.
TEST(pairs_have_the_cpu_s_bytes) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(63));
    for (int round = 0; round < 400; ++round) {
        const Scene scene(random);
        Scene of_v = scene;
        if (random.chance(20)) of_v.groups = scene.groups % 3 + 1;
        if (random.chance(20)) of_v.is_aligned = !scene.is_aligned;
        const DType wide = random.pick(conversion::kWide);
        const DType k_dtype = random.pick(conversion::kNarrow);
        const DType v_dtype = random.chance(80) ? k_dtype : random.pick(conversion::kNarrow);
        const Scales scales = random.chance(50) ? Scales::kFound : Scales::kGiven;
        TokenMemory sources[] = {{random, scene, wide}, {random, of_v, wide}};
        PoolMemory expected[] = {{random, scene, k_dtype}, {random, of_v, v_dtype}};
        sources[0].fill(random, scene, wide);
        sources[1].fill(random, of_v, wide);
        if (scales == Scales::kGiven) {
            for (PoolMemory& pool : expected) pool.fill_scales(random);
        }
        PoolMemory pools[] = {expected[0], expected[1]};
        std::int32_t bad = 0;
        for (int i = 0; i < 2; ++i) {
            kvcore::append_batch(scene.page_shape(), expected[i].view<std::byte>(true),
                                 scene.page_table(), scene.ranges(), sources[i].seen(), wide,
                                 scales);
        }
        CHECK(cuda::append_batch(scene.page_shape(),
                                 {pools[0].view<std::byte>(true), pools[1].view<std::byte>(true)},
                                 scene.device_batch(), {sources[0].seen(), sources[1].seen()}, wide,
                                 scales, &bad, kStream) == cuda::kSuccess);
        const DType back = random.pick(conversion::kWide);
        TokenMemory values[] = {{random, scene, back}, {random, of_v, back}};
        TokenMemory found[] = {values[0], values[1]};
        for (int i = 0; i < 2; ++i) {
            kvcore::gather_batch(scene.page_shape(), expected[i].view<const std::byte>(true),
                                 scene.page_table(), scene.ranges(), values[i].rows(), back);
        }
        CHECK(cuda::gather_batch(
                  scene.page_shape(),
                  {pools[0].view<const std::byte>(true), pools[1].view<const std::byte>(true)},
                  scene.device_batch(), {found[0].rows(), found[1].rows()}, back, &bad,
                  kStream) == cuda::kSuccess);
        for (int i = 0; i < 2; ++i) {
            CHECK(pools[i].bytes() == expected[i].bytes());
            CHECK(pools[i].scales() == expected[i].scales());
            CHECK(found[i].bytes() == values[i].bytes());
        }
        CHECK_EQ(bad, 0);
    }
}

// Scales by head, or one scale for the tensor, are views with strides of 0.
TEST(scales_of_heads_serve_all_tokens) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(63));
    for (int round = 0; round < 100; ++round) {
        Scene scene(random);
        scene.group = scene.dim();
        scene.groups = 1;
        const DType wide = random.pick(conversion::kWide);
        const DType narrow = random.pick(conversion::kNarrow);
        TokenMemory source(random, scene, wide);
        source.fill(random, scene, wide);
        PoolMemory expected(random, scene, narrow);
        PoolMemory pool = expected;
        float factors[] = {0.03F, 0.5F, 2.0F};
        const auto seen = [&](PoolMemory& memory) {
            auto view = memory.view<std::byte>(false);
            view.scales = {reinterpret_cast<std::byte*>(factors), 0, 0, 4, scene.dim()};
            return view;
        };
        kvcore::append_batch(scene.page_shape(), seen(expected), scene.page_table(), scene.ranges(),
                             source.seen(), wide, Scales::kGiven);
        CHECK(cuda::append_batch(scene.page_shape(), seen(pool), scene.device_batch(),
                                 source.seen(), wide, Scales::kGiven, nullptr,
                                 kStream) == cuda::kSuccess);
        CHECK(pool.bytes() == expected.bytes());
        CHECK(factors[0] == 0.03F && factors[1] == 0.5F && factors[2] == 2.0F);
    }
}

// Pools without a scale tensor: each pool has one scale for all its codes.
TEST(pairs_have_a_scale_each) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(63));
    for (int round = 0; round < 100; ++round) {
        const Scene scene(random);
        const DType wide = random.pick(conversion::kWide);
        const DType k_dtype = random.pick(conversion::kNarrow);
        const DType v_dtype = random.chance(80) ? k_dtype : random.pick(conversion::kNarrow);
        TokenMemory sources[] = {{random, scene, wide}, {random, scene, wide}};
        PoolMemory expected[] = {{random, scene, k_dtype}, {random, scene, v_dtype}};
        PoolMemory pools[] = {expected[0], expected[1]};
        float factors[] = {0.03F, 2.0F};
        for (int i = 0; i < 2; ++i) {
            sources[i].fill(random, scene, wide);
            auto view = expected[i].view<std::byte>(false);
            view.scales = {reinterpret_cast<std::byte*>(factors + i), 0, 0, 0, scene.dim()};
            kvcore::append_batch(scene.page_shape(), view, scene.page_table(), scene.ranges(),
                                 sources[i].seen(), wide, Scales::kGiven);
        }
        CHECK(cuda::append_batch(scene.page_shape(),
                                 {pools[0].view<std::byte>(false), pools[1].view<std::byte>(false)},
                                 scene.device_batch(), {sources[0].seen(), sources[1].seen()}, wide,
                                 cuda::TensorPair<float>{factors[0], factors[1]}, nullptr,
                                 kStream) == cuda::kSuccess);
        for (int i = 0; i < 2; ++i) CHECK(pools[i].bytes() == expected[i].bytes());
        CHECK(cuda::append_batch(scene.page_shape(),
                                 {pools[0].view<std::byte>(true), pools[0].view<std::byte>(false)},
                                 scene.device_batch(), {sources[0].seen(), sources[1].seen()}, wide,
                                 cuda::TensorPair<float>{factors[0], factors[1]}, nullptr,
                                 kStream) == cuda::kInvalidCall);
    }
}

// A token without a page is counted once for all its heads and groups. The other tokens are
// written.
TEST(tokens_without_a_page_are_skipped_and_counted) {
    cuda::emulation::reset(1);
    constexpr std::int64_t kTokens = 5;
    constexpr std::int64_t kDim = 64;
    const std::vector<std::uint32_t> table{0, 9, 1};  // the pool has no page 9
    const std::vector<std::uint32_t> begin{1};
    const std::vector<std::uint32_t> offsets{0, kTokens};  // tokens 1 .. 5, two a page
    // Tokens 2 and 3 are in page 9. In a table of two columns, tokens 4 and 5 have no column.
    for (const std::int64_t width : {3, 2}) {
        std::vector<float> source(kTokens * 2 * kDim, 3.0F);
        Bytes pool(std::int64_t{4} * 2 * 2 * kDim, std::byte{0xff});
        Bytes expected = pool;
        for (const std::int64_t at : {std::int64_t{1}, std::int64_t{2}, std::int64_t{3}}) {
            if (width == 2 && at > 1) continue;  // entries of pages 0, 1, 1
            std::fill_n(expected.begin() + at * 2 * kDim, 2 * kDim, std::byte{3});
        }
        const kvcore::PagedTensor<std::byte> view{pool.data(), DType::kInt8, kDim, 4 * kDim,
                                                  2 * kDim,    kDim,         {}};
        std::int32_t bad = 0;
        CHECK(cuda::append_batch(
                  {2, 2}, view,
                  {{table.data(), 3, width, 1}, {begin.data(), offsets.data()}, kTokens, 4},
                  {reinterpret_cast<const std::byte*>(source.data()), 8 * kDim, 4 * kDim},
                  DType::kFloat32, Scales::kGiven, &bad, kStream) == cuda::kSuccess);
        CHECK(pool == expected);
        CHECK_EQ(bad, width == 3 ? 2 : 4);
        const kvcore::TokenRows<const std::byte> rows{
            reinterpret_cast<const std::byte*>(source.data()), 8 * kDim, 4 * kDim};
        CHECK(cuda::append_batch(
                  {2, 2}, {view, view},
                  {{table.data(), 3, width, 1}, {begin.data(), offsets.data()}, kTokens, 4},
                  {rows, rows}, DType::kFloat32, Scales::kGiven, &bad, kStream) == cuda::kSuccess);
        CHECK(pool == expected);
        CHECK_EQ(bad, width == 3 ? 4 : 8);
    }
}

/// Zero bytes that take no memory until they are written.
class Sparse {
   public:
    explicit Sparse(std::int64_t size)
        : size_(static_cast<std::size_t>(size)),
          memory_(mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
        CHECK(memory_ != MAP_FAILED);
    }
    ~Sparse() { munmap(memory_, size_); }
    Sparse(const Sparse&) = delete;
    Sparse& operator=(const Sparse&) = delete;

    [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(memory_); }

   private:
    std::size_t size_;
    void* memory_;
};

// Pages, source tokens and scales that start above 2^32 bytes.
TEST(offsets_do_not_wrap_around) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(63));
    constexpr std::int64_t kDim = 128;
    constexpr std::int64_t kFar = (std::int64_t{1} << 32) + 4096;
    const Sparse source(kFar + 4096);
    const Sparse pool(kFar + 4096);
    const Sparse scales(kFar + 4096);
    const std::uint32_t table[] = {1};
    const std::uint32_t offsets[] = {0, 2};
    conversion::fill_elements(random, DType::kBFloat16, source.data(), kDim);
    conversion::fill_elements(random, DType::kBFloat16, source.data() + kFar, kDim);
    const kvcore::PagedTensor<std::byte> view{
        pool.data(), DType::kInt8, kDim, kFar, kDim, 0, {scales.data(), kFar, 4, 0, kDim}};
    CHECK(cuda::append_batch({2, 1}, view, {{table, 1, 1, 1}, {nullptr, offsets}, 2, 2},
                             {source.data(), kFar, 0}, DType::kBFloat16, Scales::kFound, nullptr,
                             kStream) == cuda::kSuccess);
    Bytes codes(2 * kDim);
    for (const std::int64_t token : {0, 1}) {
        float scale = 0;
        kvcore::quantize(kvcore::Groups{1, kDim}, DType::kBFloat16, source.data() + token * kFar,
                         DType::kInt8, codes.data() + token * kDim, &scale);
        CHECK_EQ(read_element(DType::kFloat32, scales.data() + kFar + token * 4), scale);
    }
    CHECK(std::memcmp(pool.data() + kFar, codes.data(), codes.size()) == 0);
    const Bytes zeros(4096);
    CHECK(std::memcmp(pool.data(), zeros.data(), zeros.size()) == 0);
    CHECK(std::memcmp(scales.data(), zeros.data(), zeros.size()) == 0);
}

TEST(calls_run_in_stream_order_and_empty_calls_are_not_enqueued) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(63));
    Scene scene(random);
    while (scene.end() == 0 || scene.begin.empty()) scene = Scene(random);
    TokenMemory source(random, scene, DType::kFloat16);
    PoolMemory pool(random, scene, DType::kInt8);
    cuda::emulation::set_order(cuda::emulation::Order::kAny);
    const Bytes before = pool.bytes();
    CHECK(cuda::append_batch(scene.page_shape(), pool.view<std::byte>(true), scene.device_batch(),
                             source.seen(), DType::kFloat16, Scales::kFound, nullptr,
                             kStream) == cuda::kSuccess);
    CHECK_EQ(cuda::emulation::num_waiting(), 1);
    CHECK(pool.bytes() == before);
    source.fill(random, scene, DType::kFloat16);  // the kernel has not run yet
    CHECK(cuda::synchronize(kStream) == cuda::kSuccess);
    if (scene.end() > scene.offsets.front()) CHECK(pool.bytes() != before);
    cuda::DeviceBatch empty = scene.device_batch();
    empty.num_tokens = 0;
    CHECK(cuda::append_batch(scene.page_shape(), pool.view<std::byte>(true), empty, source.seen(),
                             DType::kFloat16, Scales::kFound, nullptr, kStream) == cuda::kSuccess);
    CHECK_EQ(cuda::emulation::num_waiting(), 0);
    cuda::emulation::set_order(cuda::emulation::Order::kAtOnce);
    const cuda::Stream elsewhere{2, nullptr};
    CHECK_EQ(
        cuda::append_batch(scene.page_shape(), pool.view<std::byte>(true), scene.device_batch(),
                           source.seen(), DType::kFloat16, Scales::kFound, nullptr, elsewhere),
        101);
}

}  // namespace

}  // namespace tests::cuda::convert
