# SPDX-License-Identifier: Apache-2.0
"""One process computes pages, another finds them on disk or continues with them: the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.moving import read_sequence
from programs import printed
from small_model import GROUPS, HIT, PAGE_SIZE, rows_of

SERVE = """
    from small_model import PROMPT, SmallModel, small_manager
    kind, folder, file = sys.argv[1:]
    model = SmallModel()
    with small_manager(kind, "host:64KiB", f"disk:{folder}:4MiB") as manager:
        context, cached = model.prefill(manager, "r", PROMPT)
        manager.export_sequence("r", file)
        print(cached, context.tokens[-1], *model.decode(manager, context, 20))
        print(manager.tier_metrics["disk"].hits, manager.tier_metrics["disk"].corrupt)
        print(hash("the same text") & 0xFFFF)
"""

BEGIN = """
    from small_model import PROMPT, SmallModel, small_manager
    kind, folder, file = sys.argv[1:]
    model = SmallModel()
    with small_manager(kind, "host:64KiB", f"disk:{folder}:4MiB") as manager:
        context, _ = model.prefill(manager, "r", PROMPT)
        print(context.tokens[-1], *model.decode(manager, context, 9))
        manager.export_sequence("r", file)
        print(*model.decode(manager, context, 11))
"""

GO_ON = """
    from kvcore.moving import read_sequence
    from small_model import PROMPT, SmallModel, small_manager
    kind, folder, file = sys.argv[1:]
    model = SmallModel()
    with small_manager(kind, "host:64KiB", f"disk:{folder}:4MiB") as manager:
        context = read_sequence(file).context("moved")
        assert manager.import_sequence(context, file)
        print(manager.metrics.input_tokens, *model.decode(manager, context, 11))
        manager.release("moved")
    with small_manager(kind, "host:64KiB", f"disk:{folder}:4MiB") as manager:
        context, cached = model.prefill(manager, "r", PROMPT)
        print(cached, context.tokens[-1], *model.decode(manager, context, 20))
"""


@pytest.mark.parametrize("kind", GROUPS)
def test_another_process_finds_the_same_bytes_on_disk(kind: str, tmp_path: Path) -> None:
    folder, files = tmp_path / "disk", [tmp_path / "first", tmp_path / "second"]
    cached, *computed, hits, corrupt, hash_1 = printed(SERVE, kind, folder, files[0], seed=1)
    assert (cached, hits, corrupt) == (0, 0, 0)
    found, *tokens, hits, corrupt, hash_2 = printed(SERVE, kind, folder, files[1], seed=2)
    assert (found, hits, corrupt) == (HIT, HIT // PAGE_SIZE, 0)
    assert hash_1 != hash_2
    assert tokens == computed
    assert len({*tokens}) > 3
    first, second = (rows_of(read_sequence(file), HIT) for file in files)
    assert first == second


@pytest.mark.parametrize("kind", GROUPS)
def test_a_request_that_moves_to_another_process_goes_on(kind: str, tmp_path: Path) -> None:
    one, other, file = tmp_path / "one", tmp_path / "other", tmp_path / "request"
    tokens = printed(BEGIN, kind, one, file, seed=1)
    computed, *after = printed(GO_ON, kind, other, file, seed=2)
    assert computed == 1  # the next token to run
    assert after[:11] == tokens[10:]
    # If the whole prompt was in the pages, it is stored like computed pages. With windows some
    # pages are missing, and no checkpoint of a state was made.
    cached, *again = after[11:]
    assert cached == (HIT if kind == "flat" else 0)
    assert again == tokens
