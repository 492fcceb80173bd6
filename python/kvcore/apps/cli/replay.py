# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay``: drive the real manager with traffic and report its hits and its speed."""

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from kvcore import KVCacheParams
from kvcore.apps.cli import replay_options as options
from kvcore.apps.cli.advice_table import print_advice
from kvcore.apps.cli.comparison_page import comparison_page
from kvcore.apps.cli.comparison_table import print_comparison
from kvcore.apps.cli.options import AsJson, PageSize, checked, listed
from kvcore.apps.cli.output_file import check_writable, report_apart_from, write_text
from kvcore.apps.cli.progress import progress_bar
from kvcore.apps.cli.replay_pools import PoolSizes
from kvcore.apps.cli.replay_table import print_report
from kvcore.apps.cli.routing_table import print_routing
from kvcore.apps.cli.saved_time import saved_seconds
from kvcore.apps.cli.traces import read_with_progress
from kvcore.apps.cli.used_options import Use, require_used, warn_unused
from kvcore.apps.replay.advised import ADVICE_REPLAYS
from kvcore.apps.replay.hints import HINTS, has_hints, hint_lines
from kvcore.apps.replay.model_pools import served_lines
from kvcore.apps.traces.read_options import ReadOptions
from kvcore.options import DEFAULT_ADVICE_SAMPLE
from kvcore.replay import (
    POLICIES,
    AdviceCheck,
    Comparison,
    EngineSettings,
    PageUsesError,
    PoolError,
    PoolSettings,
    ReplayReport,
    RoutingReport,
    Workload,
    chat_workload,
    check_advice,
    compare,
    replay_admission,
    replay_online,
    replay_routed,
)
from kvcore.routing import POLICIES as ROUTES


