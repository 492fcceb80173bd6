// SPDX-License-Identifier: Apache-2.0
#include "keys/kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "support/baseline_isa.hpp"

namespace kvcore::keys {
namespace {

#if defined(__x86_64__)
// Not all compilers know "sha" by name.
bool has_sha_instructions() noexcept {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 29 & 1) != 0;
}
#endif

Kernels choose() noexcept {
    Kernels chosen{compress_portable, write_tokens_portable};
#if defined(__x86_64__)
    if (wants_baseline_isa()) return chosen;
    if (!__builtin_cpu_supports("ssse3") || !__builtin_cpu_supports("sse4.1")) return chosen;
    chosen.write_tokens = write_tokens_sse4;
    if (has_sha_instructions()) chosen.compress = compress_sha_ni;
#endif
    return chosen;
}

}  // namespace

const Kernels& kernels() noexcept {
    static const Kernels chosen = choose();
    return chosen;
}

}  // namespace kvcore::keys
