# SPDX-License-Identifier: Apache-2.0
"""``kvcore demo``: serve chats with a small built-in model through the real manager and kernels."""

import json
import math
import os
from typing import Annotated

import typer

from kvcore import CapacityError
from kvcore.apps.cli import options
from kvcore.apps.cli.demo_progress import watching
from kvcore.apps.cli.demo_table import print_demo
from kvcore.apps.cli.devices import DeviceName, machine_errors, usable_device
from kvcore.apps.cli.streams import tell
from kvcore.apps.demo import DemoReport, DemoSettings, run_demo
from kvcore.support.dtypes import itemsize

_MOST_CHATS = 100_000

Chats = Annotated[
    int, typer.Option(metavar="N", callback=options.within(1, _MOST_CHATS), help="Chats to serve.")
]
Turns = Annotated[
    int,
    typer.Option(metavar="N", callback=options.within(1, 100), help="Messages in each chat."),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N", callback=options.within(0, math.inf), help="Seed of the model and the chats."
    ),
]
Dtype = Annotated[
    str, typer.Option(metavar="NAME", help="Dtype of the pages, such as float8_e4m3fn.")
]
Pages = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        callback=options.count,
        help="Pages of the pool.",
        show_default="fewer pages than the chats need",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        callback=options.within(1, 1024),
        help="Threads of the cache's kernels in host memory.",
        show_default="one per processor",
    ),
]


def demo(
    *,
    chats: Chats = DemoSettings.chats,
    turns: Turns = DemoSettings.turns,
    seed: Seed = DemoSettings.seed,
    dtype: Dtype = DemoSettings.dtype,
    page_size: options.PageSize = DemoSettings.page_size,
    pages: Pages = None,
    threads: Threads = None,
    device: DeviceName = DemoSettings.device,
    as_json: options.AsJson = False,
) -> None:
    """Serve multi-turn chats with a small built-in transformer, with and without the prefix cache.

    The model is written in numpy and has random weights from a seed. Every token runs through the
    real manager and kernels. At the end, the demo compares all generated tokens with a
    recomputation without a cache. With float32 pages, a difference ends it with exit code 1.

    Example: kvcore demo --chats 64 --dtype float8_e4m3fn

    Example: kvcore demo --device cuda:0
    """
    options.checked("--dtype", itemsize, dtype)
    with machine_errors():
        settings = DemoSettings(
            chats=chats,
            turns=turns,
            seed=seed,
            dtype=dtype,
            page_size=page_size,
            pages=pages,
            threads=threads or _processors(),
            device=str(usable_device(device)),
        )
        report = _run(settings)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        print_demo(report)
    if not report.is_right:
        tell(f"error: {_what_is_wrong(report)}")
        raise typer.Exit(1)


def _run(settings: DemoSettings) -> DemoReport:
    try:
        with watching(settings) as watcher:
            return run_demo(settings, watcher)
    except CapacityError as error:
        raise typer.BadParameter(str(error), param_hint="'--pages'") from error
    except MemoryError as error:
        raise typer.BadParameter(_too_large(settings, error)) from error


def _too_large(settings: DemoSettings, error: MemoryError) -> str:
    pages = "" if settings.pages is None else f"{settings.pages:,} "
    return (
        f"{settings.chats:,} chats of {settings.turns:,} turns in {pages}pages of "
        f"{settings.page_size:,} tokens need more memory than there is: "
        f"{error or 'out of memory'}; expected smaller --pages, --page-size or --chats"
    )


def _processors() -> int:
    """Count the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _what_is_wrong(report: DemoReport) -> str:
    check, chats = report.check, report.settings.chats
    if check.differing:
        return (
            f"{check.differing:,} of {check.tokens:,} generated tokens differ from a recomputation "
            f"without a cache: {check.first_difference}"
        )
    differing = chats - report.same_without_cache
    return f"{differing:,} of {chats:,} chats have other tokens without the prefix cache"
