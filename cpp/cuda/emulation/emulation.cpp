// SPDX-License-Identifier: Apache-2.0
#include "emulation.hpp"

#include <utility>

#include "machine.hpp"

namespace kvcore::cuda::emulation {

Machine& machine() {
    static Machine the_machine;
    return the_machine;
}

void reset(int devices, std::int64_t bytes_per_device) {
    const Lock lock(machine().mutex);
    machine().run_all();
    machine().reset(devices, bytes_per_device);
}

void set_order(Order order, std::uint64_t seed) {
    const Lock lock(machine().mutex);
    machine().set_order(order, seed);
}

Status enqueue(Stream stream, std::function<void()> task) noexcept {
    const Lock lock(machine().mutex);
    return machine().give(stream, {std::move(task)});
}

std::int64_t faults() {
    const Lock lock(machine().mutex);
    return machine().faults();
}

void begin_capture(Stream stream) {
    const Lock lock(machine().mutex);
    machine().begin_capture(stream);
}

std::int64_t end_capture(Stream stream) {
    const Lock lock(machine().mutex);
    return machine().end_capture(stream);
}

Status replay(std::int64_t graph, Stream stream) {
    const Lock lock(machine().mutex);
    return machine().replay(graph, stream);
}

void suspend() { machine().mutex.lock(); }
void resume() { machine().mutex.unlock(); }

std::int64_t num_waiting() {
    const Lock lock(machine().mutex);
    return machine().num_waiting();
}

Alive alive() {
    const Lock lock(machine().mutex);
    return machine().alive();
}

}  // namespace kvcore::cuda::emulation
