# SPDX-License-Identifier: Apache-2.0
"""Declare the options of ``kvcore replay``, and the replays on which each has an effect."""

import math
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvcore import KVCacheParams
from kvcore.apps.cli.options import count, within
from kvcore.apps.cli.used_options import Use
from kvcore.apps.replay.hints import HINTED, HINTS
from kvcore.apps.traces.source import MOST_CHARACTERS, MOST_LINES
from kvcore.layers.layer_map import has_windows
from kvcore.options import MOST_ADVICE_SAMPLE
from kvcore.replay import DEFAULT_POOL_TOKENS, MOST_REPLICAS, POLICIES, TRACE_FORMATS
from kvcore.routing import POLICIES as ROUTES
from kvcore.support.byte_sizes import format_size

MOST_BLOCK = 1 << 24
MOST_BYTES_PER_TOKEN = 1 << 30
MOST_REPLAYS = 1024

_DEFAULT_PAGES = f"pages for {DEFAULT_POOL_TOKENS:,} tokens"


class Mode(str, Enum):
    """The two modes of a replay."""

    online = "online"
    admission = "admission"


_rate = within(1, math.inf)
_sample = within(1, MOST_ADVICE_SAMPLE)


def _power_of_two(value: int) -> int:
    if _sample(value) & (value - 1):
        raise typer.BadParameter(f"expected a power of two, got {value}")
    return value


Trace = Annotated[
    Path | None,
    typer.Argument(
        metavar="TRACE",
        help="A log of requests in a known format (see --format), plain or gzip, a file or a pipe, "
        f"- for stdin, of at most {MOST_LINES:,} lines and {format_size(MOST_CHARACTERS)} "
        "decompressed. Default: generated multi-turn chats.",
        show_default=False,
    ),
]
TraceFormat = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help=f"Format of TRACE: {', '.join(TRACE_FORMATS)}.",
        show_default="found from the first row",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        callback=within(1, MOST_BLOCK),
        help="Tokens per block of a TRACE with block ids.",
        show_default="found from the rows",
    ),
]
TimeUnit = Annotated[
    str | None,
    typer.Option(
        metavar="s|ms|us|ns", help="Unit of the times in TRACE.", show_default="of the format"
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help="Tokenizer of a TRACE with texts: a tokenizer.json, a folder with it, or a name.",
        show_default=False,
    ),
]
PrefixShare = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="For a TRACE of lengths: make up a prefix that all prompts share, such as .5 of each.",
        show_default=False,
    ),
]
ReplayMode = Annotated[
    Mode | None,
    typer.Option(
        "--mode",
        help="An engine in virtual time, or one prompt after another.",
        show_default="online; admission for a comparison",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        metavar="NAME[,NAME...]", help=f"Eviction policies to compare: {', '.join(POLICIES)}."
    ),
]
Hints = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"Hints that the policy hinted gets from the sessions of TRACE: {', '.join(HINTS)}.",
    ),
]
Pages = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N...]",
        help="Pages per replica, or several numbers to compare.",
        show_default=_DEFAULT_PAGES,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write an HTML page with the curves; - for stdout, with the report on stderr.",
        show_default=False,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE[,SIZE...]",
        help="Instead of --pages: memory of all replicas, such as 80GiB; needs --model, "
        "--bytes-per-token or --groups.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="PRESET|config.json",
        help="Model to serve, with its windows, chunks and states: the report has GiB for each "
        "number of pages.",
    ),
]
StateSlots = Annotated[
    str | None,
    typer.Option(
        metavar="N|SHARE%",
        help="With --model: state slots of each replica, for requests and checkpoints, or their "
        "share of the memory, such as 25%.",
        show_default="two for each of --concurrency requests, in at most half of the memory",
    ),
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        callback=count,
        help="With --model: also checkpoints of states every N tokens.",
        show_default="only at the ends of prompts and at branches",
    ),
]
BytesPerToken = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        callback=within(1, MOST_BYTES_PER_TOKEN),
        help="Instead of --model: bytes of K and V of a token in all layers.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --model or --groups: dtype of the pages.",
        show_default="the model's",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE[,SIZE...]",
        help="Instead of --host-pages: memory of the host tiers of all replicas; 0 in a list is "
        "no tier.",
        show_default=False,
    ),
]
Disk = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE[,SIZE...]",
        help="Instead of --disk-pages: size of the disk for all replicas; 0 in a list is no disk.",
        show_default=False,
    ),
]
PrefillSpeed = Annotated[
    float | None,
    typer.Option(
        metavar="TOKENS/S",
        callback=_rate,
        help="Estimate the time to first token that hits save: found tokens over this speed.",
        show_default=False,
    ),
]
Groups = Annotated[
    str | None,
    typer.Option(
        metavar="PRESET|config.json",
        help="A model with windows or chunks: also replay with its groups, in the same memory.",
    ),
]
HostPages = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N...]",
        help="Pages of a host tier on each replica, in a pool of real, tiny pages; 0 in a list is "
        "no tier.",
        show_default=False,
    ),
]
DiskPages = Annotated[
    str | None,
    typer.Option(
        metavar="N[,N...]",
        help="With a host tier: pages on disk for all replicas, in a temporary directory; 0 in a "
        "list is no disk.",
        show_default=False,
    ),
]
Replicas = Annotated[
    int,
    typer.Option(metavar="N", callback=within(1, MOST_REPLICAS), help="Data-parallel replicas."),
]
Route = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[,NAME...]",
        help="Replicas are workers of a router: compare its policies "
        f"({', '.join(ROUTES)}) by hits and load.",
        show_default=False,
    ),
]
Seed = Annotated[
    int,
    typer.Option(metavar="N", callback=within(0, math.inf), help="Seed of the generated chats."),
]
Limit = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        callback=count,
        help="Replay only the first N requests.",
        show_default=False,
    ),
]
Concurrency = Annotated[
    int,
    typer.Option(
        metavar="N",
        callback=count,
        help="Online: maximum number of running requests; also sets the default of --state-slots.",
    ),
]
PrefillRate = Annotated[
    float,
    typer.Option(
        metavar="RATE",
        callback=_rate,
        help="Online and with --route: prompt tokens per simulated second.",
    ),
]
DecodeRate = Annotated[
    float,
    typer.Option(
        metavar="RATE",
        callback=_rate,
        help="Online and with --route: decode steps per simulated second.",
    ),
]
Chunk = Annotated[
    int,
    typer.Option(
        metavar="N",
        callback=count,
        help="Online, with --groups, and with a --model with windows or chunks: prompt tokens per "
        "step at most.",
    ),
]
Explain = Annotated[
    bool,
    typer.Option("--explain", help="Find out why prompt tokens were not cached, by reason."),
]
Advice = Annotated[
    bool,
    typer.Option(
        "--advice",
        help="Print the advice that a manager gives on other sizes, with the exact hit rates.",
    ),
]
AdviceSample = Annotated[
    int,
    typer.Option(
        metavar="N",
        callback=_power_of_two,
        help="With --advice: sample one page in N, a power of two.",
    ),
]
DecodeSteps = Annotated[
    int,
    typer.Option(
        metavar="N",
        callback=count,
        help="Online: tokens per request in a step without prompts.",
    ),
]


