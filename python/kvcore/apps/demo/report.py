# SPDX-License-Identifier: Apache-2.0
"""Sum up a demo."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvcore import KVCacheParams
from kvcore.apps.demo.check import Check
from kvcore.apps.demo.served import Served
from kvcore.apps.demo.settings import DemoSettings


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Return what one run of the chats did.

    Attributes
    ----------
    seconds, manager_seconds, manager_share : float
        Of the run, of it inside the manager, and the latter by the former.
    prompt_tokens, generated_tokens : int
        Of all turns.
    tokens_per_second, generated_tokens_per_second : float
        Prompt and generated tokens, and generated ones alone, per second of the run.
    cached_tokens, token_hit_rate : int, float
        Prompt tokens found in the cache, and their share of all.
    first_token_s_p50, first_token_s_p99 : float
        Seconds from a message to the first token of its answer.
    steps, peak_running : int
        Steps of the engine, most turns at a time.
    peak_used_pages, evicted_pages, leaked_pages : int
        Held by turns, dropped to make room, neither free nor evictable at the end.
    preemptions, recomputed_tokens : int
        Turns sent back to the queue, and the tokens that ran again for it.
    """

    seconds: float
    manager_seconds: float
    manager_share: float
    prompt_tokens: int
    generated_tokens: int
    tokens_per_second: float
    generated_tokens_per_second: float
    cached_tokens: int
    token_hit_rate: float
    first_token_s_p50: float
    first_token_s_p99: float
    steps: int
    peak_running: int
    peak_used_pages: int
    evicted_pages: int
    leaked_pages: int
    preemptions: int
    recomputed_tokens: int

    @classmethod
    def of(cls, served: Served) -> RunReport:
        """Sum up a run."""
        tokens = served.prompt_tokens + served.generated_tokens
        median, late = np.percentile(served.first_token_seconds, [50, 99]).tolist()
        metrics = served.metrics
        names = cls.__dataclass_fields__.keys() & vars(served).keys()
        return cls(
            **{name: getattr(served, name) for name in names},
            manager_share=served.manager_seconds / served.seconds,
            tokens_per_second=tokens / served.seconds,
            generated_tokens_per_second=served.generated_tokens / served.seconds,
            token_hit_rate=served.cached_tokens / served.prompt_tokens,
            first_token_s_p50=median,
            first_token_s_p99=late,
            peak_used_pages=metrics.peak_used_pages,
            evicted_pages=metrics.evicted_pages,
        )


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """Return what a demo showed.

    Attributes
    ----------
    settings : DemoSettings
        What was asked for, with the pages that the pool had.
    with_cache, without_cache : RunReport
        The same chats with the prefix cache and without it.
    max_seq_len : int
        Tokens of the longest chat.
    paged_bytes, contiguous_bytes : int
        K and V at the peak with the prefix cache, and what as many turns at a time need with
        `max_seq_len` contiguous tokens each.
    check : Check
        Of what was generated with the prefix cache.
    same_without_cache : int
        Chats that came out the same in both runs.
    seconds : float
        Of everything.
    """

    settings: DemoSettings
    with_cache: RunReport
    without_cache: RunReport
    max_seq_len: int
    paged_bytes: int
    contiguous_bytes: int
    check: Check
    same_without_cache: int
    seconds: float

    @classmethod
    def of(
        cls,
        settings: DemoSettings,
        params: KVCacheParams,
        with_cache: Served,
        without: Served,
        check: Check,
        seconds: float,
    ) -> DemoReport:
        """Sum up two runs and the check."""
        said = [[c.tokens.tolist() for c in run.conversations] for run in (with_cache, without)]
        longest = max(map(len, said[0]))
        return cls(
            settings=settings,
            with_cache=RunReport.of(with_cache),
            without_cache=RunReport.of(without),
            max_seq_len=longest,
            paged_bytes=with_cache.metrics.peak_used_pages * params.bytes_per_page,
            contiguous_bytes=with_cache.peak_running * longest * params.bytes_per_token,
            check=check,
            same_without_cache=sum(a == b for a, b in zip(*said, strict=True)),
            seconds=seconds,
        )

    @property
    def speedup(self) -> float:
        """Tokens per second with the prefix cache by those without."""
        return self.with_cache.tokens_per_second / self.without_cache.tokens_per_second

    @property
    def memory_saved(self) -> float:
        """Share of `contiguous_bytes` that pages do not need."""
        return 1 - self.paged_bytes / self.contiguous_bytes

    @property
    def is_right(self) -> bool:
        """Whether outputs are equal; pages that round K and V are not asked to give that."""
        is_exact = self.settings.dtype == "float32"
        all_same = self.check.differing == 0 and self.same_without_cache == self.settings.chats
        return all_same or not is_exact

    def to_dict(self) -> dict[str, Any]:
        """List everything by name, the settings among it, ready for JSON."""
        fields = asdict(self)
        settings: dict[str, Any] = fields.pop("settings")
        derived = ("speedup", "memory_saved", "is_right")
        return settings | fields | {name: getattr(self, name) for name in derived}
