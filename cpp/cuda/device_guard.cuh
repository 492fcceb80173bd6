// SPDX-License-Identifier: Apache-2.0
// Calls of the CUDA runtime with a device as the calling thread's current one, and the one before
// current again afterwards.
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

/// What a call of the runtime answered. Failure is told by the status alone: left behind as the
/// thread's last error, other libraries would take it for their own.
inline Status told(Status status) noexcept {
    if (status != kSuccess) static_cast<void>(cudaGetLastError());
    return status;
}

/// Lets the thread make calls that a stream which is captured elsewhere might object to: memory
/// that comes and goes, and waiting. They have nothing to do with that stream.
class RelaxedCapture {
   public:
    RelaxedCapture() noexcept
        : is_set_(told(cudaThreadExchangeStreamCaptureMode(&mode_)) == kSuccess) {}
    ~RelaxedCapture() {
        if (is_set_) static_cast<void>(told(cudaThreadExchangeStreamCaptureMode(&mode_)));
    }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

   private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // the one before, when it is set
    bool is_set_;
};

/// What `call` returns with a device current.
template <class Call>
[[nodiscard]] Status on_device(int device, const Call& call) noexcept {
    const DeviceGuard guard(device);
    return told(guard.status() != kSuccess ? guard.status() : static_cast<Status>(call()));
}

}  // namespace kvcore::cuda
