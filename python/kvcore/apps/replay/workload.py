# SPDX-License-Identifier: Apache-2.0
"""The base class of workloads: the requests of a replay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Workload(ABC):
    """The requests of one replay, with one array per field.

    Attributes
    ----------
    name : str
        Source of the requests, for display.
    arrivals : numpy.ndarray
        float64 ``[n]``, seconds. For a request that follows another request (see `next_turns`), the
        time is nominal: it only orders the requests, and the online replay sends the request after
        the previous answer and the think time.
    prompt_lengths, output_lengths : numpy.ndarray
        int64 ``[n]``, tokens, at least 1.
    output_starts : numpy.ndarray
        int64 ``[n]``, place of a request's first output token; see `output_tokens_at`.
    next_turns : numpy.ndarray
        int64 ``[n]``, the request that the same user sends after the answer to this request; -1
        for no next turn.
    think_times : numpy.ndarray
        float64 ``[n]``, seconds between the last answer that this request follows and the request.
    waits : numpy.ndarray
        int64 ``[m, 2]``, pairs: the first request also follows the answer of the second request. So
        a session continues after its sub-agents, and sub-agents begin together.
    sessions : numpy.ndarray or None
        int64 ``[n]``, number of the session of each request, -1 for none. None: the sessions are
        the chains of `next_turns`.
    assumptions : tuple of str
        One line for each thing that the reader of a trace found or assumed.
    """

    name: str
    arrivals: NDArray[np.float64]
    prompt_lengths: NDArray[np.int64]
    output_lengths: NDArray[np.int64]
    output_starts: NDArray[np.int64]
    next_turns: NDArray[np.int64]
    think_times: NDArray[np.float64]
    sessions: NDArray[np.int64] | None = None
    waits: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    assumptions: tuple[str, ...] = ()

    @property
    def block_tokens(self) -> int:
        """Tokens per block of a trace that has ids of blocks in place of tokens; otherwise 0."""
        return 0

    @abstractmethod
    def prompt(self, index: int) -> NDArray[np.int32]:
        """Return the prompt of one request.

        Parameters
        ----------
        index : int
            The request, 0 to ``len(self) - 1``.

        Returns
        -------
        numpy.ndarray
            int32 ``[prompt_lengths[index]]``; valid until the next call.
        """

    @abstractmethod
    def output_tokens_at(self, places: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return output tokens by their places, int32 of the same shape.

        Parameters
        ----------
        places : numpy.ndarray
            int64. The places of a request begin at ``output_starts[index]``. A place after the last
            token reads as the last token.
        """

    def output(self, index: int) -> NDArray[np.int32]:
        """Read the output tokens of one request, int32 ``[output_lengths[index]]``."""
        start, length = int(self.output_starts[index]), int(self.output_lengths[index])
        return self.output_tokens_at(np.arange(start, start + length))

    def __len__(self) -> int:
        return len(self.arrivals)

    def __repr__(self) -> str:
        tokens = int(self.prompt_lengths.sum())
        return f"{type(self).__name__}({self.name!r}, requests={len(self)}, prompt_tokens={tokens})"
