# SPDX-License-Identifier: Apache-2.0
"""Random requests over groups of layers with lower stores: every layer reads the written values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grouped_traffic import SHAPES, Traffic, with_host_tier
from kvcore.paged import PagedKVCacheManager
from kvcore.stores import MemoryStore
from tiered_requests import DictStore

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

VERBS = ["claim", "claim", "step", "step", "step", "step", "release", "fork", "crowd_out"]


def tiers_of(kind: str, folder: Path, kept: list[Any]) -> list[Any]:
    """Return stores; the stores in `kept` stay for the next manager."""
    if not kept:
        kept += [MemoryStore(1 << 22), DictStore(), MemoryStore(20_000)]
    disk = f"disk:{folder}:4MiB"
    return {
        "memory": [kept[0]],
        "own": [kept[1]],
        "disk": [disk],
        "small memory over disk": [kept[2], disk],
    }[kind]


def hits_of(manager: PagedKVCacheManager) -> int:
    return sum(each.hits for name, each in manager.tier_metrics.items() if name != "host")


@pytest.mark.parametrize("kind", ["memory", "own", "disk", "small memory over disk"])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_layers_read_what_was_written_for_them(kind: str, shape: str, tmp_path: Path) -> None:
    kept: list[Any] = []
    params = with_host_tier(SHAPES[shape], 40)
    found = 0
    for seed in (3, 3, 4):  # the second manager has the first manager's prompts
        tiers = tiers_of(kind, tmp_path, kept)
        traffic = Traffic(params, seed, 40, tiers=tiers, async_onload=seed == 4)
        traffic.act(VERBS, 80)
        traffic.end()
        manager = traffic.manager
        manager.flush(timeout=60)
        manager.check_integrity()
        found += hits_of(manager)
        corrupt = [each.corrupt + each.timeouts for each in manager.tier_metrics.values()]
        assert sum(corrupt) == 0
        manager.close()
        assert traffic.read > 0
    assert found > 0
