// SPDX-License-Identifier: Apache-2.0
// Merging of attention states, and pages that several rows share and that are read once for all
// these rows.
#include <limits>

#include "fakes/conversion_memory.hpp"
#include "kvcore/attention.hpp"
#include "oracle/attention_run.hpp"

namespace tests::data::attention_merge {

using attention_case::Bytes;
using attention_case::Case;
using attention_case::Shape;
using kvcore::DType;

namespace {

using conversion::kWide;
constexpr float kInfinite = std::numeric_limits<float>::infinity();

struct States {
    Bytes values;
    std::vector<float> lse;
};

// Some states are empty: their values are NaN and their LSE is -inf or +inf.
States random_states(Random& random, std::int64_t n, std::int64_t dim, DType dtype) {
    const std::int64_t item = kvcore::item_size(dtype);
    States states{Bytes(static_cast<std::size_t>(n * dim * item), std::byte{255}), {}};
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t kind = random.below(5);
        states.lse.push_back(kind == 0   ? -kInfinite
                             : kind == 1 ? kInfinite
                                         : static_cast<float>(random.between(-90, 90)) / 7.0F +
                                               (random.chance(20) ? 1e4F : 0.0F));
        for (std::int64_t j = 0; j < dim && kind > 1; ++j) {
            write_element(dtype, states.values.data() + (i * dim + j) * item,
                          static_cast<float>(random.between(-100, 100)) / 60.0F);
        }
    }
    return states;
}

double weight_of(float lse, double most) {
    return std::isinf(lse) || std::isinf(most) ? 0 : std::exp(lse - most);
}

TEST(states_merge_as_in_double_precision) {
    Random random(check::seed_or(17));
    for (int round = 0; round < check::rounds(60); ++round) {
        const DType dtype = random.pick(kWide);
        const std::int64_t item = kvcore::item_size(dtype);
        const std::int64_t n = random.below(200);
        const std::int64_t dim = random.between(1, 130);
        const States a = random_states(random, n, dim, dtype);
        const States b = random_states(random, n, dim, dtype);
        States out[3] = {a, random_states(random, n, dim, dtype),
                         random_states(random, n, dim, dtype)};
        for (int i = 0; i < 3; ++i) {  // the first merge is in place
            const States& first = i == 0 ? out[0] : a;
            kvcore::merge_states(n, dim, dtype, {first.values.data(), first.lse.data()},
                                 {b.values.data(), b.lse.data()}, out[i].values.data(),
                                 out[i].lse.data(), 1 + i);
            CHECK(out[i].values == out[0].values);
            CHECK(out[i].lse == out[0].lse);
        }
        for (std::int64_t i = 0; i < n; ++i) {
            const float lse_a = a.lse[static_cast<std::size_t>(i)];
            const float lse_b = b.lse[static_cast<std::size_t>(i)];
            double most = -std::numeric_limits<double>::infinity();
            if (!std::isinf(lse_a)) most = lse_a;
            if (!std::isinf(lse_b) && lse_b > most) most = lse_b;
            const double of_a = weight_of(lse_a, most);
            const double of_b = weight_of(lse_b, most);
            const float lse = out[0].lse[static_cast<std::size_t>(i)];
            CHECK(of_a + of_b > 0 ? std::fabs(lse - (most + std::log(of_a + of_b))) <= 1e-3
                                  : lse == -kInfinite);
            for (std::int64_t j = 0; j < dim; ++j) {
                const std::int64_t at = (i * dim + j) * item;
                double expected = 0;
                if (of_a > 0) expected += of_a * read_element(dtype, a.values.data() + at);
                if (of_b > 0) expected += of_b * read_element(dtype, b.values.data() + at);
                if (of_a + of_b > 0) expected /= of_a + of_b;
                const double value = read_element(dtype, out[0].values.data() + at);
                CHECK(std::fabs(value - expected) <= attention_case::tolerance(dtype));
            }
        }
    }
}

// Groups of rows, nested or side by side, that share pages up to the end of the longest group.
TEST(shared_pages_are_read_once_for_all_rows) {
    Random random(check::seed_or(17));
    for (int round = 0; round < check::rounds(60); ++round) {
        Shape shape;
        shape.dtype = static_cast<DType>(random.below(3));
        shape.page_size = random.chance(50) ? 16 : 3;
        shape.group = random.between(1, 8);
        shape.key_dim = 40;
        shape.value_dim = 24;
        const std::int64_t rows = random.between(2, 9);
        const std::int64_t common = random.between(1, 40);
        shape.shared_tokens = common * shape.page_size;
        for (std::int64_t row = 0; row < rows; ++row) {
            shape.cached.push_back(
                static_cast<std::uint32_t>(shape.shared_tokens + random.below(50)));
            shape.added.push_back(
                static_cast<std::uint32_t>(random.chance(70) ? 1 : random.below(9)));
        }
        Case of(random, shape);
        of.rule().is_causal = random.chance(80);
        if (random.chance(40)) of.rule().window = random.between(1, 300);
        if (random.chance(30)) of.rule().chunk = random.between(1, 300);
        std::vector<float> sinks(static_cast<std::size_t>(of.query_heads()), 0.5F);
        if (random.chance(30)) of.rule().sinks = sinks.data();
        std::vector<std::int64_t> all;
        for (std::int64_t row = 0; row < rows; ++row) all.push_back(row);
        const std::vector<std::int64_t> front(all.begin(), all.begin() + rows / 2);
        const std::vector<std::int64_t> back(all.begin() + rows / 2, all.end());
        const std::int64_t outer = common / 2 * shape.page_size;
        of.shared() = {{back.data(), static_cast<std::int64_t>(back.size()), shape.shared_tokens}};
        if (!front.empty() && random.chance(50)) {
            of.shared().push_back({front.data(), static_cast<std::int64_t>(front.size()),
                                   shape.shared_tokens - shape.page_size});
        }
        if (random.chance(70)) of.shared().push_back({all.data(), rows, outer});
        check::note = "rows " + check::text(rows) + " common " + check::text(common) + " page " +
                      check::text(shape.page_size) + " window " + check::text(of.rule().window) +
                      " chunk " + check::text(of.rule().chunk);
        const attention_case::Result expected = of.expected();
        attention_case::check_all(of, expected);
        attention_case::check_close(of, expected, attention_case::run(of, {nullptr, 1, false}));
        const attention_case::Outcome outcome = attention_case::run(of, {});
        of.leave_behind();
        CHECK(outcome == attention_case::run(of, {}));
    }
}

}  // namespace

}  // namespace tests::data::attention_merge
