# SPDX-License-Identifier: Apache-2.0
"""Print the report of a demo as a table."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcore.apps.demo import DemoReport, DemoSettings, RunReport
from kvcore.support.byte_sizes import format_size

_Row: TypeAlias = tuple[str, Callable[[RunReport], str]]

_SPEED: tuple[_Row, ...] = (
    ("served in", lambda run: f"{run.seconds:,.2f} s"),
    ("tokens per second with prompts", lambda run: f"{run.tokens_per_second:,.0f}"),
    ("first token after, median", lambda run: f"{run.first_token_s_p50:,.2f} s"),
    ("first token after, p99", lambda run: f"{run.first_token_s_p99:,.2f} s"),
    ("turns running at once, maximum", lambda run: f"{run.peak_running:,}"),
)
_TRAFFIC: tuple[_Row, ...] = (
    ("prompt tokens", lambda run: f"{run.prompt_tokens:,}"),
    ("of them cached", lambda run: f"{run.token_hit_rate:.1%}"),
    ("generated tokens", lambda run: f"{run.generated_tokens:,}"),
    ("tokens run again", lambda run: f"{run.recomputed_tokens:,}"),
)
_MANAGER: tuple[_Row, ...] = (
    ("pages used, maximum", lambda run: f"{run.peak_used_pages:,}"),
    ("pages evicted", lambda run: f"{run.evicted_pages:,}"),
    ("turns preempted", lambda run: f"{run.preemptions:,}"),
    ("time in the manager", lambda run: f"{run.manager_share:.2%}"),
)


def print_demo(report: DemoReport, console: Console | None = None) -> None:
    """Print a table with a column per run, and the findings below it."""
    console = console or Console()
    table = Table(title=_title(report.settings), title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("prefix cache", justify="right", style="green", no_wrap=True)
    table.add_column("no prefix cache", justify="right", no_wrap=True)
    for section in (_SPEED, _TRAFFIC, _MANAGER):
        for name, tell in section:
            table.add_row(name, tell(report.with_cache), tell(report.without_cache))
        table.add_section()
    console.print(table)
    findings = Table.grid(padding=(0, 2))
    for name, text in _findings(report):
        findings.add_row(Text(name, style="bold"), text)
    console.print(findings)


def _title(settings: DemoSettings) -> str:
    served = f"{settings.chats:,} chats of {settings.turns:,} turns"
    pages = f"{settings.pages:,} pages of {settings.page_size:,} tokens in {settings.dtype}"
    return f"{served}, {pages}{'' if settings.device == 'cpu' else f' on {settings.device}'}"


def _findings(report: DemoReport) -> Iterator[tuple[str, str]]:
    yield "speed", f"{report.speedup:.1f} x the tokens per second with the prefix cache"
    yield (
        "memory",
        f"{format_size(report.paged_bytes)} of K and V in pages, contiguous "
        f"{report.with_cache.peak_running:,} x {report.max_seq_len:,} tokens are "
        f"{format_size(report.contiguous_bytes)}: {report.memory_saved:.0%} saved",
    )
    leaked = report.with_cache.leaked_pages + report.without_cache.leaked_pages
    yield "pages", f"{leaked:,} leaked; every conservation law of the manager holds"
    yield "check", _check(report)


def _check(report: DemoReport) -> str:
    check = report.check
    margins = (
        f"smallest margin {check.smallest_margin:.1e}, largest difference "
        f"{check.largest_difference:.1e}"
    )
    if check.differing == 0:
        told = f"all {check.tokens:,} generated tokens equal a recomputation without a cache"
        return f"{told}; {margins}"
    same = f"{check.tokens - check.differing:,} of {check.tokens:,}"
    share = 1 - check.differing / check.tokens
    return f"{same} generated tokens ({share:.1%}) equal a recomputation without a cache; {margins}"
