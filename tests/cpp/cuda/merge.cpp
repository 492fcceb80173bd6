// SPDX-License-Identifier: Apache-2.0
// Merging by emulated lanes, out of place and in place: the result equals that of double precision,
// and the values of an empty state are not read.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "emulation/emulation.hpp"
#include "fakes/conversion_memory.hpp"
#include "kvcore/cuda.hpp"

namespace tests::cuda::merge {

namespace cuda = kvcore::cuda;
using conversion::Bytes;
using conversion::Guarded;
using kvcore::DType;

namespace {

constexpr cuda::Stream kStream{0, nullptr};
constexpr float kInfinite = std::numeric_limits<float>::infinity();

/// [n, dim] states. Some states are empty: their values are NaN and their LSE is -inf or +inf.
struct States {
    States(Random& random, std::int64_t n, std::int64_t dim, DType dtype)
        : values(n * dim * kvcore::item_size(dtype),
                 random.chance(50) ? 0 : random.below(16) * kvcore::item_size(dtype)) {
        for (std::int64_t i = 0; i < n; ++i) {
            const std::int64_t kind = random.below(6);
            lse.push_back(kind == 0   ? -kInfinite
                          : kind == 1 ? kInfinite
                                      : static_cast<float>(random.between(-90, 90)) / 7.0F +
                                            (random.chance(20) ? 1e4F : 0.0F));
            for (std::int64_t j = 0; j < dim; ++j) {
                const float value =
                    kind < 2 ? std::nanf("") : static_cast<float>(random.between(-99, 99)) / 60.0F;
                write_element(dtype, values.data() + (i * dim + j) * kvcore::item_size(dtype),
                              value);
            }
        }
    }
    [[nodiscard]] kvcore::AttentionStates view() { return {values.data(), lse.data()}; }

    Guarded values;
    std::vector<float> lse;
};

// Allows one rounding to the dtype, and a few roundings of float32 before it.
double tolerance(DType dtype, double value) {
    const double unit = dtype == DType::kFloat16 ? 0x1p-11 : dtype == DType::kBFloat16 ? 0x1p-8 : 0;
    return 4e-7 + std::fabs(value) * unit * 1.01;
}

void check_state(DType dtype, std::int64_t dim, const std::byte* a, float lse_a, const std::byte* b,
                 float lse_b, const std::byte* merged, float lse) {
    const bool has_a = !std::isinf(lse_a);
    const bool has_b = !std::isinf(lse_b);
    if (!has_a && !has_b) CHECK_EQ(lse, -kInfinite);
    const double most = has_a && (!has_b || lse_a > lse_b) ? lse_a : lse_b;
    const double of_a = has_a ? std::exp(lse_a - most) : 0;
    const double of_b = has_b ? std::exp(lse_b - most) : 0;
    const double sum = of_a + of_b;
    if (sum > 0) CHECK(std::fabs(lse - (most + std::log(sum))) <= 1e-6 + 1.2e-7 * std::fabs(most));
    for (std::int64_t j = 0; j < dim; ++j) {
        const std::int64_t at = j * kvcore::item_size(dtype);
        double expected = 0;
        if (has_a) expected += of_a / sum * read_element(dtype, a + at);
        if (has_b) expected += of_b / sum * read_element(dtype, b + at);
        const double value = read_element(dtype, merged + at);
        CHECK(std::fabs(value - expected) <= tolerance(dtype, expected));
    }
}

TEST(states_merge_as_in_double_precision) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(62));
    for (int round = 0; round < 200; ++round) {
        const DType dtype = random.pick(conversion::kWide);
        const std::int64_t item = kvcore::item_size(dtype);
        const std::int64_t n = random.below(60);
        const std::int64_t dim =
            random.chance(50) ? 8 * random.between(1, 70) : random.between(1, 300);
        States a(random, n, dim, dtype);
        States b(random, n, dim, dtype);
        const Bytes of_a = a.values.taken();
        const Bytes of_b = b.values.taken();
        const std::vector<float> lse_a = a.lse;
        const std::vector<float> lse_b = b.lse;
        States apart(random, n, dim, dtype);
        States& to = random.chance(50) ? a : apart;
        CHECK(cuda::merge_states(n, dim, dtype, a.view(), b.view(), to.values.data(), to.lse.data(),
                                 kStream) == cuda::kSuccess);
        for (std::int64_t i = 0; i < n; ++i) {
            const std::int64_t at = i * dim * item;
            const auto state = static_cast<std::size_t>(i);
            check_state(dtype, dim, of_a.data() + at, lse_a[state], of_b.data() + at, lse_b[state],
                        to.values.data() + at, to.lse[state]);
        }
        CHECK(b.values.taken() == of_b);
        for (const States* states : {&a, &b, &apart}) states->values.check();
    }
}

// The merge of two equal states is that state. A state with a negligible weight does not change the
// result.
TEST(extreme_weights_are_exact) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(62));
    for (const DType dtype : conversion::kWide) {
        States a(random, 1, 96, dtype);
        a.lse = {3.5F};
        for (std::int64_t j = 0; j < 96; ++j) {
            write_element(dtype, a.values.data() + j * kvcore::item_size(dtype), 0.25F);
        }
        States b = a;
        States to(random, 1, 96, dtype);
        CHECK(cuda::merge_states(1, 96, dtype, a.view(), b.view(), to.values.data(), to.lse.data(),
                                 kStream) == cuda::kSuccess);
        CHECK(to.values.taken() == a.values.taken());
        b.lse = {-3e4F};
        std::memset(b.values.data(), 0xff, b.values.taken().size());
        CHECK(cuda::merge_states(1, 96, dtype, a.view(), b.view(), to.values.data(), to.lse.data(),
                                 kStream) == cuda::kSuccess);
        CHECK(to.values.taken() == a.values.taken());
        CHECK_EQ(to.lse[0], 3.5F);
    }
}

TEST(empty_calls_are_not_enqueued) {
    cuda::emulation::reset(1);
    cuda::emulation::set_order(cuda::emulation::Order::kAny);
    CHECK(cuda::merge_states(0, 64, DType::kFloat16, {}, {}, nullptr, nullptr, kStream) == 0);
    CHECK_EQ(cuda::emulation::num_waiting(), 0);
    // A state without elements still has an LSE.
    const float lse_a = 1;
    const float lse_b = 1;
    float lse = 7;
    CHECK(cuda::merge_states(1, 0, DType::kFloat16, {nullptr, &lse_a}, {nullptr, &lse_b}, nullptr,
                             &lse, kStream) == 0);
    CHECK_EQ(lse, 7.0F);
    CHECK(cuda::synchronize(kStream) == cuda::kSuccess);
    CHECK(std::fabs(lse - 1.6931472F) <= 1e-6F);
    cuda::emulation::set_order(cuda::emulation::Order::kAtOnce);
    CHECK_EQ(cuda::merge_states(1, 0, DType::kFloat16, {nullptr, &lse_a}, {nullptr, &lse_b},
                                nullptr, &lse, {3, nullptr}),
             101);
}

}  // namespace

}  // namespace tests::cuda::merge
