# SPDX-License-Identifier: Apache-2.0
"""States on (emulated) GPUs: requests continue from the state of their tokens, in any order of
streams, with the checkpoint on the device or in the host tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, emulated, require_emulation
from kvcore import PagedKVCacheManager, TextGenerationContext
from kvcore.groups import FullAttention, SlidingWindow, State
from state_model import digest, prompt, state_manager, state_params

require_emulation()

# The copy engine moves the large array, a kernel moves the small array.
ARRAYS = {"large": ((20_000,), "float32"), "small": ((5,), "int8")}
TIER: dict[str, Any] = {
    "enable_kvcache_swapping_to_host": True,
    "host_kvcache_swap_space_gb": 0.01,
}


@pytest.fixture
def machine() -> Iterator[Machine]:
    with emulated(devices=4) as made:
        yield made


class Engine:
    """Two managers in step: the manager in host memory gives the expected slots of the other."""

    def __init__(self, machine: Machine, *groups: Any, **options: Any) -> None:
        groups = groups or (FullAttention([0]), State([1], ARRAYS))
        params = state_params(*groups, **(TIER | options))
        self.machine = machine
        self.managers = [
            state_manager(
                params,
                devices=[kind.format(i) for i in range(params.n_devices)],
                num_pages=30,
                num_states=5,
                max_seq_len=80,
                max_batch_size=4 * params.data_parallel_degree,
            )
            for kind in ("cpu", "cuda:{}")
        ]
        self.per_replica = params.tensor_parallel_degree
        self.found: list[tuple[Any, int]] = []
        self.sources: list[Any] = []

    @property
    def there(self) -> PagedKVCacheManager:
        return self.managers[1]

    def copy(self, target: int, source: int, size: int, device: int) -> None:
        stream = self.machine.streams.get(device, 0)
        self.machine.kernels.copy(target, source, size, device, stream)

    def run(self, slot: int, context: TextGenerationContext, device: int) -> None:
        """Check a slot, then write it, in the order of the current stream."""
        for arrays in self.there.states[0].values():
            state = arrays[device][slot]
            if context.start_idx > 0:
                seen = self.machine.memory(state.shape, state.dtype, device)
                self.copy(seen.data.ptr, state.data.ptr, state.nbytes, device)
                self.found.append((seen, digest(context.tokens[: context.start_idx], device)))
            new = np.full(state.shape, digest(context.tokens[: context.active_idx], device))
            source = new.astype(state.dtype)
            self.sources.append(source)
            address = source.__array_interface__["data"][0]
            self.copy(state.data.ptr, address, source.nbytes, device)

    def serve(self, name: str, tokens: list[int], replica: int = 0) -> int:
        """Run a prompt to its end; return the number of reused tokens."""
        contexts = [TextGenerationContext(name, tokens) for _ in self.managers]
        for manager in self.managers:
            manager.claim(name, replica_idx=replica)
        starts = []
        while contexts[0].end_idx == len(tokens):
            inputs = [
                manager.fetch([context])
                for manager, context in zip(self.managers, contexts, strict=True)
            ]
            assert contexts[0].start_idx == contexts[1].start_idx
            starts.append(contexts[0].start_idx)
            first = replica * self.per_replica
            for device in range(first, first + self.per_replica):
                self.run(int(inputs[0][device].states[0][0]), contexts[1], device)
            for manager, context in zip(self.managers, contexts, strict=True):
                context.update(9)
                manager.step([context])
        for manager in self.managers:
            manager.release(name)
        return starts[0]

    def look(self) -> None:
        for seen, wanted in self.found:
            assert set(np.unique(self.machine.host(seen))) == {wanted}
        here, there = (manager.state_metrics for manager in self.managers)
        assert here == there


@pytest.mark.parametrize("seed", range(8))
def test_states_are_those_of_their_tokens(machine: Machine, seed: int) -> None:
    windows = (FullAttention([0]), SlidingWindow([1], 6), State([2], ARRAYS))
    engine = Engine(machine, *(windows if seed % 2 else ()))
    streams = [machine.kernels.Stream(0) for _ in range(3)]
    machine.in_any_order(seed)
    reused = []
    for turn in range(24):
        machine.streams[0] = streams[turn % 3].ptr
        reused.append(engine.serve(f"r{turn}", prompt((100 * (turn % 6), 14), (turn, 4))))
    engine.look()
    assert max(reused) == 12
    assert engine.there.state_metrics.loaded_checkpoints > 5


def test_every_device_of_every_replica_gets_its_part(machine: Machine) -> None:
    engine = Engine(machine, n_kv_heads=2, n_devices=4, data_parallel_degree=2)
    machine.in_any_order(seed=1)
    for turn in range(24):
        engine.serve(f"r{turn}", prompt((100 * (turn % 3), 14), (turn, 4)), replica=turn % 2)
    engine.look()
    assert engine.there.state_metrics.loaded_checkpoints > 5
