# SPDX-License-Identifier: Apache-2.0
"""Devices, named by kind and index."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["DLPACK_TYPES", "Device", "checked_devices"]

#: The kinds of devices, each with its DLDeviceType of the DLPack header.
DLPACK_TYPES = {"cpu": 1, "cuda": 2}

_INDEXED = [kind for kind in DLPACK_TYPES if kind != "cpu"]
_PATTERN = re.compile(rf"cpu|({'|'.join(_INDEXED)})(?::(\d+))?")


@dataclass(frozen=True, slots=True)
class Device:
    """Name a device: ``Device("cuda", 0)`` prints as ``cuda:0``, ``Device("cpu")`` as ``cpu``.

    Parameters
    ----------
    kind : {"cpu", "cuda"}
    index : int
        Index of the device; 0 for "cpu".

    Raises
    ------
    ValueError
        The kind is unknown, or the index is out of range.

    Examples
    --------
    >>> from kvcore import Device
    >>> Device.parse("cuda:1")
    Device(kind='cuda', index=1)
    >>> str(Device("cpu"))
    'cpu'
    """

    kind: str
    index: int = 0

    def __post_init__(self) -> None:
        if self.kind not in DLPACK_TYPES:
            kinds = " or ".join(map(repr, DLPACK_TYPES))
            raise ValueError(f"device kind is {self.kind!r}, must be {kinds}")
        if self.index < 0 or (self.kind == "cpu" and self.index != 0):
            raise ValueError(
                f"device index is {self.index}, must be 0 for 'cpu' and at least 0 for 'cuda'"
            )

    @classmethod
    def parse(cls, device: Device | str) -> Device:
        """Read "cpu", "cuda" or "cuda:<index>"; a Device is returned as it is."""
        if isinstance(device, cls):
            return device
        if not isinstance(device, str):
            raise TypeError(f"device is a {type(device).__name__}, must be a str or kvcore.Device")
        found = _PATTERN.fullmatch(device)
        if found is None:
            raise ValueError(f"device is {device!r}, must be 'cpu', 'cuda' or 'cuda:<index>'")
        return cls(found[1], int(found[2] or 0)) if found[1] else cls("cpu")

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"


def checked_devices(devices: Iterable[Device | str], count: int) -> tuple[Device, ...]:
    """Return the parsed devices; raise ValueError unless there are `count` devices."""
    places = tuple(Device.parse(device) for device in devices)
    if len(places) != count:
        raise ValueError(
            f"{len(places)} devices are given, params.n_devices is {count}; name each device once"
        )
    return places
