// SPDX-License-Identifier: Apache-2.0
// The runtime of simulated GPUs: the calls that it refuses as CUDA does, and its random orders.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "emulation/emulation.hpp"
#include "kvcore/cuda.hpp"
#include "machine.hpp"
#include "support/check.hpp"

namespace cuda = kvcore::cuda;
namespace emulation = kvcore::cuda::emulation;

namespace {

/// A page of 64 bytes on a device, and its id.
class Page {
   public:
    explicit Page(int device = 0) : device_(device) {
        CHECK_EQ(cuda::allocate(device, 64, &memory_), 0);
        CHECK_EQ(cuda::allocate(device, 8, &id_), 0);
        const std::int64_t zero = 0;
        CHECK_EQ(cuda::copy(id_, &zero, 8, {device, nullptr}), 0);
        CHECK_EQ(cuda::synchronize(cuda::Stream{device, nullptr}), 0);
    }
    [[nodiscard]] int fill(int value, void* stream) const {
        const kvcore::PageBytes<std::byte> pool{bytes(), 64, 64};
        return cuda::fill_pages(pool, 1, static_cast<const std::int64_t*>(id_), 1,
                                static_cast<std::byte>(value), {device_, stream});
    }
    /// Reads the device memory; the host may do this here.
    [[nodiscard]] int value() const { return std::to_integer<int>(*bytes()); }
    [[nodiscard]] std::byte* bytes() const { return static_cast<std::byte*>(memory_); }