def required_uses(*, has_trace: bool, policies: Sequence[str], is_routed: bool) -> list[Use]:
    """Return whether the options that a user gives for one replay have an effect.

    Parameters
    ----------
    has_trace : bool
        The requests come from a trace.
    policies : sequence of str
        Names of the eviction policies.
    is_routed : bool
        The replay has a router.
    """
    reading = ("format_name", "block_size", "time_unit", "tokenizer", "prefix_share")
    return [
        Use(reading, has_trace, "a TRACE"),
        Use(("hints",), HINTED in policies, f"--policy {HINTED}"),
        Use(("prefill_speed",), not is_routed, "no --route"),
    ]


def uses(
    *,
    has_trace: bool,
    is_online: bool,
    is_routed: bool,
    has_advice: bool,
    is_grouped: bool,
    model: KVCacheParams | None,
    has_slots: bool,
    replicas: int,
) -> list[Use]:
    """Return whether the options that a script may give to each replay have an effect.

    Parameters
    ----------
    has_trace : bool
        The requests come from a trace.
    is_online, is_routed, has_advice, is_grouped : bool
        The replay is online, has a router, checks advice, has --groups.
    model : KVCacheParams or None
        Model whose windows, chunks and states the pools have.
    has_slots : bool
        --state-slots is given.
    replicas : int
        Data-parallel replicas.
    """
    has_default_slots = model is not None and bool(model.state_groups) and not has_slots
    return [
        Use(("seed",), not has_trace, "no TRACE, for generated chats"),
        Use(
            ("concurrency",),
            is_online or has_default_slots,
            "--mode online, or a --model with states and no --state-slots",
        ),
        Use(("prefill_rate", "decode_rate"), is_online or is_routed, "--mode online or --route"),
        Use(("decode_steps",), is_online, "--mode online"),
        Use(
            ("chunk",),
            is_online or is_grouped or (model is not None and has_windows(model)),
            "--mode online, --groups, or a --model with windows or chunks",
        ),
        Use(("route",), replicas > 1, "--replicas of at least 2"),
        Use(("advice_sample",), has_advice, "--advice"),
    ]
