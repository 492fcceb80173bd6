# SPDX-License-Identifier: Apache-2.0
"""Prompts as ids of blocks: find the size of the blocks, and expand the ids to tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcore.apps.replay.workload import Workload
from kvcore.apps.traces.errors import counted, shown_value

if TYPE_CHECKING:
    from kvcore.apps.traces.trace import Trace

__all__ = ["BlockContent", "BlockIds", "BlockSize", "BlockWorkload", "dense_ids"]

MAX_TOKEN_IDS = 2**31
MAX_HASH_ID = 2**64 - 1
MIN_HASH_ID = -(2**63)
MAX_BLOCKS = 2**26  # of all requests: a block takes about 40 bytes during reading
MAX_TEXT_IDS = 2**23  # distinct ids that are texts: each takes about 200 bytes
_MOST_TEXT = 256
_CHUNK = 1 << 20
_IDS = f"a list of integers from {MIN_HASH_ID} to {MAX_HASH_ID} or a list of texts"

_Ints = NDArray[np.int64]


class BlockIds:
    """Collect the ids of all prompts, integers or texts, four bytes for each small id."""

    def __init__(self) -> None:
        self._ids = array("I")
        self._firsts = array("q")
        self._counts = array("q")
        self._texts: dict[str, int] = {}
        self._kind: type | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def check(self, name: str, ids: Any) -> list[int] | list[str]:
        """Check the ids of one prompt; ValueError for any other value."""
        kinds = set(map(type, ids)) if type(ids) is list else {None}
        if not (kinds <= {int} or kinds <= {str}):
            raise ValueError(f"{name}: expected {_IDS}, got {shown_value(ids)}")
        if kinds == {int} and (min(ids) < MIN_HASH_ID or max(ids) > MAX_HASH_ID):
            raise ValueError(f"{name}: expected {_IDS}, got {shown_value(ids)}")
        if kinds == {str} and max(map(len, ids)) > _MOST_TEXT:
            raise ValueError(f"{name}: expected texts of at most {_MOST_TEXT} characters")
        kind = next(iter(kinds), None)
        if kind is not None and self._kind not in (None, kind):
            raise ValueError(f"{name}: expected {_plural(self._kind)} as in the rows before")
        if len(self._ids) + len(ids) > MAX_BLOCKS:
            raise ValueError(
                f"{name}: expected at most {MAX_BLOCKS} ids in all requests, got "
                f"{len(self._ids) + len(ids)}; replay a part of the trace with a limit"
            )
        checked: list[int] | list[str] = ids
        return checked

    def add(self, ids: Any) -> None:
        """Append the checked ids of one prompt; -1 is the same id of 64 bits as 2^64 - 1."""
        self._firsts.append(len(self._ids))
        self._counts.append(len(ids))
        if not ids:
            return
        self._kind = type(ids[0])
        if self._kind is str:
            texts = self._texts
            ids = [texts.setdefault(each, len(texts)) for each in ids]
            if len(texts) > MAX_TEXT_IDS:
                raise ValueError(f"expected at most {MAX_TEXT_IDS} distinct texts as ids")
        else:
            if min(ids) < 0:
                ids = [each & MAX_HASH_ID for each in ids]
            if self._ids.typecode == "I" and max(ids) >= 1 << 32:
                self._ids = array("Q", self._ids)
        self._ids.extend(ids)

    def make_local(self, first: int, offset: int) -> int:
        """Give new numbers, from `offset` on, to all ids from place `first` on; return the next."""
        part = np.frombuffer(self._ids, _dtype(self._ids))[first:]
        if not len(part):
            return offset
        distinct, dense = np.unique(part, return_inverse=True)
        del part
        del self._ids[first:]
        if offset + len(distinct) >= 1 << 32 and self._ids.typecode == "I":
            self._ids = array("Q", self._ids)
        self._ids.frombytes((dense.reshape(-1) + offset).astype(_dtype(self._ids)).tobytes())
        return offset + len(distinct)

    def finish(self, size: int, line: str) -> BlockContent:
        """Give numbers from 0 to the distinct ids, and return the content.

        Parameters
        ----------
        size : int
            Tokens per block.
        line : str
            What a report says about the size.
        """
        dense, distinct = dense_ids(self._ids)
        return BlockContent(
            size=size,
            ids=dense,
            firsts=np.array(self._firsts, np.int64),
            counts=np.array(self._counts, np.int64),
            distinct=distinct,
            line=line,
        )


def _plural(kind: type | None) -> str:
    return "texts" if kind is str else "integers"


def _dtype(ids: array[int]) -> type[np.unsignedinteger[Any]]:
    return np.uint32 if ids.typecode == "I" else np.uint64


def dense_ids(ids: array[int]) -> tuple[NDArray[np.int32], int]:
    """Give numbers to distinct ids, in rising order; return the number of each id, and their count.

    Ids of four bytes are replaced in place. The numbers of small ids come from a table.
    """
    values: NDArray[Any] = np.frombuffer(ids, _dtype(ids))
    if not len(values):
        return np.empty(0, np.int32), 0
    is_small = ids.typecode == "I"
    dense = values.view(np.int32) if is_small else np.empty(len(values), np.int32)
    most = int(values.max())
    if most < max(len(values), 1 << 16):
        table = np.zeros(most + 1, np.bool_)
        for at in range(0, len(values), _CHUNK):
            table[values[at : at + _CHUNK]] = True
        ranks = np.cumsum(table, dtype=np.int32)
        ranks -= 1
        for at in range(0, len(values), _CHUNK):
            dense[at : at + _CHUNK] = ranks[values[at : at + _CHUNK]]
        return dense, int(ranks[-1]) + 1
    known = np.sort(values)
    is_first = np.ones(len(known), np.bool_)
    np.not_equal(known[1:], known[:-1], out=is_first[1:])
    known = known[is_first]
    for at in range(0, len(values), _CHUNK):
        dense[at : at + _CHUNK] = np.searchsorted(known, values[at : at + _CHUNK])
    return dense, len(known)


class BlockSize:
    """Find the size of the blocks from the length of each prompt and the number of its ids.

    Either the last block of a prompt may be partial, or only whole blocks have ids. Each row bounds
    the sizes that both rules allow.

    Parameters
    ----------
    documented : int, optional
        Size that the format documents: it is taken if it fits all rows.
    forced : int, optional
        Size that the user has named.
    """

    def __init__(self, documented: int | None = None, forced: int | None = None) -> None:
        least, most = (1, 1 << 40) if forced is None else (forced, forced)
        self._documented = documented
        self._forced = forced
        self._partial = [least, most]
        self._whole = [least, most]
        self._rows = 0

    def add(self, name: str, tokens: int, ids: int) -> None:
        """Add a row; ValueError if no size fits this row and all rows before."""
        partial, whole = list(self._partial), list(self._whole)
        if ids == 0:
            partial[1] = 0
        else:
            partial[0] = max(partial[0], -(-tokens // ids))
            whole[1] = min(whole[1], tokens // ids)
        if ids > 1:
            partial[1] = min(partial[1], (tokens - 1) // (ids - 1))
        whole[0] = max(whole[0], tokens // (ids + 1) + 1)
        if partial[0] > partial[1] and whole[0] > whole[1]:
            raise ValueError(self._mismatch(name, tokens, ids))
        self._partial, self._whole = partial, whole
        self._rows += 1

    def _mismatch(self, name: str, tokens: int, ids: int) -> str:
        size = self._forced or self._choice() or self._documented
        remedy = "" if self._forced else "; --block-size N names another size"
        if size is None:
            least, most = self._partial if self._partial[0] <= self._partial[1] else self._whole
            return (
                f"{name}: expected ids for blocks of {least} to {most} tokens, as in the rows "
                f"before, got {ids} ids for {tokens} tokens{remedy}"
            )
        return (
            f"{name}: expected {-(-tokens // size)} ids, one per {size} tokens of input_length "
            f"{tokens}, got {ids}{remedy}"
        )

    def _choice(self) -> int | None:
        """Return the one size that fits; None if no size or several sizes fit."""
        for least, most in (self._partial, self._whole):
            if self._documented is not None and least <= self._documented <= most:
                return self._documented
            if least == most:
                return least
            powers = [1 << bit for bit in range(40) if least <= 1 << bit <= most]
            if powers:
                return powers[0] if len(powers) == 1 else None
        return None

    def finish(self) -> tuple[int, str]:
        """Return the size, and the line of a report about it.

        Raises
        ------
        ValueError
            Several sizes fit.
        """
        size = self._choice()
        if size is None:
            ranges = [each for each in (self._partial, self._whole) if each[0] <= each[1]]
            least = min(each[0] for each in ranges)
            most = max(each[1] for each in ranges)
            top = "more" if most >= 1 << 40 else str(most)
            raise ValueError(
                f"hash_ids: expected rows that fit blocks of one size, got rows that fit blocks of "
                f"{least} to {top} tokens; --block-size N names the size"
            )
        return size, self._line(size)

    def _line(self, size: int) -> str:
        if self._forced is not None:
            found = "as --block-size says"
        else:
            found = f"found from {counted(self._rows, 'row')}"
        is_whole = not self._partial[0] <= size <= self._partial[1]
        tail = ", only whole blocks have ids" if is_whole else ""
        return f"{found}{tail}"


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockContent:
    """The blocks of all prompts.

    Attributes
    ----------
    size : int
        Tokens per block.
    ids : numpy.ndarray
        int32 ``[m]``, numbers of blocks, from 0 to ``distinct - 1``.
    firsts, counts : numpy.ndarray
        int64 ``[n]``, place in `ids` of the first block of each prompt, and its number of blocks.
    distinct : int
        Number of distinct blocks.
    line : str
        How the size was found.
    """

    size: int
    ids: NDArray[np.int32]
    firsts: _Ints
    counts: _Ints
    distinct: int
    line: str

    def reordered(self, order: _Ints) -> BlockContent:
        """Return the blocks of the requests in another order."""
        return replace(self, firsts=self.firsts[order], counts=self.counts[order])

    def notes(self) -> list[str]:
        """Say what a hit rate of blocks means."""
        return [f"blocks of {self.size} tokens ({self.line}): the hit rate is a lower bound"]

    def workload(self, trace: Trace) -> BlockWorkload:
        """Assign token ids to every block and every output token.

        Tokens after the last block with an id get blocks that are equal to no other block.

        Raises
        ------
        ValueError
            The blocks and the outputs have more tokens than int32 has numbers.
        """
        outputs = int(trace.output_lengths.sum())
        own = -(-trace.input_lengths // self.size) - self.counts
        blocks = self.distinct + int(own.sum())
        first_output = blocks * self.size
        if first_output + outputs > MAX_TOKEN_IDS:
            raise ValueError(
                f"hash_ids: expected at most {MAX_TOKEN_IDS} tokens in distinct blocks and "
                f"outputs, so that each token has its own int32 id, got {blocks} blocks of "
                f"{self.size} tokens and {outputs} output tokens; replay a part of the trace with "
                f"a limit"
            )
        return BlockWorkload(
            **trace.base_fields(),
            content=self,
            own_firsts=self.distinct + np.cumsum(own) - own,
            first_output=first_output,
            num_outputs=outputs,
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BlockWorkload(Workload):
    """Expand the block ids of a trace to tokens, one request at a time.

    Every distinct block has its own token ids, so equal blocks have equal tokens and different
    blocks share no token. Output tokens differ from all block tokens and from each other: their ids
    follow the ids of the blocks. They are computed on demand.

    Attributes
    ----------
    content : BlockContent
        The blocks.
    own_firsts : numpy.ndarray
        int64 ``[n]``, number of the first block of each prompt that has no id.
    first_output, num_outputs : int
        Id of the first output token; number of all output tokens.
    """

    content: BlockContent
    own_firsts: _Ints
    first_output: int
    num_outputs: int
    _scratch: NDArray[np.int32] = field(init=False)
    _offsets: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        size = self.content.size
        most = -(-int(self.prompt_lengths.max()) // size)
        object.__setattr__(self, "_scratch", np.zeros((most, size), np.int32))
        object.__setattr__(self, "_offsets", np.arange(size, dtype=np.int32))

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.content.size

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Return the prompt of one request (valid until the next call)."""
        content = self.content
        length = int(self.prompt_lengths[index])
        count, first = int(content.counts[index]), int(content.firsts[index])
        rows = self._scratch[: -(-length // content.size)]
        blocks = np.empty(len(rows), np.int32)
        blocks[:count] = content.ids[first : first + count]
        if count < len(rows):
            own = int(self.own_firsts[index])
            blocks[count:] = np.arange(own, own + len(rows) - count)
        blocks *= content.size
        np.add(blocks[:, None], self._offsets, out=rows)
        tokens: NDArray[np.int32] = rows.reshape(-1)[:length]
        return tokens

    def output_tokens_at(self, places: NDArray[np.int64]) -> NDArray[np.int32]:
        """Compute the ids of output tokens from their places."""
        tokens = np.minimum(places, self.num_outputs - 1) + self.first_output
        return tokens.astype(np.int32)
