# SPDX-License-Identifier: Apache-2.0
"""``kvcore trace``: convert traces, and capture them from an engine."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcore.apps.cli import replay_options as options
from kvcore.apps.cli.options import AsJson, checked, within
from kvcore.apps.cli.output_file import check_writable, report_apart_from
from kvcore.apps.cli.progress import progress_bar
from kvcore.apps.traces.canonical import STDOUT, write_trace
from kvcore.apps.traces.capture import capture_trace
from kvcore.apps.traces.clock import UNITS
from kvcore.apps.traces.errors import counted, printable
from kvcore.apps.traces.formats import FORMATS
from kvcore.apps.traces.read import load_trace
from kvcore.apps.traces.read_options import ReadOptions
from kvcore.apps.traces.signatures import check_name
from kvcore.apps.traces.trace import Trace
from kvcore.replay import MOST_REPLICAS, TraceError

app = typer.Typer(rich_markup_mode=None)

Target = Annotated[
    Path,
    typer.Argument(
        metavar="OUT",
        help="The file; compressed if it ends in .gz; - for stdout, with the report on stderr.",
    ),
]


@app.callback()
def _commands() -> None:
    """Convert logs of requests to one form, and capture them from an engine."""


def read_with_progress(path: Path, given: ReadOptions, format_name: str | None) -> Trace:
    """Read a trace with a progress bar; report a bad trace or option as bad input."""
    if format_name is not None and format_name not in FORMATS:
        raise typer.BadParameter(
            f"expected one of {', '.join(FORMATS)}, got {format_name!r}", param_hint="'--format'"
        )
    if given.time_unit is not None and given.time_unit not in UNITS:
        raise typer.BadParameter(
            f"expected one of {', '.join(UNITS)}, got {given.time_unit!r}",
            param_hint="'--time-unit'",
        )
    share = given.prefix_share
    if share is not None and (math.isnan(share) or not 0 <= share < 1):
        raise typer.BadParameter(
            f"expected 0 to less than 1, got {share}", param_hint="'--prefix-share'"
        )
    size = path.stat().st_size if path != STDOUT and path.is_file() else 0
    try:
        with progress_bar("bytes", max(size, 1)) as on_progress:
            trace = load_trace(
                str(path), given, format_name=format_name, on_progress=on_progress if size else None
            )
    except TraceError as error:
        raise typer.BadParameter(str(error), param_hint="'TRACE'") from error
    return trace


@app.command()
def convert(
    *,
    trace: Annotated[
        Path, typer.Argument(metavar="IN", help="A log in a known format; - for stdin.")
    ],
    target: Target,
    format_name: options.TraceFormat = None,
    block_size: options.BlockSize = None,
    time_unit: options.TimeUnit = None,
    tokenizer: options.Tokenizer = None,
    prefix_share: options.PrefixShare = None,
    limit: options.Limit = None,
    as_json: AsJson = False,
) -> None:
    """Convert a log of requests to kvcore's own format: a header, and a JSON line per request.

    A replay of OUT is a replay of IN. Texts become token ids.

    Example: kvcore trace convert azure.csv trace.jsonl.gz
    """
    _check_target(target, trace)
    given = ReadOptions(
        limit=limit,
        block_size=block_size,
        time_unit=time_unit,
        tokenizer=tokenizer,
        prefix_share=prefix_share,
    )
    found = read_with_progress(trace, given, format_name)
    with progress_bar("requests", len(found)) as on_progress:
        write_trace(found, target, on_progress)
    told = {"requests": len(found), "format": found.format, "assumptions": found.notes}
    name = "stdout" if target == STDOUT else printable(str(target))
    line = f"{counted(len(found), 'request')} from {found.format} to {name}"
    _report(target, told if as_json else [line, *found.notes])


@app.command()
def capture(
    *,
    endpoint: Annotated[
        str, typer.Argument(metavar="ENDPOINT", help="Where the engine publishes its events.")
    ],
    target: Target,
    replay_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="ENDPOINT",
            help="Where the engine repeats events, also from before the capture.",
            show_default=False,
        ),
    ] = None,
    topic: Annotated[
        str, typer.Option(metavar="TEXT", help="Beginning of the topics to receive.")
    ] = "",
    replicas: Annotated[
        int,
        typer.Option(metavar="N", callback=within(1, MOST_REPLICAS), help="Data-parallel ranks."),
    ] = 1,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="N",
            callback=within(0, math.inf),
            help="End after N seconds, or at Ctrl-C.",
            show_default="no end",
        ),
    ] = math.inf,
    gap: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            callback=within(0, math.inf),
            help="A block that continues a chain later than this is a new request.",
        ),
    ] = 10.0,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Also write the token ids, which are the prompts.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the requests of a running engine of kvcore, vLLM or SGLang from its cache events.

    Events show the blocks that a request stored, and no hits: a request is a chain of stored
    blocks, and requests that found all their blocks are missing. No token ids are written unless
    --token-ids is given.

    Example: kvcore trace capture tcp://127.0.0.1:5557 trace.jsonl.gz --seconds 600
    """
    _check_target(target, None)
    try:
        from kvcore.events import EventSubscriber
    except ImportError as error:
        raise typer.BadParameter(str(error), param_hint="'ENDPOINT'") from error
    try:
        with EventSubscriber(
            endpoint, replay_endpoint=replay_endpoint, topic=topic, replicas=replicas
        ) as subscriber:
            done = capture_trace(
                subscriber, target, seconds=seconds, gap=gap, with_tokens=token_ids
            )
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error), param_hint="'ENDPOINT'") from error
    _report(target, asdict(done) if as_json else done.notes())


def _check_target(target: Path, source: Path | None) -> None:
    checked("OUT", check_name, target)
    checked("OUT", check_writable, target, source)


def _report(target: Path, told: dict[str, Any] | list[str]) -> None:
    """Print lines, or one object as JSON."""
    with report_apart_from(target):
        for line in [json.dumps(told)] if isinstance(told, dict) else told:
            typer.echo(line)
