# SPDX-License-Identifier: Apache-2.0
"""Pages of (emulated) GPUs on disk: another manager, on a GPU or CPU, loads the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, emulated, require_emulation
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext, ops
from kvcore.groups import FullAttention, SlidingWindow, State
from kvcore.moving import read_sequence
from kvcore.ops.batch import layer_pools
from state_model import digest

require_emulation()

PROMPT = [(7 * i + 3) % 29 for i in range(42)]
WINDOW = 8
GROUPS: dict[str, Any] = {
    "flat": None,
    "windows": (FullAttention([0]), SlidingWindow([1], window=WINDOW)),
    "states": (
        FullAttention([0]),
        State([1], {"sum": ((2000,), "float32"), "few": ((3,), "int8")}),
    ),
}


@pytest.fixture
def machine() -> Iterator[Machine]:
    with emulated(devices=2) as made:
        yield made


class Side:
    """A manager with a disk tier, whose K and V identify their tokens."""

    def __init__(self, machine: Machine, device: str, kind: str, folder: Path) -> None:
        self.machine, self.is_gpu = machine, device != "cpu"
        self.device = int(device.partition(":")[2] or 0)
        self.kind = kind
        params = KVCacheParams(
            "float32",
            n_kv_heads=1,
            head_dim=4,
            num_layers=2,
            page_size=4,
            enable_prefix_caching=True,
            groups=GROUPS[kind],
        )
        self.manager = PagedKVCacheManager(
            params,
            4,
            128,
            devices=[device],
            num_pages=60,
            enable_runtime_checks=True,
            tiers=["host:64KiB", f"disk:{folder}:4MiB"],
        )

    def values(self, context: TextGenerationContext, layer: int) -> Any:
        """Return a row for each token, computed from all tokens up to it."""
        sums = np.cumsum(np.asarray(context.tokens) + 1) * 2.0 + layer
        return np.repeat(sums.astype(np.float32), 4).reshape(-1, 1, 4)

    def step(self, context: TextGenerationContext) -> None:
        """Write the values of the tokens to run, check all values, and commit."""
        (inputs,) = self.manager.fetch([context])
        begin, end = context.start_idx, context.active_idx
        offsets = np.array([0, end - begin], np.uint32)
        for layer in self.layers:
            rows = np.ascontiguousarray(self.values(context, layer)[begin:end])
            k, v = (self.machine.array(r, self.device) if self.is_gpu else r for r in (rows, -rows))
            ops.append(inputs, layer, k, v, offsets)
        if self.kind == "states":
            self.run_state(int(self.seen(inputs.states[0])[0]), context)
        self.check(inputs, context)
        context.update(9)
        self.manager.step([context])

    @property
    def layers(self) -> tuple[int, ...]:
        return (0,) if self.kind == "states" else (0, 1)

    def seen(self, array: Any) -> Any:
        return self.machine.host(array) if self.is_gpu else array

    def run_state(self, slot: int, context: TextGenerationContext) -> None:
        for arrays in self.manager.states[0].values():
            state = arrays[0][slot]
            if context.start_idx:
                wanted = digest(context.tokens[: context.start_idx])
                assert set(np.unique(self.seen(state))) == {wanted}
            new = np.full(state.shape, digest(context.tokens[: context.active_idx]))
            if self.is_gpu:
                self.machine.view(state)[...] = new
            else:
                state[...] = new

    def check(self, inputs: Any, context: TextGenerationContext) -> None:
        """Compare the rows that the request reads, in place."""
        end = context.active_idx
        for layer in self.layers:
            first = 0
            if self.kind == "windows" and layer == 1:
                first = max(0, context.start_idx + 1 - WINDOW)
            found: Any = layer_pools(inputs, layer)
            at = np.arange(first, end)
            pages = self.seen(found.lookup_table)[0][at // 4]
            for pool, sign in zip(found.pools, (1, -1), strict=True):
                rows = self.seen(pool)[pages, at % 4]
                np.testing.assert_array_equal(rows, sign * self.values(context, layer)[at])

    def serve(self, name: str, tokens: list[int]) -> int:
        """Run a prompt; return the number of its cached tokens."""
        context = TextGenerationContext(name, tokens)
        self.manager.claim(name)
        assert self.manager.maybe_reserve(context)
        cached = context.start_idx
        while context.end_idx == len(tokens):
            self.step(context)
        return cached


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize(
    ("first", "second"), [("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("cpu", "cuda:0")]
)
def test_another_manager_finds_what_a_gpu_has_computed(
    machine: Machine, tmp_path: Path, kind: str, first: str, second: str
) -> None:
    machine.in_any_order(seed=len(kind))
    one = Side(machine, first, kind, tmp_path)
    prompts = [[i, *PROMPT] for i in range(3)]
    with one.manager:
        for i, tokens in enumerate(prompts):
            assert one.serve(f"r{i}", tokens) == 0
            machine.in_any_order(seed=i)
    other = Side(machine, second, kind, tmp_path)
    with other.manager:
        for i, tokens in enumerate(prompts):
            assert other.serve(f"r{i}", tokens) == 40
            machine.in_any_order(seed=i)
        disk = other.manager.tier_metrics["disk"]
        assert (disk.hits, disk.corrupt) == (30, 0)


@pytest.mark.parametrize("kind", GROUPS)
def test_a_request_moves_in_the_middle_and_its_new_home_stores_it(
    machine: Machine, tmp_path: Path, kind: str
) -> None:
    machine.in_any_order(seed=len(kind))
    one = Side(machine, "cuda:0", kind, tmp_path / "one")
    with one.manager:
        one.serve("r", PROMPT)
        context = TextGenerationContext("again", PROMPT)
        one.manager.claim("again")
        while context.end_idx < len(PROMPT) + 3:
            one.step(context)
        data = one.manager.export_sequence("again")
    other = Side(machine, "cuda:1", kind, tmp_path / "other")
    with other.manager:
        moved = read_sequence(data).context("moved")
        assert other.manager.import_sequence(moved, data)
        for _ in range(6):  # each step checks all bytes
            other.step(moved)
        tokens = moved.tokens.tolist()
    third = Side(machine, "cuda:0", kind, tmp_path / "other")
    with third.manager:
        cached = third.serve("r", tokens)
        # no prompt ends at that token, so the states have no checkpoint
        assert (cached > 40) == (kind != "states")
