# SPDX-License-Identifier: Apache-2.0
"""Choose the device of a command by name, and check that its GPU exists."""

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
    """Read the value of ``--device``; bad input unless attention runs on this device.

    Raises
    ------
    KVCacheError
        This machine has no usable GPU, or Triton is missing; the text gives the reason.
    """
    device = options.checked("--device", Device.parse, name)
    if device.kind != "cpu":
        require_gpu(device.index)
    return device


def require_gpu(index: int) -> None:
    """Check that a GPU with this index exists; otherwise it is bad input.

    Raises
    ------
    KVCacheError
        As in ``usable_device``.
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
    """Print an error of the GPU in one line and end the program with exit code 1."""
    try:
        yield
    except CapacityError:
        raise  # bad input: an option sets too little capacity
    except KVCacheError as error:
        tell(f"error: {error}")
        raise typer.Exit(1) from error
