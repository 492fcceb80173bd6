// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "device_guard.hpp"
#include "kvcore/cuda.hpp"

namespace kvcore::cuda {

namespace {

cudaStream_t handle_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t handle_of(Event event) { return static_cast<cudaEvent_t>(event.handle); }

// Returns the texts of all statuses from 0 to cudaErrorUnknown, the last status that CUDA numbers
// without a gap.
std::vector<std::string> texts() {
    std::vector<std::string> found;
    for (int status = 0; status <= cudaErrorUnknown; ++status) {
        const std::string words = cudaGetErrorString(static_cast<cudaError_t>(status));
        found.push_back(words + " (code " + std::to_string(status) + ")");
    }
    return found;
}

}  // namespace

const char* status_text(Status status) noexcept {
    if (status == kInvalidCall) return "sizes that no kernel takes (code -1)";
    if (status < 0 || status > cudaErrorUnknown) return "unknown status of CUDA";
    static const std::vector<std::string>& all = *new std::vector<std::string>(texts());
    return all[static_cast<std::size_t>(status)].c_str();
}

Status count_devices(int* count) noexcept {
    *count = 0;
    int found = 0;  // not written if there is no driver
    const Status status = told(cudaGetDeviceCount(&found));
    if (status == kSuccess) *count = found;
    return status;
}

Status enter_device(int device, bool* has_entered) noexcept {
    return push_context(device, has_entered);
}

Status leave_device() noexcept { return pop_context(); }

Status device_of(const void* pointer, int* device) noexcept {
    cudaPointerAttributes attributes{};
    // Without a context, no memory belongs to a device.
    const Status status =
        on_any_device([&] { return cudaPointerGetAttributes(&attributes, pointer); }, kSuccess);
    const bool is_device =
        attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
    *device = status == kSuccess && is_device ? attributes.device : -1;
    return status;
}

Status memory_info(int device, std::int64_t* free, std::int64_t* total) noexcept {
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    const Status status =
        on_device(device, [&] { return cudaMemGetInfo(&free_bytes, &total_bytes); });
    if (status != kSuccess) return status;
    *free = static_cast<std::int64_t>(free_bytes);
    *total = static_cast<std::int64_t>(total_bytes);
    return status;
}

Status allocate(int device, std::int64_t bytes, void** pointer) noexcept {
    *pointer = nullptr;
    if (bytes < 0) return kInvalidCall;
    const RelaxedCapture relaxed;
    return on_device(device, [&] {
        return bytes == 0 ? cudaSuccess : cudaMalloc(pointer, static_cast<std::size_t>(bytes));
    });
}

Status free_memory(int device, void* pointer) noexcept {
    const RelaxedCapture relaxed;
    return on_device(device, [&] { return cudaFree(pointer); });
}

Status pin_memory(int device, void* pointer, std::int64_t bytes) noexcept {
    if (bytes <= 0) return kInvalidCall;
    const RelaxedCapture relaxed;
    return on_device(device, [&] {
        return cudaHostRegister(pointer, static_cast<std::size_t>(bytes),
                                cudaHostRegisterPortable | cudaHostRegisterMapped);
    });
}

Status unpin_memory(int device, void* pointer) noexcept {
    const RelaxedCapture relaxed;
    return on_device(device, [&] { return cudaHostUnregister(pointer); });
}

Status create_stream(int device, Stream* stream) noexcept {
    cudaStream_t made = nullptr;
    const Status status =
        on_device(device, [&] { return cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking); });
    *stream = {device, made};
    return status;
}

Status destroy_stream(Stream stream) noexcept {
    return on_device(stream.device, [&] { return cudaStreamDestroy(handle_of(stream)); });
}

Status is_capturing(Stream stream, bool* answer) noexcept {
    *answer = false;
    cudaStream_t handle = handle_of(stream);
    // The legacy default stream is never captured, and the query fails while other streams are
    // captured.
    if (handle == nullptr || handle == cudaStreamLegacy) return kSuccess;
    cudaStreamCaptureStatus found = cudaStreamCaptureStatusNone;
    // A thread's own default stream belongs to the current device.
    const Status status =
        on_device(stream.device, [&] { return cudaStreamIsCapturing(handle, &found); });
    *answer = found != cudaStreamCaptureStatusNone;
    return status;
}

Status synchronize(Stream stream) noexcept {
    const RelaxedCapture relaxed;
    return on_device(stream.device, [&] { return cudaStreamSynchronize(handle_of(stream)); });
}

Status synchronize_device(int device) noexcept {
    const RelaxedCapture relaxed;
    return on_device(device, [] { return cudaDeviceSynchronize(); });
}

Status create_event(int device, Event* event) noexcept {
    cudaEvent_t made = nullptr;
    const Status status =
        on_device(device, [&] { return cudaEventCreateWithFlags(&made, cudaEventDisableTiming); });
    *event = {device, made};
    return status;
}

Status destroy_event(Event event) noexcept {
    return on_device(event.device, [&] { return cudaEventDestroy(handle_of(event)); });
}

Status record(Event event, Stream stream) noexcept {
    return on_device(stream.device,
                     [&] { return cudaEventRecord(handle_of(event), handle_of(stream)); });
}

Status wait(Stream stream, Event event) noexcept {
    return on_device(stream.device,
                     [&] { return cudaStreamWaitEvent(handle_of(stream), handle_of(event), 0); });
}

Status query(Event event, bool* is_done) noexcept {
    const RelaxedCapture relaxed;
    const Status status = on_device(event.device, [&] { return cudaEventQuery(handle_of(event)); });
    *is_done = status == kSuccess;
    return status == cudaErrorNotReady ? kSuccess : status;
}

Status synchronize(Event event) noexcept {
    const RelaxedCapture relaxed;
    return on_device(event.device, [&] { return cudaEventSynchronize(handle_of(event)); });
}

Status fill(void* destination, std::byte value, std::int64_t bytes, Stream stream) noexcept {
    if (bytes < 0) return kInvalidCall;
    if (bytes == 0) return kSuccess;
    return on_device(stream.device, [&] {
        return cudaMemsetAsync(destination, std::to_integer<int>(value),
                               static_cast<std::size_t>(bytes), handle_of(stream));
    });
}

Status copy(void* destination, const void* source, std::int64_t bytes, Stream stream) noexcept {
    if (bytes < 0) return kInvalidCall;
    if (bytes == 0) return kSuccess;
    return on_device(stream.device, [&] {
        return cudaMemcpyAsync(destination, source, static_cast<std::size_t>(bytes),
                               cudaMemcpyDefault, handle_of(stream));
    });
}

}  // namespace kvcore::cuda
