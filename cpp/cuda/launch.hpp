// SPDX-License-Identifier: Apache-2.0
// Runs kernel bodies: on a GPU if nvcc compiles this file; otherwise one lane after the other on
// the CPU, as tasks of the emulated streams.
//
// A body is a struct of pointers, sizes and byte strides. Its call operator, for host and device,
// does the work of one lane. It has no barrier and no shared memory, so lanes may run in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kvcore/cuda.hpp"
#include "kvcore/dtype.hpp"

#if defined(__CUDACC__)
#include "device_guard.hpp"
#else
#include "emulation/emulation.hpp"
#endif

namespace kvcore::cuda {

/// The number of thread blocks, and the threads of a block.
struct Grid {
    std::int64_t blocks;
    std::int32_t threads;
};
constexpr std::int32_t kThreads = 256;  // of a block, if a body needs no other number
constexpr std::int64_t kMaxBlocks = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kWarp = 32;

/// The lane of a grid that a body runs as.
struct Lane {
    std::int64_t block;
    std::int32_t thread;
    Grid grid;

    /// `index`: the number of this lane among all lanes; `count`: the number of all lanes.
    [[nodiscard]] KVCORE_HOST_DEVICE constexpr std::int64_t index() const noexcept {
        return block * grid.threads + thread;
    }
    [[nodiscard]] KVCORE_HOST_DEVICE constexpr std::int64_t count() const noexcept {
        return grid.blocks * grid.threads;
    }
};

/// Returns a grid with a lane for each of `items` >= 0, or the largest grid; bodies continue in
/// strides of Lane::count(). `max_blocks` 0: no limit.
[[nodiscard]] constexpr Grid grid_for(std::int64_t items, std::int64_t max_blocks = 0,
                                      std::int32_t threads = kThreads) noexcept {
    const std::int64_t limit = max_blocks > 0 && max_blocks < kMaxBlocks ? max_blocks : kMaxBlocks;
    const std::int64_t wanted = items / threads + (items % threads != 0 ? 1 : 0);
    return {wanted < limit ? wanted : limit, threads};
}

#if defined(__CUDACC__)

/// The least number of blocks that a multiprocessor holds at once. Four blocks leave a lane 64
/// registers; bodies that need more registers define `kBlocks`.
template <class Body, class = void>
inline constexpr int kBlocksOf = 4;
template <class Body>
inline constexpr int kBlocksOf<Body, std::void_t<decltype(Body::kBlocks)>> = Body::kBlocks;

// The body stays in the memory of arguments, so its arrays are indexed without a copy for each
// lane.
template <class Body>
__global__ void __launch_bounds__(kThreads, kBlocksOf<Body>)
    run_lanes(const __grid_constant__ Body body, const __grid_constant__ Grid grid) {
    body(Lane{static_cast<std::int64_t>(blockIdx.x), static_cast<std::int32_t>(threadIdx.x), grid});
}

/// Enqueues body(lane) for every lane of the grid. Does nothing for an empty grid.
template <class Body>
[[nodiscard]] Status launch(const Body& body, Grid grid, Stream stream) noexcept {
    static_assert(std::is_trivially_copyable_v<Body>, "bodies are arguments of kernels");
    if (grid.blocks == 0) return kSuccess;
    return on_device(stream.device, [&] {
        // Not <<<...>>>: it reports a failure as the thread's last error, which can be an error of
        // other code.
        void* arguments[] = {const_cast<Body*>(&body), &grid};
        return cudaLaunchKernel(run_lanes<Body>, dim3(static_cast<unsigned>(grid.blocks)),
                                dim3(static_cast<unsigned>(grid.threads)), arguments, 0,
                                static_cast<cudaStream_t>(stream.handle));
    });
}

#else

/// Calls body(lane) for every lane of the grid, one after the other, before it returns.
template <class Body>
void emulate(const Body& body, Grid grid) {
    for (std::int64_t block = 0; block < grid.blocks; ++block) {
        for (std::int32_t thread = 0; thread < grid.threads; ++thread) {
            body(Lane{block, thread, grid});
        }
    }
}

/// Enqueues body(lane) for every lane of the grid. Does nothing for an empty grid.
template <class Body>
[[nodiscard]] Status launch(const Body& body, Grid grid, Stream stream) noexcept {
    static_assert(std::is_trivially_copyable_v<Body>, "bodies are arguments of kernels");
    if (grid.blocks == 0) return kSuccess;
    return emulation::enqueue(stream, [body, grid] { emulate(body, grid); });
}

#endif

}  // namespace kvcore::cuda
