# SPDX-License-Identifier: Apache-2.0
"""Stacks of rows that share their first pages, so that attention reads these pages once.

A batch with groups becomes a batch of stacked rows. First, each group becomes a stacked row, with
the queries of all its rows and the tokens that the group shares. After the groups, each row of the
batch becomes a stacked row with its other tokens. So a query has several states: a state for each
stacked row that contains the query.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore.support.arguments import integer

__all__ = ["Group", "Stack", "checked_groups", "make_stack"]

_NO_END = 2**31 - 1


class Group(NamedTuple):
    """Hold rows of a batch, and the number of first tokens that they share."""

    rows: tuple[int, ...]
    tokens: int


class Stack(NamedTuple):
    """Hold a batch of stacked rows.

    Attributes
    ----------
    numbers : int32 [...]
        The arrays that the kernels read, one after the other. For each state: its token, its row,
        and the number of new tokens before it in this row. For each stacked row: its row of the
        table, its first token, and the end of its tokens. The offsets of the stacked rows,
        `rows` + 1 entries. For each token: its states, `depth` entries, -1 for an unused entry.
    states, rows, depth : int
        The number of states, the number of stacked rows, the maximum number of states of a token.
    """

    numbers: NDArray[np.int32]
    states: int
    rows: int
    depth: int

    @property
    def offsets_at(self) -> int:
        """The index in `numbers` of the offsets of stacked rows."""
        return 3 * self.states + 3 * self.rows

    @property
    def chains_at(self) -> int:
        """The index in `numbers` of the states of tokens."""
        return self.offsets_at + self.rows + 1


def checked_groups(given: Any, replica: Any, rows: int) -> list[Group]:
    """Return the groups of a replica, outer groups before the groups inside them.

    Raises
    ------
    TypeError
        An item is not a SharedPrefix.
    IndexError
        Rows are not in the batch, or are not ascending.
    ValueError
        A group has no tokens, or two groups overlap and neither contains the other.
    """
    wanted = integer("replica", replica)
    found = []
    for i, each in enumerate(given):
        name = f"shared[{i}]"
        if not all(hasattr(each, field) for field in ("rows", "num_tokens", "replica")):
            raise TypeError(f"{name} is a {type(each).__name__}, must be a SharedPrefix")
        if integer("replica", each.replica) != wanted:
            continue
        tokens = integer(f"{name}.num_tokens", each.num_tokens, 1)
        members = tuple(integer("a row of shared", row) for row in each.rows)
        for before, row in zip((-1, *members), members, strict=False):
            if not before < row < rows:
                raise IndexError(
                    f"{name}.rows holds {row}, must be ascending and below the {rows} rows of the "
                    f"batch"
                )
        if members:
            found.append(Group(members, tokens))
    found.sort(key=lambda group: (group.tokens, -len(group.rows)))
    _check_nesting(found, rows)
    return found


def _check_nesting(groups: list[Group], rows: int) -> None:
    last: list[int | None] = [None] * rows
    for i, group in enumerate(groups):
        around = {last[row] for row in group.rows}
        if len(around) > 1:
            raise ValueError(
                f"groups of shared overlap at rows {group.rows}, must be nested or disjoint"
            )
        for row in group.rows:
            last[row] = i


def make_stack(groups: list[Group], offsets: NDArray[np.uint32]) -> Stack:
    """Stack the rows of a batch.

    Parameters
    ----------
    groups : list of Group
        As ``checked_groups`` returns them.
    offsets : uint32 [rows + 1]
        The row offsets of the batch.

    Returns
    -------
    Stack

    Notes
    -----
    Costs O(states), in numpy.
    """
    ends = offsets.astype(np.int64)
    rows = len(ends) - 1
    read = np.zeros(rows, np.int64)  # tokens that groups have read for a row so far
    stacked: list[tuple[tuple[int, ...], int, int]] = []
    for group in groups:
        begin = int(read[group.rows[0]])
        if group.tokens > begin:
            stacked.append((group.rows, begin, group.tokens))
            read[list(group.rows)] = group.tokens
    stacked += [((row,), int(read[row]), _NO_END) for row in range(rows)]

    own = np.concatenate([np.asarray(members) for members, _, _ in stacked] or [np.zeros(0, int)])
    counts = (ends[1:] - ends[:-1])[own]
    of_row = np.repeat(own, counts)
    starts = np.cumsum(counts) - counts
    ahead = np.arange(len(of_row)) - np.repeat(starts, counts)
    token = ends[of_row] + ahead
    sizes = [int((ends[1:] - ends[:-1])[list(members)].sum()) for members, _, _ in stacked]
    chains = _chains(token, int(ends[-1]))
    numbers = [
        token,
        of_row,
        ahead,
        np.array([members[0] for members, _, _ in stacked], np.int64),
        np.array([begin for _, begin, _ in stacked], np.int64),
        np.array([end for _, _, end in stacked], np.int64),
        np.cumsum([0, *sizes]),
        chains.ravel(),
    ]
    flat = np.concatenate(numbers).astype(np.int32)
    return Stack(flat, len(token), len(stacked), chains.shape[1])


def _chains(token: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """Return the states of each token, [tokens, depth], in order; -1 after the last state."""
    order = np.argsort(token, kind="stable")
    counts = np.bincount(token, minlength=tokens)
    depth = int(counts.max(initial=0))
    at = np.arange(len(token)) - np.repeat(np.cumsum(counts) - counts, counts)
    chains = np.full((tokens, depth), -1, np.int64)
    chains[token[order], at] = order
    return chains
