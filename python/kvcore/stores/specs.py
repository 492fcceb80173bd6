# SPDX-License-Identifier: Apache-2.0
"""Read the texts that name tiers, such as ``disk:/var/cache/kv:200GiB``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvcore.byte_sizes import parse_size

__all__ = ["DiskTier", "HostTier", "TierSpec", "parse_tier"]


@dataclass(frozen=True)
class HostTier:
    """A tier in host memory.

    Parameters
    ----------
    bytes : int
        Of pages, at least 1.
    """

    bytes: int

    def __post_init__(self) -> None:
        _check_bytes(self.bytes)


@dataclass(frozen=True)
class DiskTier:
    """A tier on local disks.

    Parameters
    ----------
    directories : tuple of (str, int)
        Paths, and the bytes that the files of each may take.
    """

    directories: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if not self.directories:
            raise ValueError("a disk tier without directories; give it one")
        for path, size in self.directories:
            if not path or "\0" in path:
                raise ValueError(f"a directory of a disk tier is {path!r}; give its path")
            _check_bytes(size)
        paths = [path for path, _ in self.directories]
        if len({*paths}) < len(paths):
            raise ValueError(f"the directories {paths} name one twice; name each once")


TierSpec: TypeAlias = HostTier | DiskTier


def parse_tier(text: str) -> TierSpec:
    """Read a tier.

    Parameters
    ----------
    text : str
        ``"host:SIZE"``, or ``"disk:PATH:SIZE"`` with more ``PATH:SIZE`` behind commas for more
        disks. Sizes are such as ``200GiB``, ``1.5TB`` or ``4096`` (bytes).

    Returns
    -------
    HostTier or DiskTier

    Raises
    ------
    ValueError
        For anything else; the text says what is wrong and shows one that is right.

    Examples
    --------
    >>> from kvcore.stores import parse_tier
    >>> parse_tier("host:8GiB")
    HostTier(bytes=8589934592)
    >>> parse_tier("disk:/mnt/a/kv:1TB,/mnt/b/kv:500GB")
    DiskTier(directories=(('/mnt/a/kv', 1000000000000), ('/mnt/b/kv', 500000000000)))
    """
    if not isinstance(text, str):
        raise TypeError(f"a tier is a {type(text).__name__}, must be a text such as 'host:8GiB'")
    kind, colon, rest = text.partition(":")
    if kind not in _KINDS or not colon:
        known = ", ".join(f"{name}:" for name in _KINDS)
        raise ValueError(
            f"tier {text!r} must begin with one of {known}; for example 'host:8GiB' or "
            "'disk:/var/cache/kv:200GiB'"
        )
    read, example = _KINDS[kind]
    try:
        return read(rest)
    except ValueError as error:
        raise ValueError(f"tier {text!r}: {error}; for example {example!r}") from None


def _host(text: str) -> HostTier:
    return HostTier(parse_size(text))


def _disk(text: str) -> DiskTier:
    return DiskTier(tuple(_directory(item) for item in text.split(",")))


def _directory(text: str) -> tuple[str, int]:
    path, colon, size = text.rpartition(":")
    if not colon:
        raise ValueError(f"{text!r} lacks a size behind the path")
    return path, parse_size(size)


def _check_bytes(size: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"a tier's size is a {type(size).__name__}, must be an int of bytes")
    if not 1 <= size < 1 << 60:
        raise ValueError(f"a tier of {size} bytes; must be 1 to 2**60 - 1")


_KINDS: dict[str, tuple[Callable[[str], TierSpec], str]] = {
    "host": (_host, "host:8GiB"),
    "disk": (_disk, "disk:/var/cache/kv:200GiB"),
}
