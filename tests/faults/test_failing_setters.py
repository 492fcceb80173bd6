# SPDX-License-Identifier: Apache-2.0
"""Foreign contexts whose indices cannot be set: their reservations and forks are undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from builders import make_context
from foreign_context import Context
from meddling_copies import SCENES, Setup, Stage


class Stubborn(Context):
    """A context that fails one assignment of an index, before or after the assignment."""

    fails_at = 0
    keeps = False

    def __setattr__(self, name: str, value: Any) -> None:
        changes = name in ("start_idx", "active_idx") and getattr(self, name, value) != value
        if changes and self.fails_at > 0:
            self.fails_at -= 1
            if self.fails_at == 0:
                if self.keeps:
                    super().__setattr__(name, value)
                raise RuntimeError(f"{name} stays")
        super().__setattr__(name, value)


class Frozen(Stubborn):
    """A context that fails every assignment after the first failure."""

    def __setattr__(self, name: str, value: Any) -> None:
        before = self.fails_at
        try:
            super().__setattr__(name, value)
        except RuntimeError:
            super().__setattr__("fails_at", before)
            raise


def stubborn(stage: Stage, tokens: Any, fails_at: int, keeps: bool, kind: Any = Stubborn) -> Any:
    """Return a context whose first chunk ends within the hit, so both indices must change."""
    context = kind(f"stubborn-{len(stage.contexts)}", tokens, active_idx=5)
    context.fails_at, context.keeps = fails_at, keeps
    stage.contexts.append(context)
    return context


VERBS: dict[str, Callable[[Any, list[Any]], object]] = {
    "maybe_reserve": lambda manager, rows: [manager.maybe_reserve(c) for c in rows],
    "maybe_reserve_batch": lambda manager, rows: manager.maybe_reserve_batch(rows),
    "fetch": lambda manager, rows: manager.fetch(rows),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("fails_at", [1, 2])
@pytest.mark.parametrize("cached", [8, 7])  # whole pages, or pages with a copy
def test_setter_that_fails_undoes_the_reservation(
    verb: str, keeps: bool, fails_at: int, cached: int
) -> None:
    stage = Stage(Setup(foreign=True))
    stage.cached(range(12))
    plain = stage.claimed([*range(cached), 60])
    context = stubborn(stage, [*range(cached), 50, 51], fails_at, keeps)
    late = stage.claimed([*range(cached), 61])
    stage.manager.external_claim(context.request_id)
    with pytest.raises(RuntimeError, match="stays"):
        VERBS[verb](stage.manager, [plain, context, late])
    assert stage.state_of(plain) == (cached // 4 + 1, cached, cached + 1)
    assert stage.state_of(context) == (0, 0, 5)
    assert stage.state_of(late) == (0, 0, cached + 1)
    stage.manager.check_integrity()
    metrics = stage.manager.metrics
    stage.manager.release(plain.request_id)
    assert stage.manager.num_free_blocks == 24
    VERBS[verb](stage.manager, [context, late])
    assert context.start_idx == cached
    assert stage.manager.metrics.cache_tokens == metrics.cache_tokens + 2 * cached
    stage.close()


@pytest.mark.parametrize("verb", VERBS)
def test_setter_that_fails_after_a_load(verb: str) -> None:
    scene = SCENES["load from the host"](Setup(foreign=True))
    stage = scene.stage
    context = stubborn(stage, range(14), 2, False)
    stage.manager.external_claim(context.request_id)
    with pytest.raises(RuntimeError, match="stays"):
        VERBS[verb](stage.manager, [context])
    assert stage.state_of(context) == (0, 0, 5)
    stage.manager.check_integrity()
    VERBS[verb](stage.manager, [context])
    assert context.start_idx == 12
    stage.close()


@pytest.mark.parametrize("kind", [Stubborn, Frozen])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("fails_at", [1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1)])
def test_fork_whose_child_cannot_be_moved_claims_none(
    order: tuple[int, ...], fails_at: int, keeps: bool, kind: Any
) -> None:
    stage = Stage(Setup(foreign=True))
    parent = stage.served(range(7))
    before = stage.state(), stage.manager.num_free_blocks
    tokens = [*range(7), 50]
    own = make_context(tokens, "own", active_idx=3)
    plain = stage.new(tokens)
    plain.active_idx = 3
    bad = stubborn(stage, tokens, fails_at, keeps, kind)
    children = [(own, plain, bad)[k] for k in order]
    with pytest.raises(RuntimeError, match="stays"):
        stage.manager.fork(parent.request_id, *children)
    assert (stage.state(), stage.manager.num_free_blocks) == before
    assert not any(stage.manager.contains(child.request_id) for child in children)
    stage.manager.check_integrity()
    assert (own.start_idx, own.active_idx) == (plain.start_idx, plain.active_idx) == (0, 3)
    if kind is Stubborn:
        assert (bad.start_idx, bad.active_idx) == (0, 5)
        stage.manager.fork(parent.request_id, *children)
        assert own.start_idx == plain.start_idx == bad.start_idx == 7
        stage.contexts.append(own)
    stage.close()
