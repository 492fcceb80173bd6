// SPDX-License-Identifier: Apache-2.0
// Runs the example program without Python on an emulated GPU that runs its streams in any order.
#define main run_example
#include "../../../examples/append_cuda_pages.cpp"  // NOLINT(bugprone-suspicious-include): a program
#undef main

#include "emulation/emulation.hpp"
#include "support/check.hpp"

namespace tests::cuda::example {

namespace emulation = kvcore::cuda::emulation;

namespace {

TEST(the_example_runs_in_any_order) {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        emulation::reset(1);
        emulation::set_order(emulation::Order::kAny, seed);
        CHECK_EQ(run_example(), 0);
        CHECK_EQ(emulation::alive().allocations, 0);
    }
}

}  // namespace

}  // namespace tests::cuda::example
