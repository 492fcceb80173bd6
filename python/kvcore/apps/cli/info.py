# SPDX-License-Identifier: Apache-2.0
"""``kvcore info``: print versions and the abilities of this machine."""

import json
import platform
from typing import Annotated, Any

import numpy as np
import typer

import kvcore
from kvcore import _core
from kvcore.apps.cli.machine import isa_level
from kvcore.backends.cuda import availability


def info(
    *, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Print versions, the instruction set, and the state of CUDA with the reason if it is off.

    Example: kvcore info --json
    """
    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts))
        return
    shown = facts | {"cuda": _shown(facts["cuda"])}
    for name, value in shown.items():
        typer.echo(f"{name:<9} {value}")


def collect() -> dict[str, Any]:
    """Collect the output of ``kvcore info``, ready for JSON."""
    build = _core.build_info
    return {
        "kvcore": kvcore.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "compiler": build["compiler"],
        "platform": platform.platform(),
        "isa": isa_level(),
        "kernels": _core.kernel_isa(),
        "cuda": _cuda(),
    }


def _cuda() -> dict[str, Any]:
    reason = availability.why_unavailable()
    devices = [] if reason else [_device(i) for i in range(availability.require_devices())]
    return {
        "available": not reason,
        "reason": reason or None,
        "built": availability.is_built(),
        "devices": devices,
    }


def _device(index: int) -> dict[str, Any]:
    free, total = availability.kernels().memory_info(index)
    return {"name": f"cuda:{index}", "free_bytes": free, "total_bytes": total}


def _shown(cuda: dict[str, Any]) -> str:
    if not cuda["available"]:
        return f"off: {cuda['reason']}"
    sizes = (
        f"{d['name']} ({d['free_bytes']} of {d['total_bytes']} bytes free)" for d in cuda["devices"]
    )
    return f"on: {', '.join(sizes)}"
