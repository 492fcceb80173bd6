// SPDX-License-Identifier: Apache-2.0
// What tests ask of the lanes on the CPU, answered by the simulation: the same tests run on both.
#include "emulation/emulation.hpp"

#include <utility>

#include "machine.hpp"

namespace kvcore::cuda::emulation {

using gpu_sim::Lock;
using gpu_sim::machine;

void reset(int devices, std::int64_t bytes_per_device) {
    const Lock lock(machine().mutex);
    machine().reset(devices, bytes_per_device);
}

void set_order(Order order, std::uint64_t seed) {
    const Lock lock(machine().mutex);
    machine().set_order(order == Order::kAny, seed);
}

Status enqueue(Stream stream, std::function<void()> task) noexcept {
    const Lock lock(machine().mutex);
    return machine().give(stream.device, stream.handle, std::move(task));
}

std::int64_t num_waiting() {
    const Lock lock(machine().mutex);
    return machine().num_waiting();
}

Alive alive() {
    const Lock lock(machine().mutex);
    return {machine().memory.num_allocations(), static_cast<std::int64_t>(machine().num_streams()),
            static_cast<std::int64_t>(machine().num_events()), machine().memory.num_pinned()};
}

}  // namespace kvcore::cuda::emulation
