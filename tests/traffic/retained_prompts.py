# SPDX-License-Identifier: Apache-2.0
"""Requests with priorities and hints, and the order in which a full pool evicts their prompts."""

from __future__ import annotations

import itertools
from typing import Any

from kvcore import TextGenerationContext


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return self.now


_names = itertools.count()


def serve(mgr: Any, prompt: list[int], **rest: Any) -> None:
    """Serve a request that computes its prompt and one token."""
    context = TextGenerationContext(f"r{next(_names)}", prompt, **rest)
    mgr.claim(context.request_id)
    assert mgr.reserve(context)
    context.update(7)
    mgr.step([context])
    mgr.release(context.request_id)


def lost(mgr: Any, prompts: list[list[int]], n: int) -> list[int]:
    """Return the prompts that lose pages first, while unseen requests take one page each."""
    order: list[int] = []
    full = {i: mgr.match_prefix(prompt) for i, prompt in enumerate(prompts)}
    while len(order) < n:
        name = f"unseen {next(_names)}"
        mgr.claim(name)
        assert mgr.reserve(TextGenerationContext(name, [100_000 + next(_names)]))
        order += [i for i in full if i not in order and mgr.match_prefix(prompts[i]) < full[i]]
    return order
