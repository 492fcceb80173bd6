# SPDX-License-Identifier: Apache-2.0
"""The program of the docs page about GPUs runs on emulated GPUs."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuda_machine import Machine, emulated, require_emulation
from triton_interpreter import require_interpreter

require_emulation()
require_interpreter()

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gpu.md"


def cupy_of(machine: Machine) -> Any:
    """Return the part of cupy that the page uses, over an emulated device."""

    class Stream:
        def __init__(self, *, non_blocking: bool) -> None:
            assert non_blocking
            self.own = machine.kernels.Stream(0)
            self.ptr, self.device_id = self.own.ptr, 0

        def __enter__(self) -> None:
            machine.streams[0] = self.ptr

        def __exit__(self, *error: object) -> None:
            del machine.streams[0]

    return SimpleNamespace(
        zeros=lambda shape, dtype: machine.array(np.zeros(shape, dtype)),
        asarray=machine.array,
        cuda=SimpleNamespace(Stream=Stream),
    )


def test_blocks_of_the_page_run_in_order() -> None:
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 6
    with emulated() as machine:
        machine.in_any_order(seed=1)

        def bring(name: str, *rest: Any, **more: Any) -> Any:
            return cupy_of(machine) if name == "cupy" else builtins.__import__(name, *rest, **more)

        names: dict[str, Any] = {
            "__builtins__": {**vars(builtins), "__import__": bring},
            "__name__": "gpu",
        }
        exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
        written = machine.host(names["keys"])
        assert written[2, 4, 0, 0] == written[7, 3, 0, 0] == 1
        assert written.sum() == 2 * 8 * 128
        assert machine.host(names["fixed"].inputs.cache_lengths).tolist() == [4, 10, 0, 0]
        assert (machine.host(names["out"]) > 0.99).all()  # the new token's: others score 0
