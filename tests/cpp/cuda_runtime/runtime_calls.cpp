// SPDX-License-Identifier: Apache-2.0
// The calls to CUDA's runtime: the sources that make them run against a fake runtime.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "copy_batch.cpp"  // NOLINT(bugprone-suspicious-include)
#include "device.cpp"      // NOLINT(bugprone-suspicious-include)
#include "support/check.hpp"

namespace tests::cuda_runtime::runtime_calls {

namespace cuda = kvcore::cuda;

namespace {

void* address(std::uintptr_t number) {
    return reinterpret_cast<void*>(number);  // NOLINT(performance-no-int-to-ptr): never read
}

const FakeRuntime::Call& call_of(const std::string& name) {
    for (const FakeRuntime::Call& call : fake.calls) {
        if (call.name == name) return call;
    }
    CHECK(false);
    return fake.calls.front();
}

/// In another capture mode, these calls would end the captures of other threads.
TEST(calls_that_captures_forbid_are_made_in_relaxed_mode) {
    fake = {};
    void* memory = nullptr;
    bool is_done = false;
    CHECK_EQ(cuda::allocate(0, 8, &memory), cuda::kSuccess);
    CHECK_EQ(cuda::free_memory(0, address(256)), cuda::kSuccess);
    CHECK_EQ(cuda::pin_memory(0, address(4096), 8), cuda::kSuccess);
    CHECK_EQ(cuda::unpin_memory(0, address(4096)), cuda::kSuccess);
    CHECK_EQ(cuda::query({0, address(64)}, &is_done), cuda::kSuccess);
    CHECK(is_done);
    CHECK_EQ(cuda::synchronize(cuda::Event{0, address(64)}), cuda::kSuccess);
    CHECK_EQ(cuda::synchronize(cuda::Stream{0, address(64)}), cuda::kSuccess);
    CHECK_EQ(cuda::synchronize_device(0), cuda::kSuccess);
    for (const char* name :
         {"cudaMalloc", "cudaFree", "cudaHostRegister", "cudaHostUnregister", "cudaEventQuery",
          "cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize"}) {
        CHECK_EQ(call_of(name).mode, cudaStreamCaptureModeRelaxed);
    }
    CHECK_EQ(fake.mode, cudaStreamCaptureModeGlobal);
}

TEST(the_legacy_stream_is_not_queried_for_capture) {
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

/// Adjacent copies must not be merged: they may belong to two allocations, and a copy must not
/// cross allocations.
TEST(adjacent_copies_are_not_merged) {
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

TEST(the_device_is_current_only_during_the_call) {
    for (const int set : {0, 1, 2}) {
        fake = {};
        fake.device = set;
        CHECK_EQ(cuda::record({1, address(64)}, {1, address(128)}), cuda::kSuccess);
        CHECK_EQ(call_of("cudaEventRecord").device, 1);
        CHECK_EQ(fake.current(), set);
        CHECK_EQ(fake.calls.size(), 1U);
    }
    fake = {};
    fake.pushed = {1};  // the application's own context of the device
    fake.contexts = {1};
    CHECK_EQ(cuda::record({1, address(64)}, {1, address(128)}), cuda::kSuccess);
    CHECK(fake.references.empty());
    CHECK_EQ(cuda::record({5, address(64)}, {5, address(128)}), CUDA_ERROR_INVALID_DEVICE);
    CHECK(fake.pushed == std::vector<int>{1});
}

/// Each call on device 1.
std::vector<std::function<cuda::Status()>> calls_of_device_one() {
    static void* memory;
    static std::int64_t free, total;
    static cuda::Stream made;
    static cuda::Event event;
    static int device;
    static bool answer;
    const cuda::Stream stream{1, address(128)};
    return {
        [] { return cuda::memory_info(1, &free, &total); },
        [] { return cuda::allocate(1, 8, &memory); },
        [] { return cuda::free_memory(1, address(256)); },
        [] { return cuda::pin_memory(1, address(4096), 8); },
        [] { return cuda::unpin_memory(1, address(4096)); },
        [] { return cuda::create_stream(1, &made); },
        [=] { return cuda::destroy_stream(stream); },
        [=] { return cuda::is_capturing(stream, &answer); },
        [=] { return cuda::synchronize(stream); },
        [] { return cuda::synchronize_device(1); },
        [] { return cuda::create_event(1, &event); },
        [] { return cuda::destroy_event({1, address(64)}); },
        [=] { return cuda::record({1, address(64)}, stream); },
        [=] { return cuda::wait(stream, {1, address(64)}); },
        [] { return cuda::query({1, address(64)}, &answer); },
        [] { return cuda::synchronize(cuda::Event{1, address(64)}); },
        [=] { return cuda::fill(address(64), std::byte{1}, 8, stream); },
        [=] { return cuda::copy(address(64), address(96), 8, stream); },
        [] { return cuda::count_devices(&device); },
        [] { return cuda::device_of(address(64), &device); },
    };
}

/// A context takes hundreds of megabytes of GPU memory, also on a GPU that the process does not
/// use.
TEST(no_other_device_gets_a_context) {
    for (const auto& call : calls_of_device_one()) {
        fake = {};
        CHECK_EQ(call(), cuda::kSuccess);
        CHECK(fake.contexts == std::set<int>{1} || fake.contexts.empty());
        const int references = fake.references[1];
        for (int i = 0; i < 3; ++i) CHECK_EQ(call(), cuda::kSuccess);
        CHECK_EQ(fake.references[1], references);
        CHECK(fake.pushed.empty());
        CHECK_EQ(fake.device, 0);
    }
    fake = {};
    int device = 7;
    fake.contexts = {2};
    CHECK_EQ(cuda::device_of(address(64), &device), cuda::kSuccess);
    CHECK_EQ(call_of("cudaPointerGetAttributes").device, 2);
    CHECK_EQ(device, -1);
    CHECK(fake.contexts == std::set<int>{2});
}

}  // namespace

}  // namespace tests::cuda_runtime::runtime_calls
