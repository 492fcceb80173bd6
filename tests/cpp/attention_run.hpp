// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "attention_case.hpp"
#include "cpu/attention.hpp"
#include "cpu/isa.hpp"

/// Runs cases and compares what they answer.
namespace attention_case {

/// The tables that this processor can run.
inline std::vector<const kvcore::cpu::KernelTable*> tables() {
    std::vector<const kvcore::cpu::KernelTable*> found{&kvcore::cpu::kBaselineKernels};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
        found.push_back(&kvcore::cpu::kV3Kernels);
    }
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
        found.push_back(&kvcore::cpu::kV4Kernels);
    }
#endif
    return found;
}

/// Bytes with a guard on both sides, and a start that is aligned to nothing.
class GuardedBytes {
   public:
    explicit GuardedBytes(std::int64_t n)
        : size_(static_cast<std::size_t>(n)), bytes_(size_ + 2 * kGuard, std::byte{255}) {}

    std::byte* data() { return bytes_.data() + kGuard; }
    Bytes content() const {
        for (std::size_t i = 0; i < kGuard; ++i) {
            CHECK(bytes_[i] == std::byte{255} && bytes_[size_ + kGuard + i] == std::byte{255});
        }
        const auto* begin = bytes_.data() + kGuard;
        return {begin, begin + size_};
    }

   private:
    static constexpr std::size_t kGuard = 97;
    std::size_t size_;
    Bytes bytes_;
};

struct Outcome {
    Bytes values;  // [tokens, query heads, value_dim]
    std::vector<float> lse;
};

inline bool operator==(const Outcome& a, const Outcome& b) {
    return a.values == b.values && a.lse.size() == b.lse.size() &&
           (a.lse.empty() || std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * 4) == 0);
}

/// Attends with the kernels of a table, or with those that the library chooses. The workspace is
/// full of NaN.
inline Outcome run(const Case& of, const kvcore::cpu::KernelTable* table, int threads,
                   bool with_shared = true) {
    kvcore::AttentionInput input = of.input();
    if (!with_shared) input.num_shared = 0;
    const std::int64_t dim = of.shape().value_dim;
    const std::int64_t head_bytes = dim * kvcore::item_size(of.shape().query_dtype);
    GuardedBytes workspace(kvcore::attention_workspace_bytes(input, threads));
    GuardedBytes values(of.tokens() * of.query_heads() * head_bytes);
    Outcome outcome;
    outcome.lse.assign(static_cast<std::size_t>(of.tokens() * of.query_heads()), 77);
    const kvcore::AttentionOutput output{{values.data(), of.shape().query_dtype, of.query_heads(),
                                          of.query_heads() * head_bytes, head_bytes},
                                         outcome.lse.data()};
    if (table == nullptr) {
        kvcore::attention(input, output, workspace.data(), threads);
    } else {
        kvcore::cpu::attention_by(table->attention, input, output, workspace.data(), threads);
    }
    static_cast<void>(workspace.content());
    outcome.values = values.content();
    return outcome;
}

/// Of the dtype that results have, as KERNELS states it.
inline double tolerance(DType dtype) {
    return dtype == DType::kFloat32 ? 1e-5 : dtype == DType::kFloat16 ? 1e-3 : 1e-2;
}

inline void check_close(const Case& of, const Result& expected, const Outcome& actual) {
    const DType dtype = of.shape().query_dtype;
    for (std::size_t i = 0; i < expected.values.size(); ++i) {
        const double value = read_element(
            dtype, actual.values.data() + static_cast<std::int64_t>(i) * kvcore::item_size(dtype));
        const double error = std::fabs(value - expected.values[i]);
        const double most = tolerance(dtype) * (of.magnitude() + std::fabs(expected.values[i]));
        if (!(error <= most)) {
            check::fail(__FILE__, __LINE__,
                        "element " + std::to_string(i) + " is " + std::to_string(value) + ", not " +
                            std::to_string(expected.values[i]));
        }
    }
    for (std::size_t i = 0; i < expected.lse.size(); ++i) {
        const double lse = actual.lse[i];
        const bool is_same = lse == expected.lse[i];  // infinities
        if (!is_same && !(std::fabs(lse - expected.lse[i]) <= 1e-4 + 1e-5 * std::fabs(lse))) {
            check::fail(__FILE__, __LINE__,
                        "lse " + std::to_string(i) + " is " + std::to_string(lse) + ", not " +
                            std::to_string(expected.lse[i]));
        }
    }
}

}  // namespace attention_case
