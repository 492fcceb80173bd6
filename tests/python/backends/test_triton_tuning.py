# SPDX-License-Identifier: Apache-2.0
"""The measurements of ``kvcore tune-attention``, with made-up times on an emulated GPU."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conftest
from cuda_machine import Machine, require_emulation
from kvcore.backends.selection import backend_of
from triton_interpreter import require_interpreter

triton = require_interpreter()
require_emulation()
conftest.require("typer")

from kvcore.apps.cli.main import main  # noqa: E402
from kvcore.backends.cuda.attention import tuning  # noqa: E402
from kvcore.backends.cuda.attention.call import attend, plan_with  # noqa: E402
from kvcore.backends.cuda.attention.settings import Settings  # noqa: E402
from kvcore.backends.cuda.attention.settings_file import read_rows  # noqa: E402

FAST = {"decode": Settings(64, 32, 2, 4), "prompt": Settings(64, 128, 8, 1)}


def time_of(place: Any, call: Any, settings: Settings) -> float:
    if settings.block_n == 16:
        raise triton.runtime.errors.OutOfResources(1, 0, "shared memory")
    phase = "prompt" if call.q.shape[0] > call.table.shape[0] else "decode"
    return 1.0 if settings == FAST[phase] else 2.0


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the batches to fit an emulated device."""
    for name in ("decoding", "prompts"):
        made = getattr(tuning, name)
        monkeypatch.setattr(tuning, name, lambda *args, made=made: made(*args, 2, 40))


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_the_fastest_settings_are_written(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, capsys: Any
) -> None:
    small(monkeypatch)
    monkeypatch.setattr(tuning, "microseconds", time_of)
    path = tmp_path / "found.json"
    asked = ["tune-attention", "--pool-dtype", dtype, "--dim", "64", "--output", str(path)]
    assert main(asked) == 0
    shown = capsys.readouterr().out.splitlines()
    tried = [c for phase in (False, True) for c in tuning.candidates(is_prompt=phase)]
    assert len(shown) == 1 + sum(each.block_n > 16 for each in tried)
    assert shown[-1].endswith(f"export KVCORE_ATTENTION_SETTINGS={path}")
    (row,) = read_rows(path)
    assert row == (0, 64, dtype != "float16", FAST["decode"], FAST["prompt"])
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["decode"] == FAST["decode"]._asdict()


def test_calls_are_those_of_decoding_and_of_prompts(machine: Machine) -> None:
    place = backend_of("cuda").current_place(1)
    model = tuning.Model(dim=16, heads=1, q_heads=2, pool_dtype="int8", dtype="float16")
    for made, tokens in ((tuning.decoding, 2), (tuning.prompts, 70)):
        call = made(model, place, 2, 35)
        assert call.q.shape == (tokens, 2, 16)
        assert sorted(machine.host(call.table).ravel()) == [*range(6)]
        plan = plan_with(call, Settings(16, 16, 4, 1), 1, place)
        out = place.empty(call.q.shape, np.dtype(np.float16))
        attend(call, plan, out, None, None, place)
        found = machine.host(out)
        assert np.isfinite(found).all()
        assert found.any()


def test_a_gpu_that_is_too_small_for_all_is_told() -> None:
    call: Any = None
    with pytest.raises(ValueError, match="too small for every one"):
        tuning.best(call, iter([Settings(16, 16, 4, 1)]), partial(time_of, None), print)
