// SPDX-License-Identifier: Apache-2.0
// Calls the CUDA runtime on a device and leaves the calling thread's current device unchanged.
//
// cudaSetDevice creates the context of its device, which takes hundreds of megabytes. Setting the
// previous device again would create a context on GPU 0, the first device of every thread. The
// driver's stack of contexts has no such side effect: the primary context of the device is pushed
// before the call and popped after it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "kvcore/cuda.hpp"

namespace kvcore::cuda {

/// Returns the status of a call of the runtime. Clears an error from the thread's last error,
/// because other libraries would take it for their own error.
inline Status told(Status status) noexcept {
    if (status != kSuccess) static_cast<void>(cudaGetLastError());
    return status;
}

/// The driver's functions on contexts. The runtime looks them up, so the driver is not linked.
struct Driver {
    CUresult (*device_get)(CUdevice*, int) = nullptr;
    CUresult (*current_device)(CUdevice*) = nullptr;  // of the thread; fails without a context
    CUresult (*push)(CUcontext) = nullptr;
    CUresult (*pop)(CUcontext*) = nullptr;
    CUresult (*retain)(CUcontext*, CUdevice) = nullptr;
    CUresult (*release)(CUdevice) = nullptr;
    CUresult (*state)(CUdevice, unsigned*, int*) = nullptr;
    Status status;  // of the search for the functions

    Driver() noexcept : status(find()) {}

   private:
    template <class Function>
    [[nodiscard]] static Status look_up(const char* name, Function*& function) noexcept {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
        const Status status =
            told(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
#else
        const Status status =
            told(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result));
#endif
        function = reinterpret_cast<Function*>(found);
        if (status != kSuccess) return status;
        return result == cudaDriverEntryPointSuccess ? kSuccess : cudaErrorInsufficientDriver;
    }
    [[nodiscard]] Status find() noexcept {
        int devices = 0;
        static_cast<void>(told(cudaGetDeviceCount(&devices)));  // initialises the driver
        Status found = kSuccess;
        const auto add = [&found](const char* name, auto& function) {
            if (found == kSuccess) found = look_up(name, function);
        };
        add("cuDeviceGet", device_get);
        add("cuCtxGetDevice", current_device);
        add("cuCtxPushCurrent", push);
        add("cuCtxPopCurrent", pop);
        add("cuDevicePrimaryCtxRetain", retain);
        add("cuDevicePrimaryCtxRelease", release);
        add("cuDevicePrimaryCtxGetState", state);
        return found;
    }
};

[[nodiscard]] inline const Driver& driver() noexcept {
    static const Driver found;
    return found;
}

/// Returns `failed`, or the reason why there are no devices if there is no device.
[[nodiscard]] inline Status why_not(Status failed) noexcept {
    int devices = 0;
    const Status status = told(cudaGetDeviceCount(&devices));
    return status != kSuccess ? status : failed;
}

/// True if a device has a primary context.
[[nodiscard]] inline bool has_context(CUdevice device) noexcept {
    unsigned flags = 0;
    int is_active = 0;
    return driver().state(device, &flags, &is_active) == CUDA_SUCCESS && is_active != 0;
}

/// Pushes a device's primary context, unless a context of the device is already current.
[[nodiscard]] inline Status push_context(int index, bool* has_pushed) noexcept {
    *has_pushed = false;
    if (driver().status != kSuccess) return why_not(driver().status);
    CUdevice device = 0;
    const Status found = driver().device_get(&device, index);
    if (found != kSuccess) return why_not(found);
    CUdevice current = 0;
    if (driver().current_device(&current) == CUDA_SUCCESS && current == device) return kSuccess;
    const bool is_new = !has_context(device);
    CUcontext context = nullptr;
    Status status = driver().retain(&context, device);
    if (status != kSuccess) return status;
    status = driver().push(context);
    *has_pushed = status == kSuccess;
    // The first reference is never released, so that a call does not create and destroy the
    // context.
    if (!is_new) static_cast<void>(driver().release(device));
    return status;
}

[[nodiscard]] inline Status pop_context() noexcept {
    CUcontext popped = nullptr;
    return driver().pop(&popped);
}

/// Makes a device's primary context current for a scope, unless a context of the device is already
/// current.
class DeviceGuard {
   public:
    explicit DeviceGuard(int device) noexcept : status_(push_context(device, &has_pushed_)) {}
    ~DeviceGuard() {
        if (has_pushed_) static_cast<void>(pop_context());
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

    [[nodiscard]] Status status() const noexcept { return status_; }

   private:
    bool has_pushed_ = false;
    Status status_;
};

/// Allows the thread to make calls that CUDA may refuse while a stream is captured elsewhere:
/// allocating memory, freeing memory, and waiting. The calls do not concern that stream.
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
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // previous mode, while set
    bool is_set_;
};

/// Returns the status of `call`, made with a device current.
template <class Call>
[[nodiscard]] Status on_device(int device, const Call& call) noexcept {
    const DeviceGuard guard(device);
    return told(guard.status() != kSuccess ? guard.status() : static_cast<Status>(call()));
}

/// Returns the status of `call`, made with an existing context of any device current; returns
/// `otherwise` if no device has a context.
template <class Call>
[[nodiscard]] Status on_any_device(const Call& call, Status otherwise) noexcept {
    if (driver().status != kSuccess) return why_not(driver().status);
    CUdevice device = 0;
    if (driver().current_device(&device) == CUDA_SUCCESS) return told(call());
    int devices = 0;
    const Status status = told(cudaGetDeviceCount(&devices));
    if (status != kSuccess) return status;
    for (int index = 0; index < devices; ++index) {
        const bool is_there = driver().device_get(&device, index) == CUDA_SUCCESS;
        if (is_there && has_context(device)) return on_device(index, call);
    }
    return otherwise;
}

}  // namespace kvcore::cuda
