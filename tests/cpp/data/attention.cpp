// SPDX-License-Identifier: Apache-2.0
// Attention over pages against double precision: layouts, dtypes, scales, windows, chunks, logit
// caps and sinks.
#include <algorithm>
#include <cstdlib>

#include "data/attention/plan.hpp"
#include "fakes/conversion_memory.hpp"
#include "fakes/sparse_copy.hpp"
#include "oracle/attention_run.hpp"

namespace tests::data::attention {

using attention_case::Case;
using attention_case::Layout;
using attention_case::Scaling;
using attention_case::Shape;
using kvcore::DType;

namespace {

using conversion::kWide;

Shape random_shape(Random& random) {
    Shape shape;
    constexpr std::int64_t kPageSizes[] = {1, 3, 16, 24, 48};
    constexpr std::int64_t kGroups[] = {1, 2, 3, 4, 5, 6, 7, 8, 16};
    constexpr std::int64_t kDims[] = {8, 59, 64, 80, 96, 112, 128};
    shape.dtype = static_cast<DType>(random.below(kvcore::kNumDTypes));
    shape.query_dtype = random.pick(kWide);
    shape.layout = random.chance(50) ? Layout::kTokensFirst : Layout::kHeadsFirst;
    shape.page_size = kPageSizes[random.below(5)];
    shape.heads = random.between(1, 3);
    shape.group = kGroups[random.below(9)];
    shape.key_dim = kDims[random.below(7)];
    shape.value_dim = random.chance(60) ? shape.key_dim : kDims[random.below(7)];
    if (!(kvcore::item_size(shape.dtype) > 1))
        shape.scaling = static_cast<Scaling>(random.below(5));
    if (random.chance(20)) {
        shape.layout = static_cast<Layout>(random.between(2, 4));
        shape.heads = 1;
        shape.key_dim = 64;
        shape.rope_dim = random.chance(50) ? 16 : 24;
        shape.value_dim = random.chance(50) ? 64 : 48;
        shape.scaling = Scaling::kNone;
        if (shape.layout == Layout::kInlineScales) {
            shape.dtype = random.chance(50) ? DType::kFloat8E4M3FN : DType::kInt8;
        }
    }
    for (std::int64_t rows = random.below(5); rows > 0; --rows) {
        shape.cached.push_back(
            static_cast<std::uint32_t>(random.chance(20) ? 0 : random.below(200)));
        shape.added.push_back(static_cast<std::uint32_t>(random.chance(50) ? 1
                                                         : random.chance(20)
                                                             ? 0
                                                             : random.between(2, 20)));
    }
    return shape;
}

std::string text(const Shape& shape) {
    return "dtype " + check::text(shape.dtype) + " query " + check::text(shape.query_dtype) +
           " layout " + check::text(shape.layout) + " scaling " + check::text(shape.scaling) +
           " page " + check::text(shape.page_size) + " heads " + check::text(shape.heads) + "x" +
           check::text(shape.group) + " dims " + check::text(shape.key_dim) + "+" +
           check::text(shape.rope_dim) + "/" + check::text(shape.value_dim) + " cached " +
           check::text(shape.cached) + " added " + check::text(shape.added);
}

void draw_rule(Random& random, Case& of, std::vector<float>& sinks) {
    kvcore::AttentionRule& rule = of.rule();
    rule.is_causal = random.chance(75);
    if (random.chance(40)) rule.window = random.between(1, 100);
    if (random.chance(30)) rule.chunk = random.between(1, 100);
    if (random.chance(30)) rule.soft_cap = static_cast<float>(random.between(1, 20));
    if (random.chance(30)) {
        for (std::int64_t head = 0; head < of.query_heads(); ++head) {
            sinks.push_back(static_cast<float>(random.between(-30, 30)) / 10.0F);
        }
        rule.sinks = sinks.data();
    }
}

TEST(random_batches_equal_double_precision) {
    Random random(check::seed_or(4));
    for (int i = 0; i < check::rounds(250); ++i) {
        const Shape shape = random_shape(random);
        check::note = text(shape);
        Case of(random, shape);
        std::vector<float> sinks;
        draw_rule(random, of, sinks);
        const attention_case::Result expected = of.expected();
        attention_case::check_all(of, expected);
        const attention_case::Outcome outcome = attention_case::run(of, {nullptr, 1, true, false});
        CHECK(outcome.values == attention_case::run(of, {}).values);
        of.leave_behind();
        attention_case::check_all(of, expected);
        CHECK(outcome.values == attention_case::run(of, {}).values);
    }
}

// Contexts that are split into many work items, whose partial results are merged.
TEST(long_contexts_are_split_and_merged) {
    Random random(check::seed_or(4));
    for (const std::int64_t group : {1, 5, 20}) {
        for (const std::int64_t window : {0, 1500, -1100, -17}) {  // negative: chunk size
            Shape shape;
            shape.group = group;
            shape.heads = 1;
            shape.key_dim = shape.value_dim = 32;
            shape.cached = {3000, 0, 700};
            shape.added = {1, 40, 3};
            Case of(random, shape);
            of.rule().window = std::max<std::int64_t>(0, window);
            of.rule().chunk = std::max<std::int64_t>(0, -window);
            std::vector<float> sinks(static_cast<std::size_t>(of.query_heads()), 1.5F);
            if (group == 5) of.rule().sinks = sinks.data();
            check::note = text(shape) + " window " + check::text(window);
            attention_case::check_all(of, of.expected());
        }
    }
}

// A weight of zero times NaN is NaN, so values of tokens outside the mask must not be multiplied at
// all.
TEST(tokens_outside_the_mask_have_no_effect) {
    Random random(check::seed_or(4));
    for (const std::int64_t group : {1, 16, 20, -1, -16}) {  // negative: codes with scales
        Shape shape;
        shape.group = std::abs(group);
        if (group < 0) {
            shape.dtype = DType::kFloat8E4M3FN;
            shape.scaling = Scaling::kTokenHead;
        }
        shape.cached = {70};
        shape.added = {6};
        Case of(random, shape);
        of.rule().window = 40;
        const attention_case::Outcome before = attention_case::run(of, {});
        of.poison(0, 75);  // the last token; token 30 is before the window
        of.poison(0, 30);
        const attention_case::Outcome after = attention_case::run(of, {});
        const auto size = static_cast<std::ptrdiff_t>(before.values.size());
        CHECK(std::equal(before.values.begin(), before.values.begin() + size / 6 * 5,
                         after.values.begin()));
        CHECK(std::isnan(read_element(DType::kFloat32, &after.values[after.values.size() - 4])));
    }
}

TEST(a_chunk_ends_where_the_next_chunk_begins) {
    Random random(check::seed_or(4));
    for (const std::int64_t group : {1, 20}) {
        Shape shape;
        shape.group = group;
        shape.cached = {70};
        shape.added = {6};
        Case of(random, shape);
        of.rule().chunk = 74;
        const attention_case::Outcome before = attention_case::run(of, {});
        for (std::int64_t token = 0; token < 70; ++token) of.poison(0, token);
        const attention_case::Outcome after = attention_case::run(of, {});
        const auto seeing = static_cast<std::ptrdiff_t>(before.values.size()) / 6 * 4;
        CHECK(std::equal(before.values.begin() + seeing, before.values.end(),
                         after.values.begin() + seeing));
        for (std::ptrdiff_t at = 0; at < seeing; at += 4) {
            CHECK(std::isnan(read_element(DType::kFloat32, &after.values[at])));
        }
    }
}

// The cost depends only on the visible tokens: a window of the same length costs the same at the
// end of every row.
TEST(tokens_outside_the_mask_cost_nothing) {
    Random random(check::seed_or(4));
    for (const bool is_chunk : {false, true}) {
        for (const std::uint32_t added : {1U, 40U}) {
            std::int64_t cost = 0;
            for (const std::uint32_t cached : {1063U, 4263U}) {  // same place in a chunk
                Shape shape;
                shape.heads = 1;
                shape.cached = {cached};
                shape.added = {added};
                Case of(random, shape);
                (is_chunk ? of.rule().chunk : of.rule().window) = 64;
                of.leave_behind();
                const std::int64_t found = kvcore::count_plan(of.input()).cost;
                CHECK(cost == 0 || found == cost);
                CHECK(found <= std::int64_t{64 + added} * (added + 16));
                cost = found;
            }
        }
    }
}

// A token that sees only one key returns the value of that key. This holds for every code,
// including NaN, on the direct and on the staged path.
TEST(all_codes_are_read_exactly) {
    Random random(check::seed_or(4));
    for (const DType dtype : conversion::kNarrow) {
        for (const std::int64_t group : {1, 8, 20}) {
            Shape shape;
            shape.dtype = dtype;
            shape.group = group;
            shape.value_dim = 256;
            shape.cached.push_back(0);
            shape.added.push_back(1);
            Case of(random, shape);
            auto* codes = const_cast<std::byte*>(of.pool().v.at(of.pages()[0], 0, 1));
            for (int code = 0; code < 256; ++code) codes[code] = static_cast<std::byte>(code);
            for (const auto* table : attention_case::tables()) {
                const attention_case::Outcome outcome = attention_case::run(of, {table});
                for (std::int64_t code = 0; code < 256; ++code) {
                    const double expected = read_element(dtype, codes + code);
                    const std::byte* at = outcome.values.data() + (group * 256 + code) * 4;
                    const double actual = read_element(DType::kFloat32, at);
                    CHECK(actual == expected || (std::isnan(actual) && std::isnan(expected)));
                }
            }
        }
    }
}

// One key has almost the whole weight: no overflow and no NaN.
TEST(large_scores_do_not_overflow) {
    Random random(check::seed_or(4));
    for (const std::int64_t group : {2, 17}) {
        Shape shape;
        shape.group = group;
        shape.spread = 1e4F;
        shape.cached = {150, 10};
        shape.added = {2, 3};
        Case of(random, shape);
        attention_case::check_close(of, of.expected(), attention_case::run(of, {}), 2000);
    }
}

// Pages that start above 2^31 and 2^32 bytes, in memory that is mapped only where it is written.
TEST(pages_may_be_gigabytes_apart) {
    Random random(check::seed_or(4));
    for (const bool is_quantized : {false, true}) {
        Shape shape;
        shape.dtype = is_quantized ? DType::kInt8 : DType::kFloat16;
        shape.scaling = is_quantized ? Scaling::kTokenHead : Scaling::kNone;
        shape.cached = {500, 400};
        shape.added = {1, 1};
        Case of(random, shape);
        const attention_case::Outcome near = attention_case::run(of, {});
        attention_case::SparseCopy k(of.pool().k, of.pool().pages);
        attention_case::SparseCopy v(of.pool().v, of.pool().pages);
        CHECK(k.size() > std::int64_t{1} << 32);
        CHECK(attention_case::run(of, {}) == near);
    }
}

}  // namespace

}  // namespace tests::data::attention
