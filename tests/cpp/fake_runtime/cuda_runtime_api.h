// SPDX-License-Identifier: Apache-2.0
// As much of CUDA's runtime as kvcore calls, to be compiled in its place: it does nothing but keep
// which calls were made, in which capture mode of the thread and for which device.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#define CUDART_VERSION 13000

using cudaStream_t = struct FakeStream*;
using cudaEvent_t = struct FakeEvent*;

enum cudaError {
    cudaSuccess = 0,
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
enum cudaMemcpySrcAccessOrder { cudaMemcpySrcAccessOrderStream = 1 };

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

/// What the runtime knows, and what it was asked.
struct FakeRuntime {
    struct Call {
        std::string name;
        int device;
        cudaStreamCaptureMode mode;
    };
    std::vector<Call> calls;
    std::vector<std::size_t> copied;  // bytes of each copy
    int device = 0;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    bool is_capturing = false;

    cudaError_t note(const char* name) {
        calls.push_back({name, device, mode});
        return cudaSuccess;
    }
};
inline FakeRuntime fake;

inline const char* cudaGetErrorString(cudaError_t /*status*/) { return "an error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaGetDeviceCount(int* count) {
    *count = 2;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
    *device = fake.device;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
    fake.device = device;
    return fake.note("cudaSetDevice");
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    const cudaStreamCaptureMode before = fake.mode;
    fake.mode = *mode;
    *mode = before;
    return cudaSuccess;
}

inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* /*at*/) {
    *found = {cudaMemoryTypeHost, 0};
    return cudaSuccess;
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
