# SPDX-License-Identifier: Apache-2.0
"""Processes that share a server: one process computes a prompt, another process loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcore.moving import read_sequence
from programs import printed
from small_model import HIT, PAGE_SIZE, PROMPT, SmallModel, rows_of

PAGES = HIT // PAGE_SIZE

SERVE = """
    from small_model import PROMPT, SmallModel, small_manager
    kind, url, file = sys.argv[1:]
    model = SmallModel()
    with small_manager(kind, "host:64KiB", url) as manager:
        context, cached = model.prefill(manager, "r", PROMPT)
        manager.export_sequence("r", file)
        print(cached, context.tokens[-1], *model.decode(manager, context, 20))
        found = manager.tier_metrics[url.partition(":")[0]]
        print(found.hits, found.corrupt)
        print(hash("the same text") & 0xFFFF)
"""


def serve(
    manager: Any, tokens: list[int] = PROMPT, name: str = "r", **keys: Any
) -> tuple[int, list[int]]:
    """Return the number of cached tokens, and the tokens generated after the prompt."""
    model = SmallModel()
    context, cached = model.prefill(manager, name, tokens, **keys)
    answer = [int(context.tokens[-1]), *model.decode(manager, context, 5)]
    manager.release(name)
    return cached, answer


def expect_the_same_bytes(kind: str, url: str, folder: Path) -> None:
    """Run two processes with different hash seeds one after the other, and compare their bytes."""
    files = [folder / "first", folder / "second"]
    cached, *computed, hits, corrupt, hash_1 = printed(SERVE, kind, url, files[0], seed=1)
    assert (cached, hits, corrupt) == (0, 0, 0)
    found, *tokens, hits, corrupt, hash_2 = printed(SERVE, kind, url, files[1], seed=2)
    assert (found, hits, corrupt) == (HIT, PAGES, 0)
    assert hash_1 != hash_2
    assert tokens == computed
    first, second = (rows_of(read_sequence(file), HIT) for file in files)
    assert first == second
