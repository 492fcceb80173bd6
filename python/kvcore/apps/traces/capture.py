# SPDX-License-Identifier: Apache-2.0
"""Write a trace from the cache events of a running engine."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from kvcore.apps.traces.canonical import TraceFile
from kvcore.apps.traces.errors import counted
from kvcore.apps.traces.trace import MAX_REQUEST_TOKENS

if TYPE_CHECKING:
    import os

    from kvcore.events import EventSubscriber, KVEventBatch

__all__ = ["Captured", "capture_trace"]

MOST_NODES = 2**24  # distinct blocks: each takes about 200 bytes
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
    """

    requests: int = 0
    blocks: int = 0
    unknown: int = 0
    left_out: int = 0

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
        return lines


@dataclass
class _Chain:
    """A request: the time of its first event, of its last event, and its last block."""

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


def _has_all_hashes(event: Any) -> bool:
    """Return whether an event has a hash for each block of its tokens.

    vLLM leaves out the hashes of the first blocks of a run where a group of layers has a window
    and the blocks are behind it. Another group, with full attention, has all hashes.
    """
    return len(event.token_ids) in (0, len(event.block_hashes) * event.block_size)


class ChainReader:
    """Turn events into rows.

    Groups of layers store the same blocks in the same batch, with the same hashes: the reader takes
    each run of a batch once, from any group that has all its hashes.

    Parameters
    ----------
    gap : float
        Seconds in which a chain may go on. An event that continues a chain later is a new request.
    with_tokens : bool
        Write token ids in place of numbers of blocks.
    """

    def __init__(self, gap: float, *, with_tokens: bool) -> None:
        self._gap = gap
        self._with_tokens = with_tokens
        self._blocks = _Blocks()
        self._open: dict[int, _Chain] = {}  # by the last block, in the order of the last event
        self._start: float | None = None
        self._windowed: set[Any] = set()  # last blocks of chains that no group stored whole
        self._group: int | None = None  # the group whose blocks have this size
        self.block_size = 0
        self.captured = Captured()

    @property
    def is_full(self) -> bool:
        """Whether no more blocks fit."""
        return len(self._blocks.parents) >= MOST_NODES

    def take(self, batch: KVEventBatch) -> Iterator[dict[str, Any]]:
        """Read the events of a batch; yield the rows of chains that no longer go on.

        Raises
        ------
        ValueError
            A block has no possible size, or a group has blocks of two sizes.
        """
        if self._start is None:
            self._start = batch.ts
        now = max(0.0, batch.ts - self._start)
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
                yield from self._store(event, now)
        for parent, tip in windowed:
            if tip not in self._blocks.numbers:
                self._windowed.discard(parent)
                self._windowed.add(tip)
        yield from self._end(now - self._gap)

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

    def _store(self, event: Any, now: float) -> Iterator[dict[str, Any]]:
        blocks, size = self._blocks, event.block_size
        parent = -1
        if event.parent_block_hash is not None:
            self.captured.unknown += event.parent_block_hash not in blocks.numbers
            parent = blocks.number(event.parent_block_hash, -1)
        chain = self._open.get(parent)
        is_new = chain is None or now - chain.last > self._gap
        if chain is not None:
            del self._open[parent]
            if is_new:
                yield from self._row(chain)
        first = parent
        for index, key in enumerate(event.block_hashes):
            parent = blocks.number(key, parent)
            if self._with_tokens and len(event.token_ids) == len(event.block_hashes) * size:
                tokens = event.token_ids[index * size : (index + 1) * size]
                blocks.tokens[parent] = array("i", tokens)
        if chain is None or is_new:
            chain = _Chain(now, now, first)
        other = self._open.pop(parent, None)
        if other is not None:
            yield from self._row(other)
        chain.last, chain.tip = now, parent
        self._open[parent] = chain

    def _end(self, before: float) -> Iterator[dict[str, Any]]:
        while self._open:
            tip, chain = next(iter(self._open.items()))
            if chain.last > before:
                return
            del self._open[tip]
            yield from self._row(chain)

    def finish(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of all chains."""
        yield from self._end(float("inf"))
        self.captured.left_out += len(self._windowed)
        self._windowed.clear()

    def _row(self, chain: _Chain) -> Iterator[dict[str, Any]]:
        blocks = self._blocks
        tokens = blocks.depths[chain.tip] * self.block_size
        path = blocks.path(chain.tip) if tokens <= MAX_REQUEST_TOKENS else []
        if not path or (self._with_tokens and not all(each in blocks.tokens for each in path)):
            self.captured.left_out += 1
            return
        self.captured.requests += 1
        self.captured.blocks = len(blocks.parents)
        row: dict[str, Any] = {"time": chain.began, "input": tokens, "output": 1}
        if self._with_tokens:
            row["tokens"] = [token for each in path for token in blocks.tokens[each]]
        else:
            row["blocks"] = path
        yield row


def capture_trace(
    subscriber: EventSubscriber,
    path: str | os.PathLike[str],
    *,
    seconds: float = float("inf"),
    gap: float = 10.0,
    with_tokens: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Captured:
    """Write the requests that the events of an engine show.

    Parameters
    ----------
    subscriber : EventSubscriber
        Receives the events.
    path : str or os.PathLike
        The file, see `write_trace`; it has its name after the end of the capture.
    seconds : float
        End after this time, or at KeyboardInterrupt.
    gap : float
        Seconds in which a request may store its next block.
    with_tokens : bool
        Write the token ids of the prompts, which are the prompts.
    on_progress : callable, optional
        Called with the number of requests until now.

    Raises
    ------
    ValueError
        No event with blocks arrived; no file is written. The events have blocks of several sizes.
    """
    reader = ChainReader(gap, with_tokens=with_tokens)
    until = time.monotonic() + seconds
    with TraceFile(path) as file:
        begun = False

        def write(rows: Iterator[dict[str, Any]]) -> None:
            nonlocal begun
            for row in rows:
                if not begun:
                    begun = True
                    more = {} if with_tokens else {"block_size": reader.block_size}
                    file.header("tokens" if with_tokens else "blocks", _notes(reader), **more)
                file.row(row)
                if on_progress is not None:
                    on_progress(reader.captured.requests)

        try:
            while (left := until - time.monotonic()) > 0 and not reader.is_full:
                for batch in subscriber.receive(timeout=min(left, _POLL)):
                    write(reader.take(batch))
        except KeyboardInterrupt:
            pass
        write(reader.finish())
        if not begun:
            raise ValueError("expected events of stored blocks, got none")
    return reader.captured


def _notes(reader: ChainReader) -> list[str]:
    return [f"blocks of {reader.block_size} tokens", *_NOTES]
