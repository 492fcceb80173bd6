# SPDX-License-Identifier: Apache-2.0
"""Describe the requests of a replay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Workload(ABC):
    """Hold the requests of one replay, one array per field.

    Attributes
    ----------
    name : str
        Where the requests come from, for people.
    arrivals : numpy.ndarray
        float64 ``[n]``, seconds. For a request that follows another one (see `next_turns`) a
        nominal time only: it orders the requests, the online replay sends it when due.
    prompt_lengths, output_lengths : numpy.ndarray
        int64 ``[n]``, tokens, at least 1.
    output_tokens : numpy.ndarray
        int32 ``[m]``, the text that outputs are read from.
    output_starts : numpy.ndarray
        int64 ``[n]``, index into `output_tokens` of a request's first output token.
    next_turns : numpy.ndarray
        int64 ``[n]``, the request that the same user sends after this one is answered, -1 for
        none.
    think_times : numpy.ndarray
        float64 ``[n]``, seconds between the previous answer and this request.
    """

    name: str
    arrivals: NDArray[np.float64]
    prompt_lengths: NDArray[np.int64]
    output_lengths: NDArray[np.int64]
    output_tokens: NDArray[np.int32]
    output_starts: NDArray[np.int64]
    next_turns: NDArray[np.int64]
    think_times: NDArray[np.float64]

    @abstractmethod
    def prompt(self, index: int) -> NDArray[np.int32]:
        """Write out the prompt of one request.

        Parameters
        ----------
        index : int
            The request, 0 to ``len(self) - 1``.

        Returns
        -------
        numpy.ndarray
            int32 ``[prompt_lengths[index]]``; valid until the next call.
        """

    def output(self, index: int) -> NDArray[np.int32]:
        """Read the output tokens of one request, int32 ``[output_lengths[index]]``."""
        start = int(self.output_starts[index])
        return self.output_tokens[start : start + int(self.output_lengths[index])]

    def __len__(self) -> int:
        return len(self.arrivals)

    def __repr__(self) -> str:
        tokens = int(self.prompt_lengths.sum())
        return f"{type(self).__name__}({self.name!r}, requests={len(self)}, prompt_tokens={tokens})"
