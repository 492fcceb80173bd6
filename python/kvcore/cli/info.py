# SPDX-License-Identifier: Apache-2.0
"""``kvcore info``: what is installed and what this machine can run."""

import json
import platform
from typing import Annotated, Any

import numpy as np
import typer

import kvcore
from kvcore import _core
from kvcore.cli.machine import isa_level


def info(
    *, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Print versions, the instruction set, and CUDA or the reason it is off.

    Example: kvcore info --json
    """
    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts))
        return
    cuda = facts["cuda"]
    shown = facts | {"cuda": "on" if cuda["available"] else f"off: {cuda['reason']}"}
    for name, value in shown.items():
        typer.echo(f"{name:<9} {value}")


def collect() -> dict[str, Any]:
    """Collect the facts that ``kvcore info`` prints, ready for JSON."""
    build = _core.build_info
    return {
        "kvcore": kvcore.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "compiler": build["compiler"],
        "platform": platform.platform(),
        "isa": isa_level(),
        "kernels": _core.kernel_isa(),
        "cuda": _cuda(build),
    }


def _cuda(build: dict[str, Any]) -> dict[str, Any]:
    if not build.get("cuda"):
        return {"available": False, "reason": "this build has no CUDA kernels"}
    return {"available": True, "reason": None}
