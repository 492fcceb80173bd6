# SPDX-License-Identifier: Apache-2.0
"""Make the report of a demo."""

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
    """The results of one run of the chats.

    Attributes
    ----------
    seconds, manager_seconds, manager_share : float
        Time of the run, time inside the manager, and the manager's share of the time.
    prompt_tokens, generated_tokens : int
        Prompt tokens and generated tokens of all turns.
    tokens_per_second, generated_tokens_per_second : float
        All tokens, and only generated tokens, per second of the run.
    cached_tokens, token_hit_rate : int, float
        Prompt tokens found in the cache, and their share of all prompt tokens.
    first_token_s_p50, first_token_s_p99 : float
        Seconds from a message to the first token of its answer.
    steps, peak_running : int
        Steps of the engine; maximum number of running turns.
    peak_used_pages, evicted_pages, leaked_pages : int
        Maximum number of pages that turns held; cached pages evicted for new pages; pages neither
        free nor evictable at the end.
    preemptions, recomputed_tokens : int
        Turns sent back to the queue, and the tokens computed again for these turns.
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
        """Make the report of a run."""
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
    """The results of a demo.

    Attributes
    ----------
    settings : DemoSettings
        Settings of the demo, with the number of pages in the pool.
    with_cache, without_cache : RunReport
        Runs of the same chats with and without the prefix cache.
    max_seq_len : int
        Tokens of the longest chat.
    paged_bytes, contiguous_bytes : int
        Bytes of K and V at the peak with the prefix cache; bytes that the same number of turns
        would need with `max_seq_len` contiguous tokens each.
    check : Check
        Check of the tokens generated with the prefix cache.
    same_without_cache : int
        Chats with the same tokens in both runs.
    seconds : float
        Time of the whole demo.
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
        """Make the report of two runs and the check."""
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
        """Tokens per second with the prefix cache, divided by tokens per second without it."""
        return self.with_cache.tokens_per_second / self.without_cache.tokens_per_second

    @property
    def memory_saved(self) -> float:
        """Share of `contiguous_bytes` that paging saves."""
        return 1 - self.paged_bytes / self.contiguous_bytes

    @property
    def is_right(self) -> bool:
        """True if all outputs are equal, or if the pages round K and V."""
        is_exact = self.settings.dtype == "float32"
        all_same = self.check.differing == 0 and self.same_without_cache == self.settings.chats
        return all_same or not is_exact

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, with the settings among them, ready for JSON."""
        fields = asdict(self)
        settings: dict[str, Any] = fields.pop("settings")
        derived = ("speedup", "memory_saved", "is_right")
        return settings | fields | {name: getattr(self, name) for name in derived}
