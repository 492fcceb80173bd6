// SPDX-License-Identifier: Apache-2.0
// The names of CUDA's driver that kvcore uses. The fake runtime defines the functions.
#pragma once

using CUdevice = int;
using CUcontext = struct FakeContext*;

enum CUresult {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201
};
