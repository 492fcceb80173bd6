// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime of simulated devices: launches, streams, events and graphs.
#include <cstring>
#include <memory>

#include "kernels_of.hpp"
#include "runtime.hpp"

using namespace gpu_sim;

namespace {

// A graph is a list of tasks in an order that its edges allow.
struct Graph {
    std::vector<Task> tasks;
};

}  // namespace

extern "C" {

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
    const int device = current_device();
    const Kernel* kernel = kernel_of(function, architecture_of(device));
    return answer([&]() -> Status {
        const Status status = machine().check(device);
        if (status != kSuccess) return status;
        if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
        const Size3 blocks{grid.x, grid.y, grid.z};
        const Size3 threads{block.x, block.y, block.z};
        const bool is_valid = blocks.count() > 0 && grid.x <= 0x7fffffffU && grid.y <= 0xffffU &&
                              grid.z <= 0xffffU && threads.count() > 0 && threads.count() <= 1024;
        if (!is_valid) return cudaErrorInvalidConfiguration;
        std::vector<std::byte> parameters(static_cast<std::size_t>(kernel->parameter_bytes));
        for (std::size_t i = 0; i < kernel->parameters.size(); ++i) {
            const auto [at, bytes] = kernel->parameters[i];
            std::memcpy(parameters.data() + at, arguments[i], static_cast<std::size_t>(bytes));
        }
        return machine().launch(stream, {*kernel, blocks, threads, std::move(parameters),
                                         static_cast<std::int64_t>(shared), device});
    });
}

// ---- streams ----------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return answer([&] {
        void* made = nullptr;
        const Status status =
            machine().create_stream(current_device(), (flags & cudaStreamNonBlocking) == 0, &made);
        *stream = static_cast<cudaStream_t>(made);
        return status;
    });
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    return answer([&] { return machine().destroy_stream(stream); });
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return answer_outside([&] { return machine().finish(current_device(), stream); });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    return answer([&] { return machine().wait(current_device(), stream, event); });
}

// ---- events -----------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    return answer([&] {
        void* made = nullptr;
        const Status status = machine().create_event(current_device(), &made);
        *event = static_cast<cudaEvent_t>(made);
        return status;
    });
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return answer([&] { return machine().destroy_event(event); });
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return answer([&] { return machine().record(current_device(), event, stream); });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    return answer_outside([&] { return machine().query(event); });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return answer_outside([&] { return machine().finish_event(event); });
}

// ---- graphs -----------------------------------------------------------------------------------

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* found) {
    return answer([&] {
        const Status status = machine().check(current_device());
        if (status != kSuccess) return status;
        const auto queue = machine().queue_of(current_device(), stream);
        if (queue == nullptr) return kInvalidHandle;
        *found = queue->capture == nullptr  ? cudaStreamCaptureStatusNone
                 : queue->capture->is_valid ? cudaStreamCaptureStatusActive
                                            : cudaStreamCaptureStatusInvalidated;
        return kSuccess;
    });
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    const bool before = thread().is_relaxed;
    thread().is_relaxed = *mode == cudaStreamCaptureModeRelaxed;
    *mode = before ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeGlobal;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    return answer([&] {
        return machine().begin_capture(current_device(), stream,
                                       mode == cudaStreamCaptureModeGlobal);
    });
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    return answer([&] {
        auto made = std::make_unique<Graph>();
        const Status status = machine().end_capture(current_device(), stream, &made->tasks);
        *graph = status == kSuccess ? reinterpret_cast<cudaGraph_t>(made.release()) : nullptr;
        return status;
    });
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    return answer([&] {
        Status status = kSuccess;
        for (const Task& task : reinterpret_cast<Graph*>(graph)->tasks) {
            if (status == kSuccess) status = machine().give(current_device(), stream, task);
        }
        return status;
    });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete reinterpret_cast<Graph*>(graph);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    delete reinterpret_cast<Graph*>(graph);
    return cudaSuccess;
}

}  // extern "C"
