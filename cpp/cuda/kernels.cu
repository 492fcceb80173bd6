// SPDX-License-Identifier: Apache-2.0
// The kernels whose machine code for a GPU is the same from the PTX of any architecture: nvcc makes
// PTX of compute_80 from them once. The kernels with fp8 instructions are in files of their own.
#include "arrays.hpp"
#include "convert_batch.hpp"
#include "digest.hpp"
#include "fill.hpp"
#include "merge.hpp"
#include "packed.hpp"
#include "pages.hpp"
#include "quantize.hpp"
#include "step.hpp"
#include "tokens.hpp"
