// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "copy_chunks.hpp"
#include "kvcore/cuda.hpp"
#include "machine.hpp"

namespace kvcore::cuda {

using emulation::kInvalidHandle;
using emulation::kInvalidValue;
using emulation::kNoDriver;
using emulation::Lock;
using emulation::machine;
using emulation::Range;

namespace {

constexpr std::size_t kStaged = 64 << 10;  // bytes of a driver's copy buffer for a stream

Status give(Stream stream, std::function<void()> work, std::vector<Range> touched) noexcept {
    const Lock lock(machine().mutex);
    return machine().give(stream, {std::move(work), nullptr, false, std::move(touched)});
}

}  // namespace

const char* status_text(Status status) noexcept {
    switch (status) {
        case kSuccess:
            return "no error (code 0)";
        case kInvalidCall:
            return "sizes that no kernel takes (code -1)";
        case kInvalidValue:
            return "invalid argument (code 1)";
        case emulation::kOutOfMemory:
            return "out of memory (code 2)";
        case kNoDriver:
            return "CUDA driver version is insufficient for CUDA runtime version (code 35)";
        case emulation::kInvalidDevice:
            return "invalid device ordinal (code 101)";
        case emulation::kCaptured:
            return "operation not permitted when stream is capturing (code 900)";
        default:
            return "invalid resource handle (code 400)";
    }
}

Status count_devices(int* count) noexcept {
    const Lock lock(machine().mutex);
    *count = machine().count();
    return *count > 0 ? kSuccess : kNoDriver;
}

Status enter_device(int device, bool* has_entered) noexcept {
    const Lock lock(machine().mutex);
    *has_entered = false;
    return machine().check(device);
}

Status leave_device() noexcept { return kSuccess; }

Status device_of(const void* pointer, int* device) noexcept {
    const Lock lock(machine().mutex);
    *device = machine().device_of(pointer);
    return machine().count() > 0 ? kSuccess : kNoDriver;
}

Status memory_info(int device, std::int64_t* free, std::int64_t* total) noexcept {
    const Lock lock(machine().mutex);
    const Status status = machine().check(device);
    if (status != kSuccess) return status;
    *free = machine().free_bytes(device);
    *total = machine().total_bytes();
    return kSuccess;
}

Status allocate(int device, std::int64_t bytes, void** pointer) noexcept {
    const Lock lock(machine().mutex);
    return machine().allocate(device, bytes, pointer);
}

Status free_memory(int /*device*/, void* pointer) noexcept {
    const Lock lock(machine().mutex);
    return machine().free(pointer);
}

Status pin_memory(int device, void* pointer, std::int64_t bytes) noexcept {
    const Lock lock(machine().mutex);
    const Status status = machine().check(device);
    if (status != kSuccess) return status;
    return bytes <= 0 ? kInvalidValue : machine().pin(pointer, bytes);
}

Status unpin_memory(int /*device*/, void* pointer) noexcept {
    const Lock lock(machine().mutex);
    return machine().unpin(pointer);
}

Status create_stream(int device, Stream* stream) noexcept {
    const Lock lock(machine().mutex);
    return machine().create_stream(device, stream);
}

Status destroy_stream(Stream stream) noexcept {
    const Lock lock(machine().mutex);
    return machine().destroy_stream(stream);
}

Status is_capturing(Stream stream, bool* answer) noexcept {
    const Lock lock(machine().mutex);
    *answer = machine().is_captured(stream);
    return machine().check(stream);
}

Status synchronize(Stream stream) noexcept {
    const Lock lock(machine().mutex);
    return machine().finish(stream);
}

Status synchronize_device(int device) noexcept {
    const Lock lock(machine().mutex);
    return machine().finish_device(device);
}

Status create_event(int device, Event* event) noexcept {
    const Lock lock(machine().mutex);
    return machine().create_event(device, event);
}

Status destroy_event(Event event) noexcept {
    const Lock lock(machine().mutex);
    return machine().destroy_event(event.handle);
}

Status record(Event event, Stream stream) noexcept {
    const Lock lock(machine().mutex);
    const auto marker = machine().marker_of(event.handle);
    if (marker == nullptr || marker->device != stream.device) return kInvalidHandle;
    marker->last = std::make_shared<emulation::Signal>();
    return machine().give(stream, {nullptr, marker->last, false});
}

Status wait(Stream stream, Event event) noexcept {
    const Lock lock(machine().mutex);
    const auto marker = machine().marker_of(event.handle);
    if (marker == nullptr) return kInvalidHandle;
    return marker->last == nullptr ? kSuccess
                                   : machine().give(stream, {nullptr, marker->last, true});
}

Status query(Event event, bool* is_done) noexcept {
    const Lock lock(machine().mutex);
    const auto marker = machine().marker_of(event.handle);
    if (marker == nullptr) return kInvalidHandle;
    *is_done = marker->last == nullptr || marker->last->is_done;
    return kSuccess;
}

Status synchronize(Event event) noexcept {
    const Lock lock(machine().mutex);
    const auto marker = machine().marker_of(event.handle);
    if (marker == nullptr) return kInvalidHandle;
    if (marker->last != nullptr) machine().finish(*marker->last);
    return kSuccess;
}

Status fill(void* destination, std::byte value, std::int64_t bytes, Stream stream) noexcept {
    if (bytes < 0) return kInvalidCall;
    if (bytes == 0) return kSuccess;
    return emulation::enqueue(stream, [destination, value, bytes] {
        std::memset(destination, std::to_integer<int>(value), static_cast<std::size_t>(bytes));
    });
}

Status copy(void* destination, const void* source, std::int64_t bytes, Stream stream) noexcept {
    if (bytes < 0) return kInvalidCall;
    if (bytes == 0) return kSuccess;
    const auto size = static_cast<std::size_t>(bytes);
    bool is_read_now = false;
    bool is_written_now = false;
    {
        const Lock lock(machine().mutex);
        is_read_now = !machine().knows(source);
        is_written_now = !machine().knows(destination);
    }
    // The driver copies an unknown source at once; if the copy is long, it first waits for the
    // stream. If the destination is unknown, it waits until the copy is written. A graph, however,
    // reads the source at every replay.
    bool is_captured = false;
    const Status asked = is_capturing(stream, &is_captured);
    if (asked != kSuccess) return asked;
    is_read_now = is_read_now && !is_captured;
    if (is_read_now && size > kStaged) {
        const Status waited = synchronize(stream);
        if (waited != kSuccess) return waited;
    }
    std::vector<std::byte> staged(is_read_now ? size : 0);
    if (is_read_now) std::memcpy(staged.data(), source, size);
    const auto move = [destination, source, size, staged] {
        std::memmove(destination, staged.empty() ? source : staged.data(), size);
    };
    const Status status = give(stream, move, {{destination, size}, {source, size}});
    return status == kSuccess && is_written_now ? synchronize(stream) : status;
}

Status copy_batch(void* const* destinations, const void* const* sources, const std::int64_t* bytes,
                  std::int64_t n, Stream stream) noexcept {
    return for_each_chunk(destinations, sources, bytes, n, [&](const RunChunk& runs) {
        std::vector<Range> touched;
        for (std::size_t i = 0; i < runs.count; ++i) {
            touched.push_back({runs.destinations[i], runs.bytes[i]});
            touched.push_back({runs.sources[i], runs.bytes[i]});
        }
        const auto move = [runs] {
            for (std::size_t i = runs.count; i > 0; --i) {  // in any order
                std::memcpy(runs.destinations[i - 1], runs.sources[i - 1], runs.bytes[i - 1]);
            }
        };
        return give(stream, move, std::move(touched));
    });
}

}  // namespace kvcore::cuda
