# SPDX-License-Identifier: Apache-2.0
"""Read request traces in the Mooncake format.

One JSON object per line: ``timestamp`` (milliseconds from the start), ``input_length`` and
``output_length`` (tokens) and ``hash_ids``, one id per block of 512 prompt tokens. The last block
may be partial. Equal ids mean an equal prefix up to and including the block. The format comes
from the FAST'25 paper on Mooncake (repository kvcache-ai/Mooncake).
"""

from __future__ import annotations

import json
import math
import os
import zlib
from array import array
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcore.apps.replay.trace_lines import LineError, filled_lines
from kvcore.apps.replay.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

BLOCK_TOKENS = 512
MAX_TOKEN_IDS = 2**31
MAX_HASH_ID = 2**63 - 1
MAX_BLOCKS = 2**26  # of all requests: a block takes about 40 bytes during reading
#: Maximum tokens of a prompt, and of an output; no model has a longer context. The bound limits the
#: memory, because a short row can contain any number, and each prompt token takes four bytes.
MAX_REQUEST_TOKENS = 2**24
_COUNT = f"a positive integer, at most {MAX_REQUEST_TOKENS} tokens"
_SHOWN_CHARACTERS = 40


class TraceError(ValueError):
    """Raised for a bad trace; the text has the line, the field and the expected value."""

    def __init__(self, path: str, line: int | None, what: str) -> None:
        place = path if line is None else f"{path}:{line}"
        super().__init__(f"{place}: {what}")
        self.path = path
        self.line = line


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TraceWorkload(Workload):
    """Expand the block ids of a trace to tokens, one request at a time.

    Every distinct block has its own 512 token ids, so equal blocks have equal tokens and different
    blocks share no token. Output tokens differ from all block tokens and from each other: their ids
    follow the ids of the blocks. They are computed on demand.

    Attributes
    ----------
    first_output, num_outputs : int
        Id of the first output token; number of all output tokens.
    block_tokens : numpy.ndarray
        int32 ``[blocks, 1]``, first token of every block of every request, in order.
    block_starts : list of int
        Index of the first block of each request in `block_tokens`, ``n + 1`` entries.
    """

    first_output: int
    num_outputs: int
    block_tokens: NDArray[np.int32]
    block_starts: list[int]
    _scratch: NDArray[np.int32] = field(init=False)
    _offsets: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        most = int(np.diff(self.block_starts).max())
        object.__setattr__(self, "_scratch", np.zeros((most, BLOCK_TOKENS), np.int32))
        object.__setattr__(self, "_offsets", np.arange(BLOCK_TOKENS, dtype=np.int32))

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Return the prompt of one request (valid until the next call)."""
        first, last = self.block_starts[index], self.block_starts[index + 1]
        rows = self._scratch[: last - first]
        np.add(self.block_tokens[first:last], self._offsets, out=rows)
        tokens: NDArray[np.int32] = rows.reshape(-1)[: self.prompt_lengths[index]]
        return tokens

    def output_tokens_at(self, places: NDArray[np.int64]) -> NDArray[np.int32]:
        """Compute the ids of output tokens from their places."""
        tokens = np.minimum(places, self.num_outputs - 1) + self.first_output
        return tokens.astype(np.int32)


def read_trace(path: str | os.PathLike[str], *, limit: int | None = None) -> TraceWorkload:
    """Read a trace, plain or gzip-compressed.

    Parameters
    ----------
    path : str or os.PathLike
        A file or a pipe, read once. Its first bytes show the compression, not its name.
    limit : int, optional
        Stop after this many requests.

    Returns
    -------
    TraceWorkload
        The requests in the order of the file.

    Raises
    ------
    TraceError
        A row does not follow the format: the text has the file, the line, the field and the
        expected value. The file cannot be read or is empty. The distinct blocks need more token
        ids than int32 has. The text or the blocks exceed the bounds of
        ``kvcore.apps.replay.trace_lines`` and `MAX_BLOCKS`.
    """
    name = os.fspath(path)
    rows = _Rows(name)
    try:
        for number, text in islice(filled_lines(name), limit):
            rows.add(number, text)
        return rows.finish()
    except LineError as error:
        raise TraceError(name, error.line, str(error)) from None
    except MemoryError as error:
        raise TraceError(name, None, f"{rows.told()} need more memory than there is") from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(name, None, f"cannot be read: {reason}") from error


class _Rows:
    """Collect checked rows, and convert them to arrays at the end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._timestamps: list[float] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._ids = array("q")
        self._starts: list[int] = [0]

    def add(self, line: int, text: str) -> None:
        """Check one row and append it, or raise TraceError."""
        try:
            row = _parse(text)
            timestamp = _checked(row, "timestamp", _is_time, "a number of milliseconds >= 0")
            inputs = _checked(row, "input_length", _is_count, _COUNT)
            outputs = _checked(row, "output_length", _is_count, _COUNT)
            ids = _checked(row, "hash_ids", _are_ids, "a list of integers from 0 to 2**63 - 1")
            _check_block_count(inputs, len(ids))
            _check_blocks(len(self._ids) + len(ids))
        except ValueError as error:
            raise TraceError(self._path, line, str(error)) from None
        self._timestamps.append(timestamp)
        self._inputs.append(inputs)
        self._outputs.append(outputs)
        self._ids.extend(ids)
        self._starts.append(len(self._ids))

    def told(self) -> str:
        """Return a phrase with the number of requests and the longest prompt."""
        longest = max(self._inputs, default=0)
        return f"{len(self._inputs)} requests of up to {longest} tokens"

    def finish(self) -> TraceWorkload:
        """Assign token ids to every block and every output token, and return the workload."""
        if not self._inputs:
            raise TraceError(self._path, None, "expected at least one request, got an empty file")
        count = len(self._inputs)
        outputs = np.array(self._outputs, np.int64)
        distinct, dense = np.unique(np.frombuffer(self._ids, np.int64), return_inverse=True)
        first_output = len(distinct) * BLOCK_TOKENS
        last_token = first_output + int(outputs.sum())
        if last_token > MAX_TOKEN_IDS:
            raise TraceError(self._path, None, _too_many(len(distinct), int(outputs.sum())))
        return TraceWorkload(
            name=Path(self._path).name,
            arrivals=np.array(self._timestamps, np.float64) / 1e3,
            prompt_lengths=np.array(self._inputs, np.int64),
            output_lengths=outputs,
            first_output=first_output,
            num_outputs=last_token - first_output,
            output_starts=np.cumsum(outputs) - outputs,
            next_turns=np.full(count, -1, np.int64),
            think_times=np.zeros(count),
            block_tokens=(dense.reshape(-1, 1) * BLOCK_TOKENS).astype(np.int32),
            block_starts=self._starts,
        )