def replay(
    *,
    context: typer.Context,
    trace: options.Trace = None,
    format_name: options.TraceFormat = None,
    block_size: options.BlockSize = None,
    time_unit: options.TimeUnit = None,
    tokenizer: options.Tokenizer = None,
    prefix_share: options.PrefixShare = None,
    mode: options.ReplayMode = None,
    policy: options.Policy = PoolSettings.policy,
    hints: options.Hints = PoolSettings.hints,
    page_size: PageSize = PoolSettings.page_size,
    pages: options.Pages = None,
    memory: options.Memory = None,
    model: options.Model = None,
    bytes_per_token: options.BytesPerToken = None,
    dtype: options.Dtype = None,
    groups: options.Groups = None,
    state_slots: options.StateSlots = None,
    checkpoint_every: options.CheckpointEvery = None,
    host_pages: options.HostPages = None,
    host_memory: options.HostMemory = None,
    disk_pages: options.DiskPages = None,
    disk: options.Disk = None,
    replicas: options.Replicas = PoolSettings.replicas,
    route: options.Route = None,
    seed: options.Seed = 0,
    limit: options.Limit = None,
    concurrency: options.Concurrency = EngineSettings.concurrency,
    prefill_speed: options.PrefillSpeed = None,
    prefill_rate: options.PrefillRate = EngineSettings.prefill_rate,
    decode_rate: options.DecodeRate = EngineSettings.decode_rate,
    chunk: options.Chunk = EngineSettings.chunk,
    decode_steps: options.DecodeSteps = EngineSettings.decode_steps,
    explain: options.Explain = False,
    advice: options.Advice = False,
    advice_sample: options.AdviceSample = DEFAULT_ADVICE_SAMPLE,
    html: options.Html = None,
    as_json: AsJson = False,
) -> None:
    """Run a trace through the cache manager; report hits, evictions and the manager's speed.

    TRACE is a log; --format lists the formats. No model runs, and only a replay with
    tiers allocates a pool. Online mode simulates the clock of an engine with continuous batching.
    Admission mode releases each request before the next request claims, so it shows only the
    effect of the cache. With several policies or numbers of pages, the command compares them with
    each other and, in admission mode, with the optimum, which no policy exceeds.
    With --model or --bytes-per-token every number of pages is also shown in GiB, --memory,
    --host-memory and --disk take sizes, and the last line is the decision: the least memory for
    95 % of the best hit rate. If layers of --model keep windows, chunks or states, the replay
    counts their pages, state slots and checkpoints as the manager does; --pages counts pages of the
    manager's pool.
    The policy hinted evicts by hints when sessions return: --hints takes them from the recorded
    times of the sessions, exact or in classes (soon, later, never).
    --groups compares a flat cache, which keeps every token in every layer, with a cache of the
    model's windows and chunks in the same memory; --pages counts pages of all layers. --host-pages
    and --disk-pages put a real host tier and a real disk below the device: a pool of tiny pages,
    and files in a temporary directory. --route makes the replicas workers of a router, which
    follows their caches only by events, and compares its policies.

    Example: kvcore replay trace.jsonl.gz --mode admission --pages 100000

    Example: kvcore replay trace.jsonl.gz --advice --pages 100000

    Example: kvcore replay azure.csv --prefix-share .5 --limit 10000

    Example: kvcore replay --memory 80GiB --model llama-3.1-70b --json

    Example: kvcore replay --policy lru,lfu --pages 1000,3000,10000 --html replay.html

    Example: kvcore replay log.jsonl --model llama-3.1-8b --memory 8GiB,32GiB --host-memory 0,64GiB

    Example: kvcore replay --groups gemma-3-27b --memory 8GiB,32GiB

    Example: kvcore replay log.jsonl --model qwen3-next-80b-a3b --memory 80GiB --state-slots 25%

    Example: kvcore replay trace.jsonl.gz --mode admission --host-pages 5000 --disk-pages 50000

    Example: kvcore replay trace.jsonl.gz --replicas 64 --route prefix,prefix+load,least-loaded
    """
    names = checked("--policy", listed, policy, _policy)
    sizes = PoolSizes(
        page_size=page_size,
        replicas=replicas,
        pages=pages,
        memory=memory,
        model=model,
        bytes_per_token=bytes_per_token,
        dtype=dtype,
        groups=groups,
        state_slots=state_slots,
        checkpoint_every=checkpoint_every,
        requests=concurrency,
        host_pages=host_pages,
        host_memory=host_memory,
        disk_pages=disk_pages,
        disk=disk,
    )
    grouped = sizes.grouped(len(names))
    chosen = checked("--hints", _hints, hints)
    pools = [replace(pool, hints=chosen, explain=explain) for pool in sizes.pools(grouped)]
    _check_replays(len(names), len(pools) * (1 if grouped is None else 2))
    if html is not None:
        checked("--html", check_writable, html, trace)
    is_one = len(names) * len(pools) == 1 and grouped is None
    engine = EngineSettings(
        concurrency=concurrency,
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
        chunk=chunk,
        decode_steps=decode_steps,
    )
    pace = engine if mode is options.Mode.online or (mode is None and is_one) else None
    routes = None if route is None else checked("--route", listed, route, _route)
    if routes is not None and (not is_one or html is not None or pools[0].host_pages):
        raise typer.BadParameter(
            "expected one policy and one number of pages, without --groups, tiers and --html",
            param_hint="'--route'",
        )
    if routes is not None and pools[0].model is not None:
        raise typer.BadParameter(
            "a router counts whole pages, but a hit of this model needs windows or checkpoints; "
            "expected --bytes-per-token instead of --model",
            param_hint="'--route'",
        )
    if routes is not None and mode is options.Mode.online:
        raise typer.BadParameter("expected --mode admission", param_hint="'--route'")
    if advice and (not is_one or html is not None or routes is not None or pools[0].host_pages):
        raise typer.BadParameter(
            "expected one policy and one number of pages, without --groups, tiers, --route and "
            "--html",
            param_hint="'--advice'",
        )
    if advice and mode is options.Mode.online:
        raise typer.BadParameter("expected --mode admission", param_hint="'--advice'")
    is_routed = routes is not None
    required = options.required_uses(
        has_trace=trace is not None, policies=names, is_routed=is_routed
    )
    require_used(context, required)
    uses = options.uses(
        has_trace=trace is not None,
        is_online=pace is not None and routes is None and not advice,
        is_routed=is_routed,
        has_advice=advice,
        is_grouped=grouped is not None,
        model=pools[0].model,
        has_slots=state_slots is not None,
        replicas=replicas,
    )
    warn_unused(context, uses)
    started = time.perf_counter()
    trace_options = ReadOptions(
        limit=limit,
        block_size=block_size,
        time_unit=time_unit,
        tokenizer=tokenizer,
        prefix_share=prefix_share,
    )
    workload = _workload(trace, seed, trace_options, format_name)
    require_used(context, [Use(("hints",), has_hints(workload), "a TRACE with sessions")])
    served = served_lines(pools[0], workload.block_tokens)
    lines = (*workload.assumptions, *served, *hint_lines(workload, names))
    workload = replace(workload, assumptions=lines)
    read_seconds = time.perf_counter() - started
    if routes is not None:
        reports = _run_routed(workload, pools[0].with_policy(names[0]), routes, engine)
        _show_routed(workload, reports, read_seconds, as_json=as_json)
        return
    if advice:
        pool = replace(pools[0].with_policy(names[0]), advice=advice_sample)
        check = _check_advice(workload, pool)
        _show(
            workload,
            check.report,
            _Extras(read_seconds, prefill_speed, advice=check),
            as_json=as_json,
        )
        return
    if is_one and html is None:
        report = _run(workload, pools[0].with_policy(names[0]), pace, chunk)
        _show(workload, report, _Extras(read_seconds, prefill_speed), as_json=as_json)
        return
    comparison = _compare(workload, pools, names, pace, grouped, chunk)
    if html is not None:
        command = shlex.join(["kvcore", *context.obj])
        page = comparison_page(comparison, command, prefill_speed)
        write_text(html, page)
    with report_apart_from(html):
        _show(
            workload,
            comparison.runs[0].report if is_one else comparison,
            _Extras(read_seconds, prefill_speed, comparison if is_one else None),
            as_json=as_json,
        )


