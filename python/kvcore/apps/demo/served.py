# SPDX-License-Identifier: Apache-2.0
"""Count what an engine does."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore import KVCacheMetrics
from kvcore.apps.demo.conversation import Conversation


@dataclass(frozen=True, kw_only=True)
class Served:
    """Return what a run did.

    Attributes
    ----------
    conversations : list of Conversation
        One per chat.
    seconds, manager_seconds : float
        Of the run, and of it in calls of the manager and of its contexts.
    first_token_seconds : list of float
        From each message to the first token of its answer.
    prompt_tokens, generated_tokens : int
        Of all turns.
    cached_tokens : int
        Prompt tokens found in the cache when their turn was first admitted.
    recomputed_tokens, preemptions : int
        Tokens run again because turns went back to the queue, and how often that happened.
    steps, peak_running : int
        Steps of the engine, most turns at a time.
    leaked_pages : int
        Pages neither free nor evictable at the end.
    metrics : KVCacheMetrics
        The manager's own counters.
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
    """Count while the engine runs, under the names of `Served`."""

    first_token_seconds: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    peak_running: int = 0
