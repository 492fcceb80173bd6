# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids: the content of rows of ids, and of tokenized texts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.apps.replay.workload import Workload
from kvcore.apps.traces.clock import Clock
from kvcore.apps.traces.errors import shown_value
from kvcore.apps.traces.read_options import ReadOptions
from kvcore.apps.traces.rows import UnusedFields, json_rows, row_errors
from kvcore.apps.traces.trace import MAX_REQUEST_TOKENS, Requests, Trace, output_count
from kvcore.apps.traces.turns import SessionTurns

if TYPE_CHECKING:
    from kvcore.apps.traces.source import Source

__all__ = ["TokenContent", "TokenText", "TokenWorkload", "read_tokens", "token_ids"]

MAX_TOKENS = 2**28  # of all prompts and known outputs: four bytes each
MAX_KEYS = 2**24  # of all prompts: 16 bytes each
MAX_TOKEN_ID = 2**31 - 1
_UNKNOWN = -1
_FIELDS = frozenset(
    {"timestamp", "token_ids", "prompt_token_ids", "output_token_ids", "output_length"}
    | {"session_id", "delay"}
)

_Ints = NDArray[np.int64]


def token_ids(name: str, value: Any) -> list[int]:
    """Check a list of token ids; ValueError for any other value."""
    is_list = type(value) is list and 0 < len(value) <= MAX_REQUEST_TOKENS
    if not is_list or set(map(type, value)) != {int}:
        raise ValueError(f"{name}: expected a list of token ids, got {shown_value(value)}")
    if min(value) < 0 or max(value) > MAX_TOKEN_ID:
        raise ValueError(f"{name}: expected token ids from 0 to {MAX_TOKEN_ID}")
    return list(value)


