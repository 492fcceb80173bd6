// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "copy_chunks.hpp"
#include "device_guard.hpp"
#include "kvcore/cuda.hpp"

namespace kvcore::cuda {

namespace {

cudaError_t copy_each(const RunChunk& runs, cudaStream_t stream) noexcept {
    for (std::size_t i = 0; i < runs.count; ++i) {
        const cudaError_t status = cudaMemcpyAsync(runs.destinations[i], runs.sources[i],
                                                   runs.bytes[i], cudaMemcpyDefault, stream);
        if (status != cudaSuccess) return status;
    }
    return cudaSuccess;
}

#if CUDART_VERSION >= 12080

// Sources are read in stream order: earlier work of the stream may have written them.
cudaError_t copy_together(RunChunk& runs, cudaStream_t stream) noexcept {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;  // the attributes apply to all copies from this index
#if CUDART_VERSION >= 13000
    return cudaMemcpyBatchAsync(runs.destinations, runs.sources, runs.bytes, runs.count,
                                &attributes, &first, 1, stream);
#else
    std::size_t failed = 0;
    return cudaMemcpyBatchAsync(runs.destinations, const_cast<void**>(runs.sources), runs.bytes,
                                runs.count, &attributes, &first, 1, &failed, stream);
#endif
}

// The legacy default stream does not accept batches, and it is not known if graphs accept them.
bool takes_batches(cudaStream_t stream) noexcept {
    if (stream == nullptr || stream == cudaStreamLegacy) return false;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    return told(cudaStreamIsCapturing(stream, &capture)) == kSuccess &&
           capture == cudaStreamCaptureStatusNone;
}

cudaError_t copy_runs(RunChunk& runs, cudaStream_t stream) noexcept {
    if (runs.count == 1 || !takes_batches(stream)) return copy_each(runs, stream);
    const cudaError_t status = copy_together(runs, stream);
    const bool is_too_old =
        status == cudaErrorCallRequiresNewerDriver || status == cudaErrorNotSupported;
    if (!is_too_old) return status;
    static_cast<void>(told(status));
    return copy_each(runs, stream);
}

#else

cudaError_t copy_runs(RunChunk& runs, cudaStream_t stream) noexcept {
    return copy_each(runs, stream);
}

#endif

}  // namespace

Status copy_batch(void* const* destinations, const void* const* sources, const std::int64_t* bytes,
                  std::int64_t n, Stream stream) noexcept {
    return for_each_chunk(destinations, sources, bytes, n, [&](RunChunk& runs) {
        return on_device(stream.device,
                         [&] { return copy_runs(runs, static_cast<cudaStream_t>(stream.handle)); });
    });
}

}  // namespace kvcore::cuda
