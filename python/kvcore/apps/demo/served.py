# SPDX-License-Identifier: Apache-2.0
"""The results and counts of an engine run."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore import KVCacheMetrics
from kvcore.apps.demo.conversation import Conversation


@dataclass(frozen=True, kw_only=True)
class Served:
    """The results of a run.

    Attributes
    ----------
    conversations : list of Conversation
        One conversation per chat.
    seconds, manager_seconds : float
        Time of the run; time in calls of the manager and its contexts.
    first_token_seconds : list of float
        Seconds from each message to the first token of its answer.
    prompt_tokens, generated_tokens : int
        Prompt tokens and generated tokens of all turns.
    cached_tokens : int
        Prompt tokens found in the cache when their turn was first admitted.
    recomputed_tokens, preemptions : int
        Tokens computed again after preemptions; number of preemptions.
    steps, peak_running : int
        Steps of the engine; maximum number of running turns.
    leaked_pages : int
        Pages neither free nor evictable at the end.
    metrics : KVCacheMetrics
        Counters of the manager.
    """

    conversations: list[Conversation]
    seconds: float
    manager_seconds: float
    first_token_seconds: list[float]
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    preemptions: int
    steps: int
    peak_running: int
    leaked_pages: int
    metrics: KVCacheMetrics


@dataclass
class Tally:
    """The counts of a run in progress, with the names of `Served`."""

    first_token_seconds: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    peak_running: int = 0