class TokenText:
    """Collect the tokens of prompts and outputs in one array; prompts may overlap."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._prompts = array("q")
        self._outputs = array("q")
        self._keys = array("q")

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Any) -> None:
        """Append tokens; ValueError if they are too many."""
        if len(self._tokens) + len(tokens) > MAX_TOKENS:
            raise ValueError(
                f"expected at most {MAX_TOKENS} tokens in all prompts and outputs; replay a part "
                f"of the trace with a limit"
            )
        self._tokens.extend(tokens)

    def add(self, prompt: int, output: int = _UNKNOWN) -> None:
        """Append a request: the places of its prompt, and of its output if the tokens are known."""
        self._prompts.append(prompt)
        self._outputs.append(output)

    def add_key(self, place: int, key: int) -> None:
        """Mark a prompt from the token at `place` on; ValueError if there are too many keys.

        The places rise from call to call.
        """
        if len(self._keys) >= 2 * MAX_KEYS:
            raise ValueError(
                f"keys: expected at most {MAX_KEYS} keys in all prompts; replay a part of the "
                f"trace with a limit"
            )
        self._keys.extend((place, key))

    def finish(self, line: str) -> TokenContent:
        """Return the content."""
        return TokenContent(
            tokens=np.frombuffer(self._tokens, np.int32),
            prompts=np.array(self._prompts, np.int64),
            outputs=np.array(self._outputs, np.int64),
            keys=np.array(self._keys, np.int64).reshape(-1, 2),
            line=line,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenContent:
    """The tokens of all prompts.

    Attributes
    ----------
    tokens : numpy.ndarray
        int32 ``[m]``, tokens of prompts and outputs.
    prompts, outputs : numpy.ndarray
        int64 ``[n]``, place in `tokens` of each prompt and each output; -1 for an output whose
        tokens are not known.
    keys : numpy.ndarray
        int64 ``[k, 2]``, places in `tokens`, rising, each with the number of a key. From a place
        on, a prompt differs from prompts with the same tokens and no key or another key, as with
        another adapter.
    line : str
        What a report says about the tokens.
    """

    tokens: NDArray[np.int32]
    prompts: _Ints
    outputs: _Ints
    keys: _Ints
    line: str

    def reordered(self, order: _Ints) -> TokenContent:
        """Return the tokens of the requests in another order."""
        return replace(self, prompts=self.prompts[order], outputs=self.outputs[order])

    def notes(self) -> list[str]:
        """Say where the tokens come from."""
        return [self.line]

    def keys_of(self, first: int, end: int) -> list[list[int]]:
        """Return the keys of the tokens from `first` to `end`, with places that count from 0."""
        at, after = np.searchsorted(self.keys[:, 0], (first, end))
        found: list[list[int]] = (self.keys[at:after] - (first, 0)).tolist()
        return found

    def _with_keys(self) -> TokenContent:
        """Return the content with an id of its own for each token and key, above all other ids.

        Raises
        ------
        ValueError
            There are not enough ids.
        """
        places, numbers = self.keys.T
        pairs = np.stack((self.tokens[places], numbers))
        distinct, ids = np.unique(pairs, axis=1, return_inverse=True)
        first = int(self.tokens.max()) + 1
        if first + distinct.shape[1] > MAX_TOKEN_ID + 1:
            raise ValueError(
                f"keys: expected token ids small enough for {distinct.shape[1]} ids of tokens with "
                f"keys above them, got {first - 1}"
            )
        tokens = self.tokens.copy()
        tokens[places] = first + ids.reshape(-1)
        return replace(self, tokens=tokens, keys=self.keys[:0])

    def workload(self, trace: Trace) -> TokenWorkload:
        """Give tokens with keys, and tokens of unknown outputs, ids of their own above all others.

        Raises
        ------
        ValueError
            There are not enough ids.
        """
        if len(self.keys):
            return self._with_keys().workload(trace)
        fields = trace.base_fields()
        lengths = np.where(self.outputs < 0, trace.output_lengths, 0)
        first_output = int(self.tokens.max()) + 1
        if first_output + int(lengths.sum()) > MAX_TOKEN_ID + 1:
            raise ValueError(
                f"expected token ids small enough for {int(lengths.sum())} ids of output tokens "
                f"above them, got {first_output - 1}"
            )
        own = len(self.tokens) + np.cumsum(lengths) - lengths
        fields["output_starts"] = np.where(self.outputs < 0, own, self.outputs)
        return TokenWorkload(**fields, content=self, first_output=first_output)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TokenWorkload(Workload):
    """Read prompts and known outputs from one array of tokens.

    Attributes
    ----------
    content : TokenContent
        The tokens.
    first_output : int
        Id of the first token of an unknown output.
    """

    content: TokenContent
    first_output: int

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Return the prompt of one request."""
        start = int(self.content.prompts[index])
        return self.content.tokens[start : start + int(self.prompt_lengths[index])]

    def output_tokens_at(self, places: NDArray[np.int64]) -> NDArray[np.int32]:
        """Read known output tokens, and compute the ids of unknown output tokens."""
        count = len(self.content.tokens)
        most = np.iinfo(np.int32).max
        own = np.minimum(self.first_output + places - count, most)
        known = self.content.tokens[np.minimum(places, count - 1)]
        return np.where(places < count, known, own).astype(np.int32)


def read_tokens(source: Source, name: str, options: ReadOptions) -> Trace:
    """Read JSON lines with `token_ids` (or `prompt_token_ids`), and maybe `output_token_ids`."""
    unused = UnusedFields(_FIELDS)
    clock = Clock(options.time_unit or "ms", is_forced=options.time_unit is not None)
    requests, text, turns = Requests(clock), TokenText(), SessionTurns()
    for number, row in json_rows(source, options.limit):
        with row_errors(number):
            unused.look(row.keys())
            field = "token_ids" if "token_ids" in row else "prompt_token_ids"
            prompt = token_ids(field, row.get(field))
            outputs = output_count("output_length", row.get("output_length"))
            turn = turns.add(clock, len(requests), row.get("session_id"), row.get("delay"))
            clock.add("timestamp", row.get("timestamp"))
            start, place = len(text), _UNKNOWN
            text.extend(prompt)
            if row.get("output_token_ids") not in (None, []):
                output = token_ids("output_token_ids", row["output_token_ids"])
                outputs, place = len(output), len(text)
                text.extend(output)
            text.add(start, place)
            requests.add(len(prompt), outputs, **turn)
    content = text.finish("token ids of the file")
    return requests.finish(name, "tokens", content, [*turns.notes(), *unused.notes()])
