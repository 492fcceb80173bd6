// SPDX-License-Identifier: Apache-2.0
// Devices, streams, events and memory of NVIDIA GPUs, as far as a KV cache needs them. No CUDA
// header is needed to include this one: handles are CUDA's own, as void*.
//
// Common to all: a call returns a status, 0 for success; it never throws, leaves the calling
// thread's current device as it was, and creates no context on another device than the one that it
// is about. Without a driver every call returns a status that says so.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcore::cuda {

/// 0, a cudaError_t, or kInvalidCall.
using Status = int;
constexpr Status kSuccess = 0;
/// Sizes that no kernel takes: more work than a grid holds, a negative count.
constexpr Status kInvalidCall = -1;

/// What a status means, for error texts: CUDA's words and its number. Never nullptr; valid for
/// ever.
[[nodiscard]] const char* status_text(Status status) noexcept;

/// A stream of a device: cudaStream_t, nullptr for the device's legacy default stream. Owns
/// nothing.
struct Stream {
    int device = 0;
    void* handle = nullptr;
};

/// An event of a device, without timing: cudaEvent_t. Owns nothing.
struct Event {
    int device = 0;
    void* handle = nullptr;
};

/// Devices that the driver shows; a status other than 0 leaves `count` at 0 and says why there are
/// none ("CUDA driver version is insufficient" without a driver).
[[nodiscard]] Status count_devices(int* count) noexcept;

/// Has a device's context current on the calling thread, as CUDA's own calls and those of other
/// libraries see it, until `leave_device` is called. `has_entered` is false where it is so already:
/// then there is nothing to leave.
[[nodiscard]] Status enter_device(int device, bool* has_entered) noexcept;
Status leave_device() noexcept;

/// The device whose memory a pointer names, or -1 for host memory that CUDA does not know.
[[nodiscard]] Status device_of(const void* pointer, int* device) noexcept;

/// Bytes of a device's memory: free now, and all there are.
[[nodiscard]] Status memory_info(int device, std::int64_t* free, std::int64_t* total) noexcept;

/// Memory of a device, aligned to at least 256 bytes. 0 bytes give nullptr.
[[nodiscard]] Status allocate(int device, std::int64_t bytes, void** pointer) noexcept;
/// Waits for the device where it must; nullptr is nothing to do.
Status free_memory(int device, void* pointer) noexcept;

/// Pins host memory that the caller has, so that copies run beside the host and the kernels of all
/// devices can read and write it at its own address. It stays the caller's, who unpins it before
/// giving it back. `device` is one that the caller uses.
[[nodiscard]] Status pin_memory(int device, void* pointer, std::int64_t bytes) noexcept;
Status unpin_memory(int device, void* pointer) noexcept;

/// A stream that does not wait for the legacy default stream.
[[nodiscard]] Status create_stream(int device, Stream* stream) noexcept;
Status destroy_stream(Stream stream) noexcept;
/// Whether what is given to the stream now goes into a graph that is being captured.
[[nodiscard]] Status is_capturing(Stream stream, bool* answer) noexcept;
/// Blocks the host until the stream's work is done.
[[nodiscard]] Status synchronize(Stream stream) noexcept;
/// Blocks the host until all work of a device is done, also that of streams that were destroyed.
[[nodiscard]] Status synchronize_device(int device) noexcept;

[[nodiscard]] Status create_event(int device, Event* event) noexcept;
Status destroy_event(Event event) noexcept;
/// The event stands for the work that the stream has now; it forgets what it stood for.
[[nodiscard]] Status record(Event event, Stream stream) noexcept;
/// Work given to the stream from now on waits for the event; the host does not.
[[nodiscard]] Status wait(Stream stream, Event event) noexcept;
/// Whether an event's work is done; does not wait.
[[nodiscard]] Status query(Event event, bool* is_done) noexcept;
/// Blocks the host until an event's work is done.
[[nodiscard]] Status synchronize(Event event) noexcept;

/// Fills bytes of a device's memory in stream order.
[[nodiscard]] Status fill(void* destination, std::byte value, std::int64_t bytes,
                          Stream stream) noexcept;

/// Copies bytes in stream order, between any two of host and devices. Host memory that is not
/// pinned makes the host wait.
[[nodiscard]] Status copy(void* destination, const void* source, std::int64_t bytes,
                          Stream stream) noexcept;

/// Copies destinations[i] = sources[i], bytes[i] of them (host arrays [n], read before the call
/// returns), in any order, by the copy engines: the destinations share no byte with each other nor
/// with a source, and each run lies in one allocation. Where the driver takes batches (CUDA 12.8)
/// and the stream is not the legacy default one, that is one call to it for 512 runs.
[[nodiscard]] Status copy_batch(void* const* destinations, const void* const* sources,
                                const std::int64_t* bytes, std::int64_t n, Stream stream) noexcept;

}  // namespace kvcore::cuda
