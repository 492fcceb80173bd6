# SPDX-License-Identifier: Apache-2.0
"""What goes into a scheduler, and what it hands out for a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.paged import PagedKVCacheManager
from kvcore.params import require_count
from kvcore.sizing import longest_sequence

__all__ = ["Batch", "Request"]


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """Follow one sequence from its prompt to its last token.

    Parameters
    ----------
    context : context, or callable that returns one
        Holds the prompt. A callable is called when the request is first tried, so that a long queue
        holds no tokens; `num_prompt`, the tokens of the prompt, is then needed.
    left : int
        Tokens still to generate, at most.
    stop_tokens : collection of int
        Each of them ends the sequence.
    siblings : list of Request
        Sequences that go on from the same prompt, each with a context of its own that holds it:
        they are forked when the prompt is computed.
    owner : object
        Whatever the caller wants to find again.

    Attributes
    ----------
    rank, replica : int
        Place in the order of arrival, -1 before it was added; where it runs, or ran last.
    row : int
        Index among the scheduler's `decodes`, -1 elsewhere.
    parent : Request or None
        The request whose prompt it waits for, as one of its siblings.
    cached_tokens : int
        Tokens that were cached when it first ran, loaded ones included, -1 before; of a fork the
        whole prompt.
    written : int
        Tokens that were written when it was last preempted.
    last_token : int
        The token generated last, -1 before the first.
    finish_reason : "length", "stop", "cancelled" or None
        Why it has ended.
    """

    context: Any
    left: int
    stop_tokens: Collection[int] = frozenset()
    siblings: list[Request] = field(default_factory=list)
    num_prompt: int = 0
    owner: Any = None
    rank: int = field(default=-1, init=False)
    replica: int = field(default=0, init=False)
    row: int = field(default=-1, init=False)
    parent: Request | None = field(default=None, init=False)
    cached_tokens: int = field(default=-1, init=False)
    written: int = field(default=0, init=False)
    last_token: int = field(default=-1, init=False)
    finish_reason: Literal["length", "stop", "cancelled"] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prompt or self.context.end_idx
        require_count(left=self.left, num_prompt=self.num_prompt)

    @property
    def unwritten(self) -> int:
        """Tokens of the context that the model has not run yet."""
        return int(self.context.end_idx - self.context.start_idx)


def tenant_of(request: Request, quotas: Collection[str]) -> str | None:
    """Return whose pages a request takes, where that one has a quota."""
    tenant = getattr(request.context, "tenant", None) if quotas else None
    return tenant if tenant in quotas else None


def most_tokens(manager: PagedKVCacheManager, request: Request, most_at_once: int) -> int:
    """Return the tokens that a request could have, were it alone; so many run in one step."""
    pages, quotas = manager.total_num_pages, manager.quotas
    if quotas and not callable(request.context):
        tenant = tenant_of(request, quotas)
        pages -= sum(quota[0] for other, quota in quotas.items() if other != tenant)
        most = None if tenant is None else quotas[tenant][1]
        pages = pages if most is None else min(pages, most)
    return longest_sequence(manager.params, max(pages, 0), most_at_once)


def rivals(
    requests: Iterable[Request], short: Request, quotas: Collection[str]
) -> Iterator[Request]:
    """Yield those whose pages would serve one that is short: of its replica and tenant."""
    tenant = tenant_of(short, quotas)
    for request in requests:
        if request.replica == short.replica and tenant_of(request, quotas) == tenant:
            yield request


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Batch:
    """Say what a step runs: B rows, of which S sequences get a token.

    Attributes
    ----------
    contexts : list of contexts [B]
        The rows, replica after replica.
    inputs : list of RaggedKVCacheInputs
        What the kernels need, one per device.
    requests : list of Request [S]
        Who gets a token. A row whose prompt goes on in a later step gets none, one whose prompt
        ends gets one more for each sibling, directly behind its own.
    rows : int64 [S]
        The row whose last logits tell each of them.
    num_steps : int
        Tokens for each of them; more than 1 only where no prompt runs.
    completed : list of Request
        Those whose prompt, with what they had generated before a preemption, ends with this step.
    admitted, preempted : list of Request
        Those that run from this step on, for the first time or again; those that were sent back to
        the queue.
    copies : int32 [n, 4]
        For a manager without a pool, ``take_copies()``: to be done before the kernels run, in this
        order. A batch that was not booked leaves its own to the next one.
    """

    contexts: list[Any]
    inputs: list[RaggedKVCacheInputs]
    requests: list[Request]
    rows: NDArray[np.int64]
    num_steps: int
    completed: list[Request]
    admitted: list[Request]
    preempted: list[Request]
    copies: NDArray[np.int32]


def hand_out(
    batch: Batch,
    tokens: NDArray[np.int32],
    update: Callable[[list[Any], NDArray[np.int32]], object],
) -> list[Request]:
    """Give every row its tokens, step by step; return the requests that end."""
    contexts, requests = batch.contexts, batch.requests
    by_row = np.zeros((len(tokens), len(contexts)), np.int32)
    by_row[:, batch.rows[::-1]] = tokens[:, ::-1]  # of a family the first, which comes last
    ended: list[Request] = []
    for step in range(len(tokens)):
        update(contexts, by_row[step])  # drops the token of a prompt that goes on
        for request, token in zip(requests, tokens[step].tolist(), strict=True):
            request.last_token = token
            request.left -= 1
            is_stop = token in request.stop_tokens
            if is_stop or request.left == 0:
                request.finish_reason = "stop" if is_stop else "length"
                ended.append(request)
        if ended and step + 1 < len(tokens):  # the rest goes on, a row each
            going_on = [row for row, r in enumerate(requests) if r.finish_reason is None]
            requests = [requests[row] for row in going_on]
            contexts = [contexts[row] for row in going_on]
            tokens = by_row = tokens[:, going_on]
    return ended
