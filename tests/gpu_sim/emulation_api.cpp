// SPDX-License-Identifier: Apache-2.0
// The test API of the CPU lanes, implemented by the simulation: the same tests run on both.
#include "emulation/emulation.hpp"

#include <utility>
#include <vector>

#include "machine.hpp"

namespace kvcore::cuda::emulation {

using gpu_sim::Lock;
using gpu_sim::machine;

namespace {

// Graphs by number; tests capture few graphs.
std::vector<std::vector<gpu_sim::Task>>& graphs() {
    static std::vector<std::vector<gpu_sim::Task>>& all =
        *new std::vector<std::vector<gpu_sim::Task>>;
    return all;
}

}  // namespace

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

std::int64_t faults() {
    const Lock lock(machine().mutex);
    machine().run_all();  // here a read of freed memory fails when it runs
    return machine().num_failed();
}

void begin_capture(Stream stream) {
    const Lock lock(machine().mutex);
    static_cast<void>(machine().begin_capture(stream.device, stream.handle, true));
}

std::int64_t end_capture(Stream stream) {
    const Lock lock(machine().mutex);
    std::vector<gpu_sim::Task> tasks;
    if (machine().end_capture(stream.device, stream.handle, &tasks) != gpu_sim::kSuccess) return -1;
    graphs().push_back(std::move(tasks));
    return static_cast<std::int64_t>(graphs().size()) - 1;
}

Status replay(std::int64_t graph, Stream stream) {
    const Lock lock(machine().mutex);
    if (graph < 0 || graph >= static_cast<std::int64_t>(graphs().size())) {
        return gpu_sim::kInvalidValue;
    }
    Status status = gpu_sim::kSuccess;
    for (const gpu_sim::Task& task : graphs()[static_cast<std::size_t>(graph)]) {
        if (status == kSuccess) status = machine().give(stream.device, stream.handle, task);
    }
    return status;
}

void suspend() { machine().mutex.lock(); }
void resume() { machine().mutex.unlock(); }

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