   private:
    int device_;
    void* memory_ = nullptr;
    void* id_ = nullptr;
};

cudaStream_t new_stream(unsigned flags = cudaStreamNonBlocking) {
    cudaStream_t stream = nullptr;
    CHECK_EQ(cudaStreamCreateWithFlags(&stream, flags), cudaSuccess);
    return stream;
}
cudaEvent_t new_event() {
    cudaEvent_t event = nullptr;
    CHECK_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    return event;
}
void in_any_order(std::uint64_t seed) {
    emulation::reset(2);
    emulation::set_order(emulation::Order::kAny, seed);
    CHECK_EQ(cudaSetDevice(0), cudaSuccess);
}

TEST(streams_and_events_are_of_a_device) {
    in_any_order(1);
    const Page page;
    CHECK_EQ(cudaSetDevice(1), cudaSuccess);
    cudaStream_t other = new_stream();
    cudaEvent_t event = new_event();
    CHECK_EQ(cudaSetDevice(0), cudaSuccess);
    CHECK_EQ(page.fill(1, other), cudaErrorInvalidResourceHandle);
    CHECK_EQ(cudaEventRecord(event, new_stream()), cudaErrorInvalidResourceHandle);
    CHECK_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    // Copies and queries do not depend on the current device.
    const Page there(1);
    const std::byte nine[8] = {std::byte{9}};
    CHECK_EQ(cudaMemcpyAsync(there.bytes(), nine, 8, cudaMemcpyDefault, other), cudaSuccess);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusActive;
    CHECK_EQ(cudaStreamIsCapturing(other, &capture), cudaSuccess);
    CHECK_EQ(capture, cudaStreamCaptureStatusNone);
    CHECK_EQ(cudaStreamSynchronize(other), cudaSuccess);
    CHECK_EQ(there.value(), 9);
    // A stream may wait for another device's event.
    CHECK_EQ(cudaSetDevice(1), cudaSuccess);
    CHECK_EQ(cudaEventRecord(event, other), cudaSuccess);
    CHECK_EQ(cudaSetDevice(0), cudaSuccess);
    CHECK_EQ(cudaStreamWaitEvent(new_stream(), event, 0), cudaSuccess);
}

// The results of a second stream after a first stream wrote 1, over many orders.
std::set<int> outcomes(unsigned flags, bool legacy_first) {
    std::set<int> seen;
    for (std::uint64_t seed = 1; seed < 40; ++seed) {
        in_any_order(seed);
        const Page page;
        cudaStream_t stream = new_stream(flags);
        CHECK_EQ(page.fill(1, legacy_first ? nullptr : stream), 0);
        CHECK_EQ(page.fill(2, legacy_first ? stream : nullptr), 0);
        CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
        seen.insert(page.value());
    }
    return seen;
}

TEST(the_legacy_stream_orders_blocking_streams) {
    for (const bool legacy_first : {true, false}) {
        CHECK(outcomes(cudaStreamDefault, legacy_first) == std::set<int>{2});
        CHECK((outcomes(cudaStreamNonBlocking, legacy_first) == std::set<int>{1, 2}));
    }
}

TEST(destroying_a_stream_does_not_wait) {
    in_any_order(1);
    const Page page;
    cudaStream_t stream = new_stream();
    CHECK_EQ(page.fill(3, stream), 0);
    CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
    CHECK_EQ(emulation::num_waiting(), 1);
    CHECK_EQ(page.fill(4, stream), cudaErrorInvalidResourceHandle);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    CHECK_EQ(page.value(), 3);
}

TEST(memory_that_is_no_more_is_a_fault) {
    in_any_order(1);
    const Page page;
    alignas(16) static std::byte host[64] = {};
    cudaStream_t stream = new_stream();
    CHECK_EQ(cuda::pin_memory(0, host, 64), 0);
    CHECK_EQ(cuda::pin_memory(0, host + 32, 64), cudaErrorHostMemoryAlreadyRegistered);
    CHECK_EQ(cuda::copy(page.bytes(), host, 64, {0, stream}), 0);
    CHECK_EQ(cuda::unpin_memory(0, host), 0);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
    CHECK_EQ(page.fill(1, stream), cudaErrorIllegalAddress);  // permanently
    const Page other(1);
    CHECK_EQ(other.fill(1, nullptr), 0);
}

// Makes a call during a capture; checks its answer and the end of the capture.
void capture(const std::function<void(const Page&, cudaStream_t)>& call, cudaError_t end) {
    in_any_order(1);
    const Page page;
    cudaStream_t stream = new_stream();
    CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    CHECK_EQ(page.fill(5, stream), 0);
    call(page, stream);
    cudaGraph_t graph = nullptr;
    CHECK_EQ(cudaStreamEndCapture(stream, &graph), end);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    CHECK(page.value() != 5);  // the captured work does not run
    if (end != cudaSuccess) return;
    cudaGraphExec_t ready = nullptr;
    CHECK_EQ(cudaGraphInstantiate(&ready, graph, 0), cudaSuccess);
    for (int replay = 0; replay < 2; ++replay) {
        CHECK_EQ(page.fill(9, stream), 0);
        CHECK_EQ(cudaGraphLaunch(ready, stream), cudaSuccess);
        CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        CHECK_EQ(page.value(), 5);
    }
    CHECK_EQ(cudaGraphExecDestroy(ready), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST(captures_hold_kernels_and_nothing_that_waits) {
    capture([](const Page&, cudaStream_t) {}, cudaSuccess);
    const std::vector<std::function<cudaError_t(const Page&, cudaStream_t)>> unsafe = {
        [](const Page&, cudaStream_t) {
            void* memory = nullptr;
            return cudaMalloc(&memory, 8);
        },
        [](const Page&, cudaStream_t stream) { return cudaStreamSynchronize(stream); },
        [](const Page& page, cudaStream_t stream) {  // from pageable memory
            const std::byte host[8] = {};
            return static_cast<cudaError_t>(cuda::copy(page.bytes(), host, 8, {0, stream}));
        },
        [](const Page&, cudaStream_t) {  // a stream of another thread
            cudaError_t found = cudaSuccess;
            cudaEvent_t event = new_event();
            std::thread([&] { found = cudaEventQuery(event); }).join();
            return found;
        },
    };
    for (const auto& call : unsafe) {
        capture(
            [&](const Page& page, cudaStream_t stream) {
                CHECK_EQ(call(page, stream), cudaErrorStreamCaptureUnsupported);
                CHECK_EQ(page.fill(6, stream), cudaErrorStreamCaptureInvalidated);
            },
            cudaErrorStreamCaptureInvalidated);
    }
    capture([](const Page& page, cudaStream_t) { CHECK_EQ(page.fill(6, nullptr), cudaSuccess); },
            cudaSuccess);
    capture(  // threads may relax their checks
        [](const Page&, cudaStream_t) {
            cudaEvent_t event = new_event();
            std::thread([&] {
                cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
                CHECK_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
                CHECK_EQ(cudaEventQuery(event), cudaSuccess);
            }).join();
        },
        cudaSuccess);
}

// Blocking streams would wait for the work on the legacy stream.
TEST(the_legacy_stream_ends_captures_of_blocking_streams) {
    in_any_order(1);
    const Page page;
    cudaStream_t stream = new_stream(cudaStreamDefault);
    CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    CHECK_EQ(page.fill(6, nullptr), cudaErrorStreamCaptureImplicit);
    cudaGraph_t graph = nullptr;
    CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
}

TEST(streams_join_a_capture_by_its_events) {
    in_any_order(1);
    const Page page;
    cudaStream_t first = new_stream();
    cudaStream_t second = new_stream();
    cudaEvent_t event = new_event();
    cudaEvent_t before = new_event();
    CHECK_EQ(cudaEventRecord(before, first), cudaSuccess);
    CHECK_EQ(cudaStreamBeginCapture(first, cudaStreamCaptureModeGlobal), cudaSuccess);
    CHECK_EQ(cudaEventRecord(event, first), cudaSuccess);
    CHECK_EQ(cudaStreamWaitEvent(second, event, 0), cudaSuccess);
    CHECK_EQ(page.fill(5, second), 0);
    CHECK_EQ(cudaStreamWaitEvent(first, before, 0), cudaErrorStreamCaptureIsolation);
    cudaGraph_t graph = nullptr;
    CHECK_EQ(cudaStreamEndCapture(first, &graph), cudaErrorStreamCaptureInvalidated);
    CHECK_EQ(page.fill(7, second), 0);  // it no longer captures
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    CHECK_EQ(page.value(), 7);
}

// The handle of a thread's own stream is the same for every device.
TEST(kvcore_asks_about_captures_of_the_streams_device) {
    in_any_order(1);
    CHECK_EQ(cudaSetDevice(1), cudaSuccess);
    CHECK_EQ(cudaStreamBeginCapture(cudaStreamPerThread, cudaStreamCaptureModeThreadLocal),
             cudaSuccess);
    CHECK_EQ(cudaSetDevice(0), cudaSuccess);
    for (int device = 0; device < 2; ++device) {
        bool is_captured = false;
        CHECK_EQ(cuda::is_capturing({device, cudaStreamPerThread}, &is_captured), 0);
        CHECK_EQ(is_captured, device == 1);
    }
    CHECK_EQ(cudaSetDevice(1), cudaSuccess);
    cudaGraph_t graph = nullptr;
    CHECK_EQ(cudaStreamEndCapture(cudaStreamPerThread, &graph), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

// The same kernel, compiled for each architecture.
TEST(devices_take_turns_in_their_architecture) {
    in_any_order(1);
    for (int device = 0; device < 2; ++device) {
        int major = 0;
        CHECK_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                 cudaSuccess);
        CHECK_EQ(major, device == 0 ? 9 : 8);
        const Page page(device);
        CHECK_EQ(page.fill(8, nullptr), 0);
        CHECK_EQ(cuda::synchronize(cuda::Stream{device, nullptr}), 0);
        CHECK_EQ(page.value(), 8);
    }
}

}  // namespace

int main(int count, char** words) {
    unsetenv("KVCORE_SIM_ARCHITECTURE");  // from the caller's environment; not read yet
    return check::run_cases(count, words);
}