def _policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"expected one or more of {', '.join(POLICIES)}, got {name!r}")
    return name


def _hints(name: str) -> str:
    if name not in HINTS:
        raise ValueError(f"expected one of {', '.join(HINTS)}, got {name!r}")
    return name


def _route(name: str) -> str:
    if name not in ROUTES:
        raise ValueError(f"expected one or more of {', '.join(ROUTES)}, got {name!r}")
    return name


def _check_replays(policies: int, pools: int) -> None:
    """Refuse a comparison of too many replays."""
    if policies * pools > options.MOST_REPLAYS:
        raise typer.BadParameter(
            f"expected at most {options.MOST_REPLAYS:,} replays, got {policies * pools:,}: "
            f"{policies} policies x {pools:,} sizes; give fewer sizes of pools or tiers"
        )


def _workload(
    trace: Path | None, seed: int, trace_options: ReadOptions, format_name: str | None
) -> Workload:
    if trace is None:
        return chat_workload(seed=seed, limit=trace_options.limit)
    return read_with_progress(trace, trace_options, format_name).workload()


def _run(
    workload: Workload, pool: PoolSettings, engine: EngineSettings | None, chunk: int
) -> ReplayReport:
    with _told(workload, pool), progress_bar("requests", len(workload)) as on_progress:
        if engine is None:
            most = None if pool.model is None else chunk
            return replay_admission(workload, pool, chunk=most, on_progress=on_progress)
        return replay_online(workload, pool, engine, on_progress=on_progress)


def _check_advice(workload: Workload, pool: PoolSettings) -> AdviceCheck:
    requests = ADVICE_REPLAYS * len(workload)
    with _told(workload, pool), progress_bar("requests", requests) as on_progress:
        return check_advice(workload, pool, on_progress=on_progress)


def _run_routed(
    workload: Workload, pool: PoolSettings, routes: Sequence[str], engine: EngineSettings
) -> list[RoutingReport]:
    requests = len(workload)
    with _told(workload, pool), progress_bar("requests", requests * len(routes)) as on_progress:
        return [
            replay_routed(
                workload,
                pool,
                name,
                engine,
                on_progress=_after(i * requests, on_progress),
            )
            for i, name in enumerate(routes)
        ]


