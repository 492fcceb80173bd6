# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay``: drive the real manager with traffic and report its hits and its speed."""

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import typer

from kvcore import KVCacheParams
from kvcore.apps.cli import replay_options as options
from kvcore.apps.cli.comparison_page import comparison_page
from kvcore.apps.cli.comparison_table import print_comparison
from kvcore.apps.cli.options import AsJson, PageSize, checked, fitting_pages, listed
from kvcore.apps.cli.options import pages as read_pages
from kvcore.apps.cli.output_file import check_writable
from kvcore.apps.cli.page_style import SLOTS
from kvcore.apps.cli.presets import find_model, model_params
from kvcore.apps.cli.progress import progress_bar
from kvcore.apps.cli.replay_table import print_report
from kvcore.apps.cli.routing_table import print_routing
from kvcore.apps.cli.traces import read_with_progress
from kvcore.apps.replay.pool import flat_page_bytes, require_windows
from kvcore.apps.traces.rows import ReadOptions
from kvcore.replay import (
    POLICIES,
    Comparison,
    EngineSettings,
    PageUsesError,
    PoolError,
    PoolSettings,
    ReplayReport,
    RoutingReport,
    Workload,
    chat_workload,
    compare,
    replay_admission,
    replay_online,
    replay_routed,
)
from kvcore.routing import POLICIES as ROUTES
from kvcore.support.byte_sizes import parse_size

_MOST_GROUPED = SLOTS // 2  # each policy has two curves


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
    page_size: PageSize = PoolSettings.page_size,
    pages: options.Pages = None,
    memory: options.Memory = None,
    model: options.Model = None,
    groups: options.Groups = None,
    host_pages: options.HostPages = None,
    disk_pages: options.DiskPages = None,
    replicas: options.Replicas = PoolSettings.replicas,
    route: options.Route = None,
    seed: options.Seed = 0,
    limit: options.Limit = None,
    concurrency: options.Concurrency = EngineSettings.concurrency,
    prefill_rate: options.PrefillRate = EngineSettings.prefill_rate,
    decode_rate: options.DecodeRate = EngineSettings.decode_rate,
    chunk: options.Chunk = EngineSettings.chunk,
    decode_steps: options.DecodeSteps = EngineSettings.decode_steps,
    explain: options.Explain = False,
    html: options.Html = None,
    as_json: AsJson = False,
) -> None:
    """Run a trace through the cache manager; report hits, evictions and the manager's speed.

    TRACE is a log in one of the formats that --format lists. No model runs, and only a replay with
    tiers allocates a pool. Online mode simulates the clock of an engine with continuous batching.
    Admission mode releases each request before the next request claims, so it shows only the
    effect of the cache. With several policies or numbers of pages, the command compares them with
    each other and, in admission mode, with the optimum, which no policy exceeds.
    --groups compares a flat cache, which keeps every token in every layer, with a cache of the
    model's windows and chunks in the same memory; --pages counts pages of all layers. --host-pages
    and --disk-pages put a real host tier and a real disk below the device: a pool of tiny pages,
    and files in a temporary directory. --route makes the replicas workers of a router, which
    follows their caches only by events, and compares its policies.

    Example: kvcore replay trace.jsonl.gz --mode admission --pages 100000

    Example: kvcore replay azure.csv --prefix-share .5 --limit 10000

    Example: kvcore replay --memory 80GiB --model llama-3.1-70b --json

    Example: kvcore replay --policy lru,lfu --pages 1000,3000,10000 --html replay.html

    Example: kvcore replay --groups gemma-3-27b --memory 8GiB,32GiB

    Example: kvcore replay trace.jsonl.gz --mode admission --host-pages 5000 --disk-pages 50000

    Example: kvcore replay trace.jsonl.gz --replicas 64 --route prefix,prefix+load,least-loaded
    """
    names = checked("--policy", listed, policy, _policy)
    grouped = None if groups is None else _grouped(groups, page_size, len(names))
    if grouped is not None and model is not None:
        raise typer.BadParameter("expected --model or --groups, not both: --groups sets the model")
    counts = _pages(pages, memory, grouped or model, page_size, replicas)
    _check_tiers(host_pages, disk_pages, groups)
    pools = [
        PoolSettings(
            page_size=page_size,
            pages=n,
            replicas=replicas,
            host_pages=host_pages or 0,
            disk_pages=disk_pages or 0,
            explain=explain,
        )
        for n in counts
    ]
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
    if routes is not None and (not is_one or html is not None or host_pages is not None):
        raise typer.BadParameter(
            "expected one policy and one number of pages, without --groups, tiers and --html",
            param_hint="'--route'",
        )
    if routes is not None and mode is options.Mode.online:
        raise typer.BadParameter("expected --mode admission", param_hint="'--route'")
    started = time.perf_counter()
    trace_options = ReadOptions(
        limit=limit,
        block_size=block_size,
        time_unit=time_unit,
        tokenizer=tokenizer,
        prefix_share=prefix_share,
    )
    workload = _workload(trace, seed, trace_options, format_name)
    read_seconds = time.perf_counter() - started
    if routes is not None:
        reports = _run_routed(workload, pools[0].with_policy(names[0]), routes, engine)
        _show_routed(workload, reports, read_seconds, as_json=as_json)
        return
    if is_one and html is None:
        report = _run(workload, pools[0].with_policy(names[0]), pace)
        _show(workload, report, read_seconds, as_json=as_json)
        return
    comparison = _compare(workload, pools, names, pace, grouped, chunk)
    if html is not None:
        command = shlex.join(["kvcore", *context.obj])
        page = comparison_page(comparison, command)
        html.write_text(page, encoding="utf-8", errors="backslashreplace")
    shown = comparison.runs[0].report if is_one else comparison
    _show(workload, shown, read_seconds, as_json=as_json)


