// SPDX-License-Identifier: Apache-2.0
// As much of CUDA's driver as kvcore names, beside the fake runtime that has its functions.
#pragma once

using CUdevice = int;
using CUcontext = struct FakeContext*;

enum CUresult {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201
};
