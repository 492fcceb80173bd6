# SPDX-License-Identifier: Apache-2.0
"""Where commands run: devices by name, and GPUs that are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from kvcore import CapacityError, Device, KVCacheError
from kvcore.apps.cli import options
from kvcore.apps.cli.streams import tell
from kvcore.backends.cuda import availability

__all__ = ["DeviceName", "machine_errors", "require_gpu", "usable_device"]

DeviceName = Annotated[
    str, typer.Option("--device", metavar="NAME", help="cpu, cuda or cuda:N, the GPU of index N.")
]


def usable_device(name: str) -> Device:
    """Read the value of ``--device``; one that attention runs on, or bad input.

    Raises
    ------
    KVCacheError
        No GPU can be used here, or Triton is missing, with the reason.
    """
    device = options.checked("--device", Device.parse, name)
    if device.kind != "cpu":
        require_gpu(device.index)
    return device


def require_gpu(index: int) -> None:
    """Refuse an index that no GPU has: bad input.

    Raises
    ------
    KVCacheError
        As of ``usable_device``.
    """
    count = availability.require_devices()
    if index >= count:
        there = "there is 1 GPU" if count == 1 else f"there are {count} GPUs"
        raise typer.BadParameter(
            f"expected an index below {count}, got {index}: {there}", param_hint="'--device'"
        )
    availability.attention_kernels()


@contextmanager
def machine_errors() -> Iterator[None]:
    """End the program with exit code 1, in a line, for what a GPU does not give."""
    try:
        yield
    except CapacityError:
        raise  # too little was asked for: bad input of some option
    except KVCacheError as error:
        tell(f"error: {error}")
        raise typer.Exit(1) from error
