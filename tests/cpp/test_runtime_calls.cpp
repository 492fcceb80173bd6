// SPDX-License-Identifier: Apache-2.0
// How the calls of CUDA's runtime are made: the sources that make them, on a fake of it.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "check.hpp"
#include "copy_batch.cu"  // NOLINT(bugprone-suspicious-include)
#include "device.cu"      // NOLINT(bugprone-suspicious-include)

namespace cuda = kvcore::cuda;

namespace {

void* address(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

const FakeRuntime::Call& call_of(const std::string& name) {
    for (const FakeRuntime::Call& call : fake.calls) {
        if (call.name == name) return call;
    }
    CHECK(false);
    return fake.calls.front();
}

/// Such calls end the captures of other threads, except by threads that say they may be made.
void calls_that_captures_forbid_are_made_in_relaxed_mode() {
    fake = {};
    void* memory = nullptr;
    bool is_done = false;
    CHECK_EQ(cuda::allocate(0, 8, &memory), cuda::kSuccess);
    CHECK_EQ(cuda::free_memory(0, address(256)), cuda::kSuccess);
    CHECK_EQ(cuda::pin_memory(address(4096), 8), cuda::kSuccess);
    CHECK_EQ(cuda::unpin_memory(address(4096)), cuda::kSuccess);
    CHECK_EQ(cuda::query(address(64), &is_done), cuda::kSuccess);
    CHECK(is_done);
    CHECK_EQ(cuda::synchronize(cuda::Event{address(64)}), cuda::kSuccess);
    CHECK_EQ(cuda::synchronize(cuda::Stream{0, address(64)}), cuda::kSuccess);
    for (const char* name : {"cudaMalloc", "cudaFree", "cudaHostRegister", "cudaHostUnregister",
                             "cudaEventQuery", "cudaEventSynchronize", "cudaStreamSynchronize"}) {
        CHECK_EQ(call_of(name).mode, cudaStreamCaptureModeRelaxed);
    }
    CHECK_EQ(fake.mode, cudaStreamCaptureModeGlobal);
}

void the_legacy_stream_is_not_asked_whether_it_is_captured() {
    fake = {};
    fake.is_capturing = true;
    bool answer = true;
    for (const std::uintptr_t handle : {0, 1}) {
        CHECK_EQ(cuda::is_capturing({0, address(handle)}, &answer), cuda::kSuccess);
        CHECK(!answer);
    }
    CHECK(fake.calls.empty());
    for (const std::uintptr_t handle : {2, 64}) {
        CHECK_EQ(cuda::is_capturing({0, address(handle)}, &answer), cuda::kSuccess);
        CHECK(answer);
    }
}

/// Neighbours may be of two allocations, which no copy may go across.
void copies_stay_what_the_caller_made_them() {
    for (const std::uintptr_t stream : {0, 64}) {
        fake = {};
        void* destinations[] = {address(100), address(110), address(200)};
        const void* sources[] = {address(500), address(510), address(600)};
        const std::int64_t bytes[] = {10, 10, 0};
        CHECK_EQ(cuda::copy_batch(destinations, sources, bytes, 3, {0, address(stream)}),
                 cuda::kSuccess);
        CHECK(fake.copied == (std::vector<std::size_t>{10, 10}));
    }
}

void the_device_is_current_for_the_call_alone() {
    fake = {};
    CHECK_EQ(cuda::record(address(64), {1, address(128)}), cuda::kSuccess);
    CHECK_EQ(call_of("cudaEventRecord").device, 1);
    CHECK_EQ(fake.device, 0);
    fake = {};
    CHECK_EQ(cuda::record(address(64), {0, address(128)}), cuda::kSuccess);
    CHECK_EQ(fake.calls.size(), 1U);
}

}  // namespace

int main() {
    calls_that_captures_forbid_are_made_in_relaxed_mode();
    the_legacy_stream_is_not_asked_whether_it_is_captured();
    copies_stay_what_the_caller_made_them();
    the_device_is_current_for_the_call_alone();
    return 0;
}
