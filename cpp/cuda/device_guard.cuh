// SPDX-License-Identifier: Apache-2.0
// Makes a device the calling thread's current one, and the one before current again.
#pragma once

#include <cuda_runtime_api.h>

#include "kvcore/cuda_device.hpp"

namespace kvcore::cuda {

class DeviceGuard {
   public:
    explicit DeviceGuard(int device) noexcept {
        status_ = cudaGetDevice(&before_);
        if (status_ != kSuccess || device == before_) return;
        status_ = cudaSetDevice(device);
        has_moved_ = status_ == kSuccess;
    }
    ~DeviceGuard() {
        if (has_moved_) cudaSetDevice(before_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

    [[nodiscard]] Status status() const noexcept { return status_; }

   private:
    int before_ = 0;
    bool has_moved_ = false;
    Status status_ = kSuccess;
};

}  // namespace kvcore::cuda
