// SPDX-License-Identifier: Apache-2.0
// The driver's stack of contexts on simulated devices. Every device has its primary context.
#include <cuda.h>

#include <map>
#include <string>

#include "runtime.hpp"

using namespace gpu_sim;

namespace {

CUresult device_get(CUdevice* device, int index) {
    const Lock lock(machine().mutex);
    *device = index;
    return index >= 0 && index < machine().count() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult current(CUdevice* device) {
    if (thread().pushed.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = thread().pushed.back();
    return CUDA_SUCCESS;
}
CUresult retain(CUcontext* context, CUdevice device) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the pointer is never dereferenced
    *context = reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1);
    return CUDA_SUCCESS;
}
CUresult release(CUdevice /*device*/) { return CUDA_SUCCESS; }
CUresult state(CUdevice /*device*/, unsigned* flags, int* is_active) {
    *flags = 0;
    *is_active = 1;
    return CUDA_SUCCESS;
}
CUresult push(CUcontext context) {
    thread().pushed.push_back(static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1);
    return CUDA_SUCCESS;
}
CUresult pop(CUcontext* context) {
    if (thread().pushed.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    static_cast<void>(retain(context, thread().pushed.back()));
    thread().pushed.pop_back();
    return CUDA_SUCCESS;
}

template <class Function>
void* address_of(Function* function) {
    return reinterpret_cast<void*>(function);
}

}  // namespace

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                             unsigned /*version*/, unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* result) {
    static const std::map<std::string, void*> functions = {
        {"cuDeviceGet", address_of(&device_get)},
        {"cuCtxGetDevice", address_of(&current)},
        {"cuCtxPushCurrent", address_of(&push)},
        {"cuCtxPopCurrent", address_of(&pop)},
        {"cuDevicePrimaryCtxRetain", address_of(&retain)},
        {"cuDevicePrimaryCtxRelease", address_of(&release)},
        {"cuDevicePrimaryCtxGetState", address_of(&state)}};
    const auto found = functions.find(name);
    *function = found == functions.end() ? nullptr : found->second;
    *result =
        found == functions.end() ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

}  // extern "C"
