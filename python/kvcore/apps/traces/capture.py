# SPDX-License-Identifier: Apache-2.0
"""Write a trace from the cache events of a running engine."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvcore.apps.traces.canonical import TraceFile
from kvcore.apps.traces.errors import counted
from kvcore.apps.traces.source import MOST_LINES
from kvcore.apps.traces.trace import MAX_REQUEST_TOKENS

if TYPE_CHECKING:
    import os

    from kvcore.events import EventSubscriber, KVEventBatch

__all__ = ["Captured", "capture_trace"]

MOST_NODES = 2**24  # distinct blocks: each takes up to 200 bytes, and more with its token ids
MOST_ROWS = MOST_LINES - 1  # with the header, a reader takes this many; each takes 12 bytes
_DEVICE = (None, "GPU")
_POLL = 0.25
_NOTES = (
    "captured from cache events: a request is a chain of blocks that were stored, with its output",
    "blocks that a request found in the cache have no event: requests with only hits are missing, "
    "so the hit rate is a lower bound",
)


@dataclass
class Captured:
    """What a capture has written and left out.

    Attributes
    ----------
    requests, blocks : int
        Written requests, distinct blocks.
    unknown : int
        Chains whose beginning was stored before the capture.
    left_out : int
        Chains that are too long, whose tokens are not known, or that begin before the window of
        each group of layers.
    twins : int
        With token ids: blocks that have the beginning and the tokens of an earlier block, but
        another hash, because of an adapter, a cache salt or an image.
    """

    requests: int = 0
    blocks: int = 0
    unknown: int = 0
    left_out: int = 0
    twins: int = 0

    def notes(self) -> list[str]:
        """Return the lines of a report."""
        lines = [f"{counted(self.requests, 'request')}, {counted(self.blocks, 'distinct block')}"]
        if self.unknown:
            lines.append(f"begun before the capture: {counted(self.unknown, 'chain')}")
        if self.left_out:
            lines.append(
                f"left out, too long, without tokens or behind a window: "
                f"{counted(self.left_out, 'chain')}"
            )
        if self.twins:
            lines.append(
                f"kept apart by their hashes, not by tokens, such as of two adapters: "
                f"{counted(self.twins, 'block')}"
            )
        return lines


@dataclass
class _Chain:
    """A request: the times of its first and its last event, and its last block."""

    began: float
    last: float
    tip: int


@dataclass
class _Blocks:
    """The tree of all blocks that were ever stored."""

    numbers: dict[Any, int] = field(default_factory=dict)
    parents: array[int] = field(default_factory=lambda: array("i"))
    depths: array[int] = field(default_factory=lambda: array("i"))
    tokens: dict[int, array[int]] = field(default_factory=dict)

    def number(self, key: Any, parent: int) -> int:
        """Return the number of a block; a new block is below `parent`."""
        found = self.numbers.get(key)
        if found is None:
            found = len(self.parents)
            self.numbers[key] = found
            self.parents.append(parent)
            self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        return found

    def path(self, tip: int) -> list[int]:
        """Return the blocks from the beginning of a prompt to `tip`."""
        path = []
        while tip >= 0:
            path.append(tip)
            tip = self.parents[tip]
        return path[::-1]

    def twins(self) -> dict[int, int]:
        """Find the blocks that have the parent and the tokens of an earlier block.

        The hashes of these blocks differ, so they have other content beyond the tokens, such as an
        adapter, a cache salt or an image.

        Returns
        -------
        dict
            For each of these blocks, the number of earlier blocks with its parent and its tokens.
        """
        found: dict[int, int] = {}
        parents = np.array(self.parents)
        order = np.argsort(parents, kind="stable")
        _, starts, counts = np.unique(parents[order], return_index=True, return_counts=True)
        for at in np.flatnonzero(counts > 1).tolist():
            earlier: Counter[bytes] = Counter()
            for block in order[starts[at] : starts[at] + counts[at]].tolist():
                if block in self.tokens:
                    tokens = self.tokens[block].tobytes()
                    if earlier[tokens]:
                        found[block] = earlier[tokens]
                    earlier[tokens] += 1
        return found


def _has_all_hashes(event: Any) -> bool:
    """Return whether an event has a hash for each block of its tokens.

    vLLM leaves out the hashes of the first blocks of a run where a group of layers has a window
    that has passed these blocks. Another group, with full attention, has all hashes.
    """
    return len(event.token_ids) in (0, len(event.block_hashes) * event.block_size)


class ChainReader:
    """Collect the requests that events show.

    Groups of layers store the same blocks in the same batch, with the same hashes: the reader takes
    each run of a batch once, from any group that has all its hashes.

    Parameters
    ----------
    gap : float
        Seconds in which a chain may go on. An event that continues a chain later is a new request.
    with_tokens : bool
        Return token ids in place of numbers of blocks.
    """

    def __init__(self, gap: float, *, with_tokens: bool) -> None:
        self._gap = gap
        self._with_tokens = with_tokens
        self._blocks = _Blocks()
        self._open: dict[int, _Chain] = {}  # by the last block, in the order of the last event
        self._arrivals = array("d")  # of the chains that have ended
        self._tips = array("i")
        self._windowed: set[Any] = set()  # last blocks of chains that no group stored whole
        self._group: int | None = None  # the group whose blocks have this size
        self.block_size = 0
        self.captured = Captured()

    @property
    def is_full(self) -> bool:
        """Whether no more blocks or requests fit."""
        requests = len(self._tips) + len(self._open)
        return len(self._blocks.parents) >= MOST_NODES or requests >= MOST_ROWS

    def take(self, batch: KVEventBatch) -> None:
        """Read the events of a batch.

        Raises
        ------
        ValueError
            A block has no possible size, or a group has blocks of two sizes.
        """
        now = batch.ts
        stored, windowed = set(), set()
        for event in cast("list[Any]", batch.events):
            if not hasattr(event, "token_ids") or not event.block_hashes:
                continue
            if event.medium not in _DEVICE or not self._has_known_size(event):
                continue
            run = (event.parent_block_hash, tuple(event.block_hashes))
            if not _has_all_hashes(event):
                windowed.add((run[0], run[1][-1]))
            elif run not in stored:
                stored.add(run)
                self._store(event, now)
        for parent, tip in windowed:
            if tip not in self._blocks.numbers:
                self._windowed.discard(parent)
                self._windowed.add(tip)
        self._end_chains(now - self._gap)

    def _has_known_size(self, event: Any) -> bool:
        """Return whether the blocks have the size of the trace; ValueError for a bad size."""
        size = event.block_size
        if not 0 < size <= MAX_REQUEST_TOKENS:
            raise ValueError(f"expected blocks of 1 to {MAX_REQUEST_TOKENS} tokens, got {size}")
        if self.block_size == 0:
            self.block_size, self._group = size, event.group_idx
        if self.block_size != size and self._group == event.group_idx:
            raise ValueError(f"expected blocks of {self.block_size} tokens, got {size}")
        return bool(self.block_size == size)

    def _store(self, event: Any, now: float) -> None:
        blocks, size = self._blocks, event.block_size
        parent = -1
        if event.parent_block_hash is not None:
            self.captured.unknown += event.parent_block_hash not in blocks.numbers
            parent = blocks.number(event.parent_block_hash, -1)
        chain = self._open.pop(parent, None)
        if chain is not None and now - chain.last > self._gap:
            self._end(chain)
            chain = None
        first = parent
        for index, key in enumerate(event.block_hashes):
            parent = blocks.number(key, parent)
            if self._with_tokens and len(event.token_ids) == len(event.block_hashes) * size:
                tokens = event.token_ids[index * size : (index + 1) * size]
                blocks.tokens[parent] = array("i", tokens)
        if chain is None:
            chain = _Chain(now, now, first)
        other = self._open.pop(parent, None)
        if other is not None:
            self._end(other)
        chain.last, chain.tip = now, parent
        self._open[parent] = chain

    def _end_chains(self, before: float) -> None:
        while self._open:
            tip, chain = next(iter(self._open.items()))
            if chain.last > before:
                return
            del self._open[tip]
            self._end(chain)

    def _end(self, chain: _Chain) -> None:
        self._arrivals.append(chain.began)
        self._tips.append(chain.tip)

    def finish(self) -> Iterator[dict[str, Any]]:
        """End all chains; yield the rows of the requests in the order of their arrival."""
        self._end_chains(float("inf"))
        self.captured.left_out += len(self._windowed)
        self._windowed.clear()
        self.captured.blocks = len(self._blocks.parents)
        twins = self._blocks.twins() if self._with_tokens else {}
        self.captured.twins = len(twins)
        arrivals = np.array(self._arrivals)
        order = np.argsort(arrivals, kind="stable")
        arrivals -= arrivals.min(initial=np.inf)
        for index in order.tolist():
            tip = self._tips[index]
            prompt = self._prompt(tip, twins)
            if prompt is None:
                self.captured.left_out += 1
                continue
            self.captured.requests += 1
            tokens = self._blocks.depths[tip] * self.block_size
            yield {"time": float(arrivals[index]), "input": tokens, "output": 1} | prompt

    def _prompt(self, tip: int, twins: dict[int, int]) -> dict[str, Any] | None:
        """Return the fields of a prompt; None if it is too long, or if its tokens are not known."""
        blocks, size = self._blocks, self.block_size
        if blocks.depths[tip] * size > MAX_REQUEST_TOKENS:
            return None
        path = blocks.path(tip)
        if not self._with_tokens:
            return {"blocks": path}
        if not all(each in blocks.tokens for each in path):
            return None
        keys = [[at * size, twins[each]] for at, each in enumerate(path) if each in twins]
        prompt = {"tokens": [token for each in path for token in blocks.tokens[each]]}
        return prompt | {"keys": keys} if keys else prompt


def capture_trace(
    subscriber: EventSubscriber,
    path: str | os.PathLike[str],
    *,
    seconds: float = float("inf"),
    gap: float = 10.0,
    with_tokens: bool = False,
) -> Captured:
    """Write the requests that the events of an engine show, in the order of their arrival.

    The rows are written at the end, because a request that arrived first may end last. Memory grows
    by up to 200 bytes for each distinct block, with token ids by 150 bytes and 4 bytes for each
    token more, and by 12 bytes for each request.

    Parameters
    ----------
    subscriber : EventSubscriber
        Receives the events.
    path : str or os.PathLike
        The file, see `write_trace`; it has its name after the end of the capture.
    seconds : float
        End after this time, at KeyboardInterrupt, or at `MOST_NODES` blocks or `MOST_ROWS`
        requests.
    gap : float
        Seconds in which a request may store its next block.
    with_tokens : bool
        Write the token ids of the prompts, which are the prompts.

    Raises
    ------
    ValueError
        No event with blocks arrived, or all chains are left out; no file is written. The events
        have blocks of several sizes.
    """
    reader = ChainReader(gap, with_tokens=with_tokens)
    until = time.monotonic() + seconds
    with TraceFile(path) as file:
        try:
            while (left := until - time.monotonic()) > 0 and not reader.is_full:
                for batch in subscriber.receive(timeout=min(left, _POLL)):
                    reader.take(batch)
        except KeyboardInterrupt:
            pass
        rows = reader.finish()
        row = next(rows, None)
        if row is None:
            raise ValueError(_nothing(reader.captured))
        more = {} if with_tokens else {"block_size": reader.block_size}
        file.header("tokens" if with_tokens else "blocks", _notes(reader), **more)
        file.row(row)
        for row in rows:
            file.row(row)
    return reader.captured


def _nothing(captured: Captured) -> str:
    got = "none"
    if captured.left_out:
        got = (
            f"only {counted(captured.left_out, 'chain')} too long, without tokens or behind a "
            f"window"
        )
    return f"expected events of stored blocks, got {got}"


def _notes(reader: ChainReader) -> list[str]:
    twins = reader.captured.notes()[1:] if reader.captured.twins else []
    return [f"blocks of {reader.block_size} tokens", *_NOTES, *twins[-1:]]
