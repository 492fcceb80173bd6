// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "data/attention/attention.hpp"
#include "data/kernels/isa.hpp"
#include "oracle/attention_case.hpp"

/// Runs cases and compares their results.
namespace attention_case {

/// The kernel tables that this processor can run.
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

/// Bytes with a guard on both sides, and with an unaligned start.
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

/// Memory for results: heads and tokens have gaps, which must stay unchanged.
class StridedResults {
   public:
    explicit StridedResults(const Case& of)
        : of_(of),
          head_bytes_(of.shape().value_dim * kvcore::item_size(of.shape().query_dtype)),
          head_stride_(head_bytes_ + 2 * kvcore::item_size(of.shape().query_dtype)),
          token_stride_(head_stride_ * of.query_heads() + 3),
          bytes_(of.tokens() * token_stride_) {}

    kvcore::HeadVectors<std::byte> vectors() {
        return {bytes_.data(), of_.shape().query_dtype, of_.query_heads(), token_stride_,
                head_stride_};
    }
    /// [tokens, query heads, value_dim]
    Bytes dense() const {
        Bytes all = bytes_.content();
        Bytes dense;
        for (std::int64_t token = 0; token < of_.tokens(); ++token) {
            for (std::int64_t head = 0; head < of_.query_heads(); ++head) {
                const auto at = all.begin() + token * token_stride_ + head * head_stride_;
                dense.insert(dense.end(), at, at + head_bytes_);
                std::fill(at, at + head_bytes_, std::byte{255});
            }
        }
        CHECK(std::all_of(all.begin(), all.end(), [](std::byte b) { return b == std::byte{255}; }));
        return dense;
    }

   private:
    const Case& of_;
    std::int64_t head_bytes_;
    std::int64_t head_stride_;
    std::int64_t token_stride_;
    GuardedBytes bytes_;
};

/// The options of a run.
struct How {
    const kvcore::cpu::KernelTable* table = nullptr;  // nullptr: the library's choice
    int threads = 1;
    bool with_shared = true;
    bool with_lse = true;
};

/// Run the case in a workspace that is full of NaN.
inline Outcome run(const Case& of, const How& how) {
    kvcore::AttentionInput input = of.input();
    if (!how.with_shared) input.num_shared = 0;
    GuardedBytes workspace(kvcore::attention_workspace_bytes(input, how.threads));
    StridedResults results(of);
    Outcome outcome;
    outcome.lse.assign(static_cast<std::size_t>(of.tokens() * of.query_heads()), 77);
    const kvcore::AttentionOutput output{results.vectors(),
                                         how.with_lse ? outcome.lse.data() : nullptr};
    if (how.table == nullptr) {
        kvcore::attention(input, output, workspace.data(), how.threads);
    } else {
        kvcore::cpu::attention_by(how.table->attention, input, output, workspace.data(),
                                  how.threads);
    }
    static_cast<void>(workspace.content());
    outcome.values = results.dense();
    return outcome;
}

/// The tolerance of a result dtype, as KERNELS states it.
inline double tolerance(DType dtype) {
    return dtype == DType::kFloat32 ? 1e-5 : dtype == DType::kFloat16 ? 1e-3 : 1e-2;
}

inline void check_close(const Case& of, const Result& expected, const Outcome& actual,
                        double slack = 1) {
    const DType dtype = of.shape().query_dtype;
    for (std::size_t i = 0; i < expected.values.size(); ++i) {
        const double value = read_element(
            dtype, actual.values.data() + static_cast<std::int64_t>(i) * kvcore::item_size(dtype));
        const double error = std::fabs(value - expected.values[i]);
        const double most =
            slack * tolerance(dtype) * (of.magnitude() + std::fabs(expected.values[i]));
        if (!(error <= most)) {
            check::fail(__FILE__, __LINE__,
                        "element " + std::to_string(i) + " is " + std::to_string(value) + ", not " +
                            std::to_string(expected.values[i]));
        }
    }
    for (std::size_t i = 0; i < expected.lse.size(); ++i) {
        const double lse = actual.lse[i];
        const bool is_same = lse == expected.lse[i];  // infinities
        if (!is_same &&
            !(std::fabs(lse - expected.lse[i]) <= 1e-4 * slack + 1e-5 * std::fabs(lse))) {
            check::fail(__FILE__, __LINE__,
                        "lse " + std::to_string(i) + " is " + std::to_string(lse) + ", not " +
                            std::to_string(expected.lse[i]));
        }
    }
}

/// Run a case with the kernels of every table. All results must be near the expected result. All
/// tables with a fused multiply-add and all numbers of threads must give the same bytes.
inline void check_all(const Case& of, const Result& expected) {
    std::vector<Outcome> outcomes;
    for (const kvcore::cpu::KernelTable* table : tables()) {
        check::verb = table->name;
        outcomes.push_back(run(of, {table}));
        check_close(of, expected, outcomes.back());
    }
    if (outcomes.size() == 3) CHECK(outcomes[1] == outcomes[2]);
    check::verb = "in threads";
    CHECK(run(of, {}) == run(of, {nullptr, 3}));
}

}  // namespace attention_case
