// SPDX-License-Identifier: Apache-2.0
#include "data/kernels/isa.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string_view>

#include "kvcore/errors.hpp"
#include "kvcore/quantize.hpp"

namespace kvcore {
namespace cpu {
namespace {

struct Candidate {
    const KernelTable& table;
    bool can_run;
};

const KernelTable& choose() {
    const Candidate candidates[] = {
#if defined(__x86_64__)
        {kV4Kernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                         __builtin_cpu_supports("avx512vl")},
        {kV3Kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c")},
#endif
        {kBaselineKernels, true},
    };
    const char* asked = std::getenv("KVCORE_ISA");
    for (const Candidate& candidate : candidates) {
        if (asked == nullptr && candidate.can_run) return candidate.table;
        if (asked == nullptr || std::string_view(candidate.table.name) != asked) continue;
        if (candidate.can_run) return candidate.table;
        throw std::invalid_argument(
            detail::concat("KVCORE_ISA is ", asked, ", which this processor cannot run; unset it"));
    }
    throw std::invalid_argument(
        detail::concat("KVCORE_ISA is ", asked, ", must be one of baseline, x86-64-v3, x86-64-v4"));
}

}  // namespace

const KernelTable& kernels() {
    static const KernelTable& chosen = choose();
    return chosen;
}

}  // namespace cpu

const char* kernel_isa() { return cpu::kernels().name; }

}  // namespace kvcore
