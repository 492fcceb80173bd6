# SPDX-License-Identifier: Apache-2.0
"""Print the report of a replay as a table."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcore.apps.cli.group_figures import group_name
from kvcore.apps.cli.miss_figures import reason_name
from kvcore.apps.cli.saved_time import saved_row
from kvcore.apps.cli.tier_figures import found_in, tier_sizes
from kvcore.replay import ReplayReport, StateReport, TierReport, TierSizes
from kvcore.support.byte_sizes import format_size


def print_report(report: ReplayReport, *, prefill_speed: float | None = None) -> None:
    """Print the table of one replay; with a prefill speed, also an estimate of saved time."""
    title = (
        f"{report.workload}, {report.mode}: {report.replicas} x {report.pages:,} pages "
        f"of {report.page_size} tokens{_size(report)}, {report.policy}"
    )
    if report.tiers is not None:
        found = report.tiers
        sizes = TierSizes(found.host_pages, found.disk_pages, found.host_state_slots)
        slot = 0 if report.states is None else report.states.slot_bytes
        title += f", with {tier_sizes(sizes, report.page_bytes, slot)}"
    table = Table(title=Text(title), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for section in (*_sections(report), _saved(report, prefill_speed)):
        for row in section:
            table.add_row(*row)
        table.add_section()
    Console().print(table)


def _sections(report: ReplayReport) -> Iterator[Iterator[tuple[str, str, str]]]:
    yield _traffic(report)
    yield _found(report.tiers)
    yield _missed(report)
    yield _memory(report)
    yield _of_groups(report)
    yield _of_states(report.states)
    yield _time(report)


def _missed(report: ReplayReport) -> Iterator[tuple[str, str, str]]:
    misses = report.misses
    if misses is None:
        return
    for reason, n in misses.by_reason.items():
        if n:
            share = f"{n / max(1, misses.prompt_tokens):.2%}"
            yield f"missed: {reason_name(reason, report)}", share, f"{n:,} tokens"


def _traffic(report: ReplayReport) -> Iterator[tuple[str, str, str]]:
    yield "requests served", f"{report.requests:,}", _extra(report.refused, "larger than the pool")
    yield "prompt tokens", f"{report.prompt_tokens:,}", ""
    if report.mode == "online":
        yield "output tokens", f"{report.output_tokens:,}", ""
    yield "token hit rate", f"{report.token_hit_rate:.2%}", f"{report.cached_tokens:,} tokens"
    if report.refused:
        yield "token hit rate, served", f"{report.served_token_hit_rate:.2%}", ""
    yield "page hit rate", f"{report.page_hit_rate:.2%}", f"{report.cached_pages:,} whole pages"


def _found(tiers: TierReport | None) -> Iterator[tuple[str, str, str]]:
    if tiers is None:
        return
    for where, share, tokens in found_in(tiers):
        yield f"found {where}", f"{share:.2%}", f"{tokens:,} tokens"
    yield "computed", f"{tiers.computed_share:.2%}", f"{tiers.computed_tokens:,} tokens"
    yield "written to the host tier", f"{tiers.host_written_pages:,}", "pages"
    if tiers.disk_pages:
        yield "written to disk", f"{tiers.disk_written_pages:,}", "pages"
    if tiers.disk_errors:
        yield "disk errors", f"{tiers.disk_errors:,}", "hits are missing"


def _memory(report: ReplayReport) -> Iterator[tuple[str, str, str]]:
    evicted = report.evicted_pages
    yield "evicted pages", f"{evicted:,}", _bytes(report, evicted).removeprefix(", ")
    if report.mode == "online":
        again = f"{report.recomputed_tokens:,} tokens computed again" if report.preemptions else ""
        yield "preemptions", f"{report.preemptions:,}", again
    peak = report.peak_used_pages
    yield (
        "peak occupancy",
        f"{peak / report.total_pages:.1%}",
        f"{peak:,} pages{_bytes(report, peak)}",
    )
    mean = report.mean_used_pages
    yield (
        "mean occupancy",
        f"{mean / report.total_pages:.1%}",
        f"{mean:,.0f} pages{_bytes(report, mean)}",
    )
    yield "leaked pages", f"{report.leaked_pages:,}", ""


def _of_groups(report: ReplayReport) -> Iterator[tuple[str, str, str]]:
    for group in report.groups:
        cached, held = (
            f"{pages:,.0f} pages{_bytes(report, pages)}"
            for pages in (group.cached_pages, group.held_pages)
        )
        yield group_name(group), cached, f"cached at the end; requests hold {held}"


def _of_states(states: StateReport | None) -> Iterator[tuple[str, str, str]]:
    if states is None:
        return
    size = f"of {format_size(states.slot_bytes)}: {format_size(states.memory)}"
    yield f"{states.layers} state", f"{states.slots:,} slots", size
    made = f"{states.checkpoints_made:,} made, {states.evicted_checkpoints:,} evicted"
    yield "hits of checkpoints", f"{states.checkpoint_hits:,}", made


def _time(report: ReplayReport) -> Iterator[tuple[str, str, str]]:
    if report.mode == "online":
        waits = f"median; p99 {report.first_token_s_p99:,.2f} s (simulated)"
        yield "first token after", f"{report.first_token_s_p50:,.2f} s", waits
        yield "simulated time", f"{report.virtual_seconds:,.1f} s", f"{report.steps:,} steps"
        tail = f"median; p99 {report.step_us_p99:,.1f} us"
        yield "manager, per step", f"{report.step_us_p50:,.1f} us", tail
    tail = f"median; p99 {report.request_us_p99:,.1f} us"
    yield "manager, per request", f"{report.request_us_p50:,.1f} us", tail
    whole = f"of {report.wall_seconds:,.2f} s"
    yield "manager, total", f"{report.manager_seconds:,.2f} s", whole
    yield "manager's speed", f"{report.tokens_per_second / 1e6:,.0f} M tokens/s", ""


def _saved(report: ReplayReport, prefill_speed: float | None) -> Iterator[tuple[str, str, str]]:
    if prefill_speed is None:
        return
    mean, median, p95 = saved_row(report, prefill_speed)
    yield "first token earlier by", mean, f"mean; median {median}, p95 {p95}"
    yield "", "", f"an estimate at {prefill_speed:,.0f} tokens/s"


def _bytes(report: ReplayReport, pages: float) -> str:
    """Write the bytes of pages after a comma; nothing if the bytes of a page are unknown."""
    return f", {format_size(round(pages * report.page_bytes))}" if report.page_bytes else ""


def _size(report: ReplayReport) -> str:
    """Write the bytes of pages and state slots after a comma; nothing if they are unknown."""
    return f", {format_size(report.memory)}" if report.page_bytes else ""


def _extra(count: int, what: str) -> str:
    return f"{count:,} {what}" if count else ""
