// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime of simulated devices: devices, memory and copies.
#include <cstring>

#include "kernels_of.hpp"
#include "runtime.hpp"

using namespace gpu_sim;

extern "C" {

// ---- devices and errors -----------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
    return answer([&] {
        *count = machine().count();
        return *count > 0 ? kSuccess : kNoDriver;
    });
}
cudaError_t cudaGetDevice(int* device) {
    return answer([&] {
        *device = current_device();
        return machine().count() > 0 ? kSuccess : kNoDriver;
    });
}
cudaError_t cudaSetDevice(int device) {
    return answer([&] {
        if (machine().count() == 0) return kNoDriver;
        if (device < 0 || device >= machine().count()) return kInvalidDevice;
        thread().device = device;
        return machine().check(device);
    });
}
cudaError_t cudaDeviceSynchronize() {
    return answer_outside([] { return machine().finish_device(current_device()); });
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    return answer([&] {
        const Status status = machine().check(device);
        if (status != kSuccess) return status;
        switch (attribute) {
            case cudaDevAttrComputeCapabilityMajor:
                *value = architecture_of(device) / 10;
                return kSuccess;
            case cudaDevAttrComputeCapabilityMinor:
                *value = architecture_of(device) % 10;
                return kSuccess;
            case cudaDevAttrMultiProcessorCount:
                *value = 4;
                return kSuccess;
            case cudaDevAttrPageableMemoryAccess:
                *value = 0;
                return kSuccess;
            default:
                return kInvalidValue;
        }
    });
}
cudaError_t cudaGetLastError() {
    const Status last = thread().last;
    thread().last = kSuccess;
    return static_cast<cudaError_t>(last);
}
cudaError_t cudaPeekAtLastError() { return static_cast<cudaError_t>(thread().last); }
const char* cudaGetErrorString(cudaError_t error) {
    switch (static_cast<int>(error)) {
        case kSuccess:
            return "no error";
        case kInvalidValue:
            return "invalid argument";
        case kOutOfMemory:
            return "out of memory";
        case kNoDriver:
            return "CUDA driver version is insufficient for CUDA runtime version";
        case kInvalidDevice:
            return "invalid device ordinal";
        case kInvalidHandle:
            return "invalid resource handle";
        case kIllegalAddress:
            return "an illegal memory access was encountered";
        case kMisalignedAddress:
            return "misaligned address";
        case kCaptureUnsupported:
            return "operation not permitted when stream is capturing";
        case kCaptureInvalidated:
            return "operation failed due to a previous error during capture";
        default:
            return "an error of a simulated device";
    }
}

// ---- memory -----------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    return answer_outside([&] {
        const Status status = machine().check(current_device());
        *pointer = nullptr;
        if (status != kSuccess || bytes == 0) return status;
        *pointer = machine().memory.allocate(current_device(), static_cast<std::int64_t>(bytes));
        return *pointer == nullptr ? kOutOfMemory : kSuccess;
    });
}
cudaError_t cudaFree(void* pointer) {
    return answer_outside([&] {
        if (pointer == nullptr) return kSuccess;
        const Region region = machine().memory.region_of(pointer);
        if (region.owner == Owner::kDevice) (void)machine().finish_device(region.device);
        return machine().memory.free(pointer) ? kSuccess : kInvalidValue;
    });
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
    return cudaMalloc(pointer, bytes);
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
    return answer_outside([&] {
        return machine().give(current_device(), stream,
                              [pointer] { (void)machine().memory.free(pointer); });
    });
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    return answer([&] {
        const Status status = machine().check(current_device());
        if (status != kSuccess) return status;
        *free = static_cast<size_t>(machine().memory.free_bytes(current_device()));
        *total = static_cast<size_t>(machine().memory.total());
        return kSuccess;
    });
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
    return answer_outside([&] {
        if (machine().count() == 0) return kNoDriver;
        if (pointer == nullptr || bytes == 0) return kInvalidValue;
        return machine().memory.pin(pointer, static_cast<std::int64_t>(bytes)) ? kSuccess
                                                                               : kAlreadyPinned;
    });
}
cudaError_t cudaHostUnregister(void* pointer) {
    return answer_outside([&] { return machine().memory.unpin(pointer) ? kSuccess : kNotPinned; });
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
    return answer([&] {
        if (machine().count() == 0) return kNoDriver;
        const Region region = machine().memory.region_of(pointer);
        *attributes = {};
        attributes->device = region.owner == Owner::kDevice ? region.device : -2;
        attributes->type = region.owner == Owner::kDevice   ? cudaMemoryTypeDevice
                           : region.owner == Owner::kPinned ? cudaMemoryTypeHost
                                                            : cudaMemoryTypeUnregistered;
        return kSuccess;
    });
}

// ---- copies -----------------------------------------------------------------------------------

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
    return answer([&] { return machine().copy(current_device(), stream, to, from, bytes, false); });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    return answer_outside([&] {
        const Status status = machine().copy(current_device(), nullptr, to, from, bytes, false);
        return status == kSuccess ? machine().finish(current_device(), nullptr) : status;
    });
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    return answer([&] {
        return machine().give(current_device(), stream, [=] {
            Region region;
            const std::string why = machine().memory.why_not(
                machine().memory.region_of(to).device, reinterpret_cast<std::uintptr_t>(to),
                static_cast<std::int64_t>(bytes), region);
            if (!why.empty()) throw Fault(kIllegalAddress, why);
            std::memset(to, value, bytes);
        });
    });
}
// The order is free; here the last copy runs first.
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const size_t* bytes,
                                 size_t count, cudaMemcpyAttributes*, size_t*, size_t,
                                 cudaStream_t stream) {
    return answer([&] {
        if (reinterpret_cast<std::uintptr_t>(stream) <= 1) return kInvalidValue;
        Status status = kSuccess;
        for (size_t i = count; i > 0 && status == kSuccess; --i) {
            status = machine().copy(current_device(), stream, to[i - 1], from[i - 1], bytes[i - 1],
                                    true);
        }
        return status;
    });
}

}  // extern "C"
