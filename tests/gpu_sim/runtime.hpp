// SPDX-License-Identifier: Apache-2.0
// State that the simulated runtime's calls share: a thread's device, capture mode, last error.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "machine.hpp"

namespace gpu_sim {

struct Thread {
    int device = 0;           // set by the thread
    std::vector<int> pushed;  // of the contexts on its stack
    bool is_relaxed = false;  // its unsafe calls end no capture
    Status last = kSuccess;
};
inline Thread& thread() {
    static thread_local Thread of_this;
    return of_this;
}

/// The device of the thread's context.
inline int current_device() {
    return thread().pushed.empty() ? thread().device : thread().pushed.back();
}

/// Runs `call` under the machine's mutex; stores its error as the thread's last error.
template <class Call>
cudaError_t answer(const Call& call) {
    const Lock lock(machine().mutex);
    const Status status = call();
    if (status != kSuccess && status != kNotReady) thread().last = status;
    return static_cast<cudaError_t>(status);
}

/// The same for a call that no capture can hold.
template <class Call>
cudaError_t answer_outside(const Call& call) {
    return answer([&] {
        const Status status = machine().refuse_in_capture(thread().is_relaxed);
        return status != kSuccess ? status : call();
    });
}

}  // namespace gpu_sim