def _policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"expected one or more of {', '.join(POLICIES)}, got {name!r}")
    return name


def _route(name: str) -> str:
    if name not in ROUTES:
        raise ValueError(f"expected one or more of {', '.join(ROUTES)}, got {name!r}")
    return name


def _grouped(model: str, page_size: int, policies: int) -> KVCacheParams:
    """Find a model and check that a replay supports its groups."""
    if policies > _MOST_GROUPED:
        raise typer.BadParameter(
            f"expected at most {_MOST_GROUPED} policies with --groups, got {policies}",
            param_hint="'--policy'",
        )
    found = checked("--groups", find_model, model)
    params = checked("--groups", partial(found.params, groups=True), page_size)
    checked("--groups", require_windows, params)
    return params


def _check_tiers(host_pages: int | None, disk_pages: int | None, groups: str | None) -> None:
    if host_pages is not None and groups is not None:
        raise typer.BadParameter(
            "expected --host-pages or --groups, not both: tiers hold flat pages"
        )
    if disk_pages is not None and host_pages is None:
        raise typer.BadParameter(
            "expected --host-pages with --disk-pages: pages reach the disk through a host tier"
        )


def _pages(
    pages: str | None,
    memory: str | None,
    model: KVCacheParams | str | None,
    page_size: int,
    replicas: int,
) -> tuple[int | None, ...]:
    """Return the numbers of pages per replica from the options; None for the default number."""
    if memory is None and not isinstance(model, str):
        return (None,) if pages is None else checked("--pages", listed, pages, read_pages)
    if pages is not None or memory is None or model is None:
        raise typer.BadParameter("expected --pages, or --memory together with --model or --groups")
    sizes = checked("--memory", listed, memory, parse_size)
    if isinstance(model, str):
        model = checked("--model", model_params, model, page_size)
    page_bytes = flat_page_bytes(model)
    return tuple(dict.fromkeys(fitting_pages(size, replicas, page_bytes) for size in sizes))


def _workload(
    trace: Path | None, seed: int, trace_options: ReadOptions, format_name: str | None
) -> Workload:
    if trace is not None:
        return read_with_progress(trace, trace_options, format_name).workload()
    if format_name is not None or replace(trace_options, limit=None) != ReadOptions():
        raise typer.BadParameter(
            "expected a TRACE with --format, --block-size, --time-unit, --tokenizer and "
            "--prefix-share"
        )
    return chat_workload(seed=seed, limit=trace_options.limit)


def _run(workload: Workload, pool: PoolSettings, engine: EngineSettings | None) -> ReplayReport:
    with _told(workload, pool), progress_bar("requests", len(workload)) as on_progress:
        if engine is None:
            return replay_admission(workload, pool, on_progress=on_progress)
        return replay_online(workload, pool, engine, on_progress=on_progress)


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
            chunk=None if model is None else chunk,
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


def _show(
    workload: Workload, shown: ReplayReport | Comparison, read_seconds: float, *, as_json: bool
) -> None:
    if as_json:
        more = {"assumptions": workload.assumptions, "read_seconds": read_seconds}
        typer.echo(json.dumps(shown.to_dict() | more))
        return
    _print_assumptions(workload)
    if isinstance(shown, Comparison):
        print_comparison(shown)
    else:
        print_report(shown)


def _print_assumptions(workload: Workload) -> None:
    for line in workload.assumptions:
        typer.echo(line)


def _too_large(workload: Workload, pool: PoolSettings) -> str:
    longest = int((workload.prompt_lengths + workload.output_lengths).max())
    return (
        f"{len(workload):,} requests of up to {longest:,} tokens in {pool} need more memory than "
        f"there is; expected fewer pages, or a --limit"
    )
