// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data/kernels/isa.hpp"
#include "kvcore/attention.hpp"

namespace kvcore::cpu {

/// Computes `kvcore::attention` with the kernels of one instruction set.
void attention_by(const AttentionKernels& kernels, const AttentionInput& input,
                  const AttentionOutput& output, std::byte* workspace, int threads);

}  // namespace kvcore::cpu
