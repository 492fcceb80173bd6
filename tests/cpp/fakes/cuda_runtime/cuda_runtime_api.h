// SPDX-License-Identifier: Apache-2.0
// A replacement for the part of CUDA's runtime that kvcore calls. It only records the calls, the
// thread's capture mode and device at each call, and the devices that have a context. As in CUDA
// 12, cudaSetDevice creates a context, and so does a call that needs a context on a thread without
// one.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#define CUDART_VERSION 13000

constexpr int kFakeDevices = 3;

using cudaStream_t = struct FakeStream*;
using cudaEvent_t = struct FakeEvent*;

enum cudaError {
    cudaSuccess = 0,
    cudaErrorInsufficientDriver = 35,
    cudaErrorCallRequiresNewerDriver = 36,
    cudaErrorNotReady = 600,
    cudaErrorNotSupported = 801,
    cudaErrorUnknown = 999
};
using cudaError_t = cudaError;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed = 2 };
enum cudaMemoryType { cudaMemoryTypeHost = 1, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum cudaMemcpySrcAccessOrder { cudaMemcpySrcAccessOrderStream = 1 };

constexpr unsigned long long cudaEnableDefault = 0;
constexpr unsigned cudaHostRegisterPortable = 1;
constexpr unsigned cudaHostRegisterMapped = 2;
constexpr unsigned cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDisableTiming = 2;
#define cudaStreamLegacy reinterpret_cast<cudaStream_t>(1)

struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
};
struct cudaMemcpyAttributes {
    cudaMemcpySrcAccessOrder srcAccessOrder;
};

/// The state of the runtime, and the calls that it got.
struct FakeRuntime {
    struct Call {
        std::string name;
        int device;
        cudaStreamCaptureMode mode;
    };
    std::vector<Call> calls;
    std::vector<std::size_t> copied;  // bytes of each copy
    int device = 0;                   // device that the thread has set
    std::vector<int> pushed;          // devices of the contexts on the thread's stack
    std::map<int, int> references;    // to primary contexts, by device
    std::set<int> contexts;           // devices that have a context
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    bool is_capturing = false;

    [[nodiscard]] int current() const { return pushed.empty() ? device : pushed.back(); }
    cudaError_t note(const char* name) {
        contexts.insert(current());
        calls.push_back({name, current(), mode});
        return cudaSuccess;
    }
};
inline FakeRuntime fake;

inline const char* cudaGetErrorString(cudaError_t /*status*/) { return "an error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaGetDeviceCount(int* count) {
    *count = kFakeDevices;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
    *device = fake.current();
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
    fake.device = device;
    return fake.note("cudaSetDevice");
}
inline cudaError_t cudaDeviceSynchronize() { return fake.note("cudaDeviceSynchronize"); }

