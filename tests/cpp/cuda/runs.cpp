// SPDX-License-Identifier: Apache-2.0
// The start of each part of a run by its number, below and above 2^31 parts.
#include <cstddef>
#include <cstdint>

#include "convert_runs.hpp"
#include "support/check.hpp"
#include "support/random.hpp"

namespace tests::cuda::runs {

namespace cuda = kvcore::cuda;
using cuda::Runs;

namespace {

struct Cut {
    std::int64_t piece;    // elements
    std::int64_t of_part;  // pieces
};

// Computes the expected part from its token, head, group and number by multiplication.
void check_part(const cuda::RunParts<1>& parts, const Runs& runs, Cut cut, std::int64_t i) {
    const std::int64_t pieces = runs.group / cut.piece;
    const std::int64_t of_run = (pieces + cut.of_part - 1) / cut.of_part;
    const std::int64_t part = i % of_run;
    const std::int64_t group = i / of_run % runs.groups;
    const std::int64_t head = i / of_run / runs.groups % runs.heads;
    const std::int64_t token = i / of_run / runs.groups / runs.heads;
    const auto found = parts.find(i, false);
    const auto address = [](const std::byte* pointer) {
        return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer));
    };
    const auto expected = [&](const cuda::RunStrides& strides) {
        return token * strides.token + head * strides.head + group * strides.group;
    };
    const std::int64_t first = part * cut.of_part;
    CHECK_EQ(address(found.of[0].source), 4096 + expected(runs.from) + first * cut.piece * 2);
    CHECK_EQ(address(found.of[0].destination), 8192 + expected(runs.to) + first * cut.piece);
    CHECK_EQ(found.of[0].scale, expected(runs.of_scales));
    CHECK_EQ(found.pieces, pieces - first < cut.of_part ? pieces - first : cut.of_part);
}

TEST(parts_are_found) {
    Random random(check::seed_or(71));
    for (int round = 0; round < 2000; ++round) {
        const Cut cut{8, random.between(1, 9)};
        Runs runs;
        runs.tokens = random.chance(50) ? random.between(1, 50) : random.below(1'000'000'000) + 1;
        runs.heads = random.between(1, 9);
        runs.groups = random.chance(50) ? 1 : random.between(1, 4);
        runs.group = 8 * random.between(1, 20);
        // NOLINTBEGIN(performance-no-int-to-ptr): no code reads these addresses
        runs.source = reinterpret_cast<const std::byte*>(std::uintptr_t{4096});
        runs.destination = reinterpret_cast<std::byte*>(std::uintptr_t{8192});
        // NOLINTEND(performance-no-int-to-ptr)
        for (cuda::RunStrides* strides : {&runs.from, &runs.to, &runs.of_scales}) {
            strides->group = random.below(100);
            strides->head = random.below(1 << 20);
            strides->token = random.below(std::int64_t{1} << 28);
        }
        const cuda::RunParts<1> parts({{runs}}, cut.piece, 2, 1, cut.of_part);
        check_part(parts, runs, cut, 0);
        check_part(parts, runs, cut, parts.count() - 1);
        check_part(parts, runs, cut, parts.count() / 2);
        check_part(parts, runs, cut, random.below(parts.count()));
    }
}

}  // namespace

}  // namespace tests::cuda::runs
