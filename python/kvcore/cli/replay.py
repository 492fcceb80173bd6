# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay``: drive the real manager with real traffic and report what it did."""

import json
import time
from pathlib import Path

import typer

from kvcore.cli import replay_options as options
from kvcore.cli.options import AsJson, PageSize, checked, fitting_pages
from kvcore.cli.presets import model_params
from kvcore.cli.progress import progress_bar
from kvcore.cli.replay_table import print_report
from kvcore.cli.sizes import parse_size
from kvcore.replay import (
    EngineSettings,
    PoolError,
    PoolSettings,
    ReplayReport,
    TraceError,
    Workload,
    chat_workload,
    read_trace,
    replay_admission,
    replay_online,
)


def replay(
    *,
    trace: options.Trace = None,
    mode: options.ReplayMode = options.Mode.online,
    page_size: PageSize = PoolSettings.page_size,
    pages: options.Pages = None,
    memory: options.Memory = None,
    model: options.Model = None,
    replicas: options.Replicas = PoolSettings.replicas,
    seed: options.Seed = 0,
    limit: options.Limit = None,
    concurrency: options.Concurrency = EngineSettings.concurrency,
    prefill_rate: options.PrefillRate = EngineSettings.prefill_rate,
    decode_rate: options.DecodeRate = EngineSettings.decode_rate,
    chunk: options.Chunk = EngineSettings.chunk,
    decode_steps: options.DecodeSteps = EngineSettings.decode_steps,
    as_json: AsJson = False,
) -> None:
    """Drive the cache manager with a trace and report hits, evictions and its own speed.

    No model runs and no pool is allocated. Online mode simulates the clock of an engine that
    batches continuously; admission mode releases each request before the next one claims, which
    shows what the cache keeps and nothing else.

    Example: kvcore replay trace.jsonl.gz --mode admission --pages 100000

    Example: kvcore replay --memory 80GiB --model llama-3.1-70b --json
    """
    pages = _pages(pages, memory, model, page_size, replicas)
    pool = PoolSettings(page_size=page_size, pages=pages, replicas=replicas)
    engine = EngineSettings(
        concurrency=concurrency,
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
        chunk=chunk,
        decode_steps=decode_steps,
    )
    started = time.perf_counter()
    workload = _workload(trace, seed, limit)
    read_seconds = time.perf_counter() - started
    report = _run(mode, workload, pool, engine)
    if as_json:
        typer.echo(json.dumps(report.to_dict() | {"read_seconds": read_seconds}))
    else:
        print_report(report)


def _pages(
    pages: int | None, memory: str | None, model: str | None, page_size: int, replicas: int
) -> int | None:
    """Return the pages per replica that the options ask for, None for the default."""
    if memory is None and model is None:
        return pages
    if pages is not None or memory is None or model is None:
        raise typer.BadParameter("expected --pages, or --memory together with --model")
    size = checked("--memory", parse_size, memory)
    page_bytes = checked("--model", model_params, model, page_size).bytes_per_page
    return fitting_pages(size, replicas, page_bytes)


def _workload(trace: Path | None, seed: int, limit: int | None) -> Workload:
    if trace is None:
        return chat_workload(seed=seed, limit=limit)
    try:
        return read_trace(trace, limit=limit)
    except TraceError as error:
        raise typer.BadParameter(str(error), param_hint="'TRACE'") from error


def _run(
    mode: options.Mode, workload: Workload, pool: PoolSettings, engine: EngineSettings
) -> ReplayReport:
    try:
        with progress_bar("requests", len(workload)) as on_progress:
            if mode is options.Mode.admission:
                return replay_admission(workload, pool, on_progress=on_progress)
            return replay_online(workload, pool, engine, on_progress=on_progress)
    except PoolError as error:
        raise typer.BadParameter(str(error)) from error
    except MemoryError as error:
        raise typer.BadParameter(_too_large(workload, pool)) from error


def _too_large(workload: Workload, pool: PoolSettings) -> str:
    longest = int((workload.prompt_lengths + workload.output_lengths).max())
    return (
        f"{len(workload):,} requests of up to {longest:,} tokens in {pool} need more memory than "
        f"there is; expected fewer pages, or a --limit"
    )