/// The driver's functions on contexts, which the runtime looks up.
namespace fake_driver {
inline CUresult device_get(CUdevice* device, int index) {
    *device = index;
    return index >= 0 && index < kFakeDevices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
inline CUresult current_device(CUdevice* device) {
    if (fake.pushed.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *device = fake.pushed.back();
    return CUDA_SUCCESS;
}
inline CUresult retain(CUcontext* context, CUdevice device) {
    fake.contexts.insert(device);
    ++fake.references[device];
    // NOLINTNEXTLINE(performance-no-int-to-ptr): never dereferenced
    *context = reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1);
    return CUDA_SUCCESS;
}
inline CUresult release(CUdevice device) {
    if (--fake.references[device] == 0) fake.contexts.erase(device);
    return CUDA_SUCCESS;
}
inline CUresult state(CUdevice device, unsigned* flags, int* is_active) {
    *flags = 0;
    *is_active = static_cast<int>(fake.contexts.count(device));
    return CUDA_SUCCESS;
}
inline CUresult push(CUcontext context) {
    fake.pushed.push_back(static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1);
    return CUDA_SUCCESS;
}
inline CUresult pop(CUcontext* /*context*/) {
    fake.pushed.pop_back();
    return CUDA_SUCCESS;
}
}  // namespace fake_driver

inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                                    unsigned /*version*/,
                                                    unsigned long long /*flags*/,
                                                    cudaDriverEntryPointQueryResult* result) {
    const std::map<std::string, void*> functions = {
        {"cuDeviceGet", reinterpret_cast<void*>(&fake_driver::device_get)},
        {"cuCtxGetDevice", reinterpret_cast<void*>(&fake_driver::current_device)},
        {"cuCtxPushCurrent", reinterpret_cast<void*>(&fake_driver::push)},
        {"cuCtxPopCurrent", reinterpret_cast<void*>(&fake_driver::pop)},
        {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&fake_driver::retain)},
        {"cuDevicePrimaryCtxRelease", reinterpret_cast<void*>(&fake_driver::release)},
        {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(&fake_driver::state)}};
    *function = functions.at(name);
    *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    const cudaStreamCaptureMode before = fake.mode;
    fake.mode = *mode;
    *mode = before;
    return cudaSuccess;
}

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* /*at*/) {
    *found = {cudaMemoryTypeHost, 0};
    return fake.note("cudaPointerGetAttributes");
}
inline cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
    *free = *total = 0;
    return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** /*pointer*/, std::size_t /*bytes*/) {
    return fake.note("cudaMalloc");
}
inline cudaError_t cudaFree(void* /*pointer*/) { return fake.note("cudaFree"); }
inline cudaError_t cudaHostRegister(void* /*pointer*/, std::size_t /*bytes*/, unsigned /*flags*/) {
    return fake.note("cudaHostRegister");
}
inline cudaError_t cudaHostUnregister(void* /*pointer*/) { return fake.note("cudaHostUnregister"); }
inline cudaError_t cudaMemsetAsync(void* /*to*/, int /*value*/, std::size_t /*bytes*/,
                                   cudaStream_t /*stream*/) {
    return fake.note("cudaMemsetAsync");
}
inline cudaError_t cudaMemcpyAsync(void* /*to*/, const void* /*from*/, std::size_t bytes,
                                   cudaMemcpyKind /*kind*/, cudaStream_t /*stream*/) {
    fake.copied.push_back(bytes);
    return fake.note("cudaMemcpyAsync");
}
inline cudaError_t cudaMemcpyBatchAsync(void* const* /*to*/, const void* const* /*from*/,
                                        const std::size_t* bytes, std::size_t count,
                                        cudaMemcpyAttributes* /*attributes*/,
                                        std::size_t* /*first*/, std::size_t /*num_attributes*/,
                                        cudaStream_t /*stream*/) {
    fake.copied.insert(fake.copied.end(), bytes, bytes + count);
    return fake.note("cudaMemcpyBatchAsync");
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* /*stream*/, unsigned /*flags*/) {
    return fake.note("cudaStreamCreateWithFlags");
}
inline cudaError_t cudaStreamDestroy(cudaStream_t /*stream*/) {
    return fake.note("cudaStreamDestroy");
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t /*stream*/, cudaStreamCaptureStatus* found) {
    *found = fake.is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return fake.note("cudaStreamIsCapturing");
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) {
    return fake.note("cudaStreamSynchronize");
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t /*stream*/, cudaEvent_t /*event*/,
                                       unsigned /*flags*/) {
    return fake.note("cudaStreamWaitEvent");
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* /*event*/, unsigned /*flags*/) {
    return fake.note("cudaEventCreateWithFlags");
}
inline cudaError_t cudaEventDestroy(cudaEvent_t /*event*/) { return fake.note("cudaEventDestroy"); }
inline cudaError_t cudaEventRecord(cudaEvent_t /*event*/, cudaStream_t /*stream*/) {
    return fake.note("cudaEventRecord");
}
inline cudaError_t cudaEventQuery(cudaEvent_t /*event*/) { return fake.note("cudaEventQuery"); }
inline cudaError_t cudaEventSynchronize(cudaEvent_t /*event*/) {
    return fake.note("cudaEventSynchronize");
}
