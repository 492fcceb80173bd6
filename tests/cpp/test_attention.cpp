// SPDX-License-Identifier: Apache-2.0
// Attention over pages against double precision: layouts, dtypes, scales, windows, caps, sinks.
#include "attention_run.hpp"

using attention_case::Case;
using attention_case::Layout;
using attention_case::Scaling;
using attention_case::Shape;
using kvcore::DType;

namespace {

constexpr DType kWide[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

Shape random_shape(Random& random) {
    Shape shape;
    constexpr std::int64_t kPageSizes[] = {1, 3, 16, 24, 48};
    constexpr std::int64_t kGroups[] = {1, 2, 3, 4, 5, 6, 7, 8, 16};
    constexpr std::int64_t kDims[] = {8, 59, 64, 80, 96, 112, 128};
    shape.dtype = static_cast<DType>(random.below(6));
    shape.query_dtype = kWide[random.below(3)];
    shape.layout = random.chance(50) ? Layout::kTokensFirst : Layout::kHeadsFirst;
    shape.page_size = kPageSizes[random.below(5)];
    shape.heads = random.between(1, 3);
    shape.group = kGroups[random.below(9)];
    shape.key_dim = kDims[random.below(7)];
    shape.value_dim = random.chance(60) ? shape.key_dim : kDims[random.below(7)];
    if (!(kvcore::item_size(shape.dtype) > 1)) shape.scaling = static_cast<Scaling>(random.below(5));
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
    if (random.chance(30)) rule.soft_cap = static_cast<float>(random.between(1, 20));
    if (random.chance(30)) {
        for (std::int64_t head = 0; head < of.query_heads(); ++head) {
            sinks.push_back(static_cast<float>(random.between(-30, 30)) / 10.0F);
        }
        rule.sinks = sinks.data();
    }
}

void random_batches_are_attended_as_in_double_precision(Random& random) {
    for (int i = 0; i < 250; ++i) {
        const Shape shape = random_shape(random);
        check::note = text(shape);
        Case of(random, shape);
        std::vector<float> sinks;
        draw_rule(random, of, sinks);
        const attention_case::Result expected = of.expected();
        for (const kvcore::cpu::KernelTable* table : attention_case::tables()) {
            check::verb = table->name;
            attention_case::check_close(of, expected, attention_case::run(of, table, 1));
        }
        attention_case::check_close(of, expected, attention_case::run(of, nullptr, 3));
    }
}

}  // namespace

int main(int argc, char** argv) {
    Random random(seed_from(argc, argv, 4));
    random_batches_are_attended_as_in_double_precision(random);
}