def _parse(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at column {error.colno}"
        raise ValueError(f"expected a JSON object, got {_shown(text)} ({where})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, got {_shown(text)} ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {_shown(text)}")
    return row


def _checked(row: dict[str, Any], name: str, test: Callable[[Any], bool], expected: str) -> Any:
    if name not in row:
        raise ValueError(f"{name}: expected {expected}, got no such field")
    if not test(row[name]):
        raise ValueError(f"{name}: expected {expected}, got {_shown(json.dumps(row[name]))}")
    return row[name]


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e300 and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_REQUEST_TOKENS


def _are_ids(value: Any) -> bool:
    if type(value) is not list or set(map(type, value)) - {int}:
        return False
    return not value or (min(value) >= 0 and max(value) <= MAX_HASH_ID)


def _check_block_count(input_length: int, ids: int) -> None:
    blocks = -(-input_length // BLOCK_TOKENS)
    if ids != blocks:
        raise ValueError(
            f"hash_ids: expected {blocks} ids, one per {BLOCK_TOKENS} tokens of input_length "
            f"{input_length}, got {ids}"
        )


def _check_blocks(blocks: int) -> None:
    if blocks > MAX_BLOCKS:
        raise ValueError(
            f"hash_ids: expected at most {MAX_BLOCKS} ids in all requests, got {blocks}; "
            f"replay a part of the trace with a limit"
        )


def _too_many(blocks: int, outputs: int) -> str:
    return (
        f"hash_ids: expected at most {MAX_TOKEN_IDS} tokens in distinct blocks and outputs, so "
        f"that each token has its own int32 id, got {blocks} blocks of {BLOCK_TOKENS} tokens and "
        f"{outputs} output tokens; replay a part of the trace with a limit"
    )


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
