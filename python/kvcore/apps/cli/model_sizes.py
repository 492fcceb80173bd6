# SPDX-License-Identifier: Apache-2.0
"""Make the pools of ``kvcore replay`` for a model with windows, chunks or states."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Protocol

import typer

from kvcore import KVCacheParams
from kvcore.apps.cli.options import MOST_PAGES, checked, listed
from kvcore.apps.cli.options import pages as read_pages
from kvcore.apps.replay.model_pools import model_pool, with_checkpoints, with_host_tier
from kvcore.replay import PoolSettings
from kvcore.support.byte_sizes import parse_size

__all__ = ["model_pools", "pages_or_none"]


class Sizes(Protocol):
    """The options that this module reads: fields of `PoolSizes`."""

    @property
    def replicas(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def pages(self) -> str | None: ...
    @property
    def memory(self) -> str | None: ...
    @property
    def host_pages(self) -> str | None: ...
    @property
    def host_memory(self) -> str | None: ...
    @property
    def disk_pages(self) -> str | None: ...
    @property
    def disk(self) -> str | None: ...
    @property
    def state_slots(self) -> str | None: ...
    @property
    def checkpoint_every(self) -> int | None: ...


def model_pools(sizes: Sizes, model: KVCacheParams) -> list[PoolSettings]:
    """Return a pool for each size of the device and of the host tier; bad input if none fits."""
    if sizes.disk_pages is not None or sizes.disk is not None:
        raise typer.BadParameter(
            "expected no disk with a model whose layers keep windows, chunks or states; "
            "--bytes-per-token instead of --model replays a disk with pages of all layers"
        )
    if sizes.checkpoint_every is not None:
        model = checked("--checkpoint-every", with_checkpoints, model, sizes.checkpoint_every)
    states = _states(sizes, model)
    fields = {"replicas": sizes.replicas, "requests": sizes.requests, **states}
    kind, found = _sizes("--pages", sizes.pages, "--memory", sizes.memory)
    pools = [
        checked(f"--{kind}", partial(model_pool, model, **{kind: size}, **fields)) for size in found
    ]
    pools = list(dict.fromkeys(pools))
    if sizes.host_pages is None and sizes.host_memory is None:
        return pools
    share = {name: value for name, value in states.items() if name == "state_share"}
    kind, found = _sizes("--host-pages", sizes.host_pages, "--host-memory", sizes.host_memory)
    tiers = [
        _no_tier if size == 0 and len(found) > 1 else partial(_tier, kind, size, share)
        for size in found
    ]
    return [tier(pool) for tier in tiers for pool in pools]


def pages_or_none(text: str) -> int:
    """Read a number of pages, or 0 for no tier."""
    return 0 if text == "0" else read_pages(text)


def _sizes(
    by_pages: str, pages: str | None, by_memory: str, memory: str | None
) -> tuple[str, tuple[int, ...]]:
    """Return "pages" or "memory", and the sizes of the option that is given."""
    if pages is not None and memory is not None:
        raise typer.BadParameter(f"expected {by_pages} or {by_memory}, not both")
    if memory is not None:
        return "memory", checked(by_memory, listed, memory, parse_size)
    assert pages is not None
    may_be_none = by_pages == "--host-pages" and "," in pages
    return "pages", checked(by_pages, listed, pages, pages_or_none if may_be_none else read_pages)


def _states(sizes: Sizes, model: KVCacheParams) -> dict[str, Any]:
    """Return the number or the share of state slots, if an option gives it."""
    if sizes.state_slots is None:
        return {}
    if not model.state_groups:
        raise typer.BadParameter(
            "expected a model whose layers keep a state", param_hint="'--state-slots'"
        )
    return checked("--state-slots", _read_slots, sizes.state_slots)


def _tier(kind: str, size: int, share: dict[str, Any], pool: PoolSettings) -> PoolSettings:
    """Put a host tier below a pool."""
    return checked(f"--host-{kind}", partial(with_host_tier, pool, **{kind: size}, **share))


def _no_tier(pool: PoolSettings) -> PoolSettings:
    """Return a pool as it is."""
    return pool


def _read_slots(text: str) -> dict[str, Any]:
    """Read a number of state slots, or their share of the memory in percent."""
    if text.endswith("%"):
        try:
            share = float(text[:-1]) / 100
        except ValueError:
            share = math.nan
        if not 0 < share < 1:
            raise ValueError(f"expected more than 0% and less than 100%, got {text!r}")
        return {"state_share": share}
    try:
        slots = int(text)
    except ValueError:
        slots = 0
    if not 1 <= slots <= MOST_PAGES:
        raise ValueError(f"expected 1 to {MOST_PAGES}, or a share such as 25%, got {text!r}")
    return {"state_slots": slots}