def _after(done: int, on_progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
    """Return a progress callback for one replay; `done` counts the requests of earlier replays."""
    return None if on_progress is None else lambda now: on_progress(done + now)


def _show_routed(
    workload: Workload, reports: list[RoutingReport], read_seconds: float, *, as_json: bool
) -> None:
    if as_json:
        found = {
            "mode": "routing",
            "workload": workload.name,
            "results": [each.to_dict() for each in reports],
            "assumptions": workload.assumptions,
            "read_seconds": read_seconds,
        }
        typer.echo(json.dumps(found))
    else:
        _print_assumptions(workload)
        print_routing(workload.name, reports)


def _compare(
    workload: Workload,
    pools: Sequence[PoolSettings],
    policies: Sequence[str],
    engine: EngineSettings | None,
    model: KVCacheParams | None,
    chunk: int,
) -> Comparison:
    kinds = 1 if model is None else 2
    replays = len(pools) * len(policies) * kinds + (engine is None)
    largest = max(pools, key=lambda pool: pool.total_pages)
    with _told(workload, largest), progress_bar("requests", len(workload) * replays) as on_progress:
        return compare(
            workload,
            pools,
            policies,
            engine=engine,
            model=model,
            chunk=None if model is None and pools[0].model is None else chunk,
            on_progress=on_progress,
        )


@contextmanager
def _told(workload: Workload, pool: PoolSettings) -> Iterator[None]:
    """Report a pool or trace that is too large for manager, optimum or machine as bad input."""
    try:
        yield
    except (PoolError, PageUsesError) as error:
        raise typer.BadParameter(str(error)) from error
    except MemoryError as error:
        raise typer.BadParameter(_too_large(workload, pool)) from error


@dataclass(frozen=True)
class _Extras:
    """Additions to a report: seconds to read, prefill speed, the page's comparison, advice."""

    read_seconds: float
    prefill_speed: float | None
    comparison: Comparison | None = None
    advice: AdviceCheck | None = None

    def to_dict(self, workload: Workload, shown: ReplayReport | Comparison) -> dict[str, Any]:
        """Return the keys that a report or comparison does not have, ready for JSON."""
        told: dict[str, Any] = {}
        if self.comparison is not None:
            names = ("optimum", "timelines", "most_cached_tokens", "decision")
            whole = self.comparison.to_dict()
            told = {name: whole[name] for name in names}
        if self.advice is not None:
            told["advice"] = self.advice.to_dict()
        if self.prefill_speed is not None:
            told["prefill_speed"] = self.prefill_speed
            if isinstance(shown, ReplayReport):
                told["saved_seconds"] = saved_seconds(shown, self.prefill_speed)
        return told | {"assumptions": workload.assumptions, "read_seconds": self.read_seconds}


def _show(
    workload: Workload, shown: ReplayReport | Comparison, extras: _Extras, *, as_json: bool
) -> None:
    speed = extras.prefill_speed
    if as_json:
        told = shown.to_dict()
        if speed is not None and isinstance(shown, Comparison):
            reports = [run.report for run in shown.runs]
            for row, report in zip(told["results"], reports, strict=True):
                row["saved_seconds"] = saved_seconds(report, speed)
        typer.echo(json.dumps(told | extras.to_dict(workload, shown)))
        return
    _print_assumptions(workload)
    if isinstance(shown, Comparison):
        print_comparison(shown, prefill_speed=speed)
    else:
        print_report(shown, prefill_speed=speed)
    if extras.advice is not None:
        print_advice(extras.advice)


def _print_assumptions(workload: Workload) -> None:
    for line in workload.assumptions:
        typer.echo(line)


def _too_large(workload: Workload, pool: PoolSettings) -> str:
    longest = int((workload.prompt_lengths + workload.output_lengths).max())
    return (
        f"{len(workload):,} requests of up to {longest:,} tokens in {pool} need more memory than "
        f"there is; expected fewer pages, or a --limit"
    )
