# SPDX-License-Identifier: Apache-2.0
"""``kvcore plan``: the tokens, sequences and pages of a model's cache that fit into memory."""

import dataclasses
import json
import math
from typing import Annotated, Any

import typer

from kvcore import KVCacheParams
from kvcore.apps.cli import options
from kvcore.apps.cli.plan_table import print_plan
from kvcore.apps.cli.presets import PRESETS, find_model
from kvcore.apps.cli.token_counts import parse_tokens
from kvcore.apps.cli.used_options import Use, warn_unused
from kvcore.apps.cli.weights import weights_bytes
from kvcore.groups import State
from kvcore.layers.hf.config import ConfigReading, with_copied_heads
from kvcore.layers.kinds import MAX_CHUNK_TOKENS, described
from kvcore.layers.layer_map import column_tokens, has_windows
from kvcore.layers.packing import bundles_of, row_widths
from kvcore.replay import PoolSettings
from kvcore.sizing import (
    STATES_PER_REQUEST,
    infer_optimal_batch_size,
    max_supported_sequence_length,
    pages_per_sequence,
    sequence_bytes,
)
from kvcore.support.byte_sizes import format_size, parse_size
from kvcore.support.dtypes import itemsize

QUANTISED = ("float8_e4m3fn", "int8")
_SHAPE = (
    "num_layers",
    "n_kv_heads",
    "head_dim",
    "v_head_dim",
    "is_mla",
    "page_size",
    "tensor_parallel_degree",
    "data_parallel_degree",
)

Model = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG|PRESET",
        help=f"A config.json or its folder, or one of {', '.join(PRESETS)}.",
    ),
]
Memory = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="For K and V, over all devices, such as 80GiB, without activations; without weights "
        "unless --weights subtracts them.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE|PATH",
        help="Subtract the weights of each replica from the memory: a size such as 16GiB, or a "
        "folder with safetensors files or their index.",
        show_default=False,
    ),
]
MaxSeqLen = Annotated[
    str,
    typer.Option(metavar="TOKENS", help="Longest sequence to serve, such as 32k (32,768)."),
]
Tp = Annotated[
    int,
    typer.Option(
        "--tp", metavar="N", callback=options.count, help="Devices that share a replica's heads."
    ),
]
Dp = Annotated[
    int, typer.Option("--dp", metavar="N", callback=options.count, help="Data-parallel replicas.")
]
Dtype = Annotated[
    str | None, typer.Option(metavar="NAME", help="Dtype of the pages.", show_default="the model's")
]

MaxChunkTokens = Annotated[
    int,
    typer.Option(
        metavar="N",
        callback=options.count,
        help="Maximum of prompt tokens in one step: a window also needs room for them.",
    ),
]
Flat = Annotated[
    bool,
    typer.Option("--flat", help="Keep every token in every layer, as without groups."),
]
Mtp = Annotated[
    bool, typer.Option("--mtp", help="Also count the MTP layers, which predict further tokens.")
]
Assume = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD",
        help="Read the config without this field. Repeat for several fields.",
    ),
]


def plan(
    *,
    context: typer.Context,
    model: Model,
    memory: Memory,
    max_seq_len: MaxSeqLen,
    weights: Weights = None,
    tp: Tp = 1,
    dp: Dp = 1,
    dtype: Dtype = None,
    page_size: options.PageSize = PoolSettings.page_size,
    max_chunk_tokens: MaxChunkTokens = MAX_CHUNK_TOKENS,
    flat: Flat = False,
    mtp: Mtp = False,
    assume: Assume = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the bytes of a model's cache, and the tokens and sequences that fit into memory.

    Layers with windows, chunks or states form groups that keep fewer tokens. The table also has
    columns for quantised pages, with one float32 scale per token and head. With more devices (--tp)
    than K/V heads, several devices have a copy of the same head. If the name of a config field may
    affect the cache and kvcore has no rule for the field, the command ends with an error.

    Example: kvcore plan llama-3.1-70b --memory 640GiB --max-seq-len 32k --tp 8

    Example: kvcore plan ./Qwen3-8B --memory 80GiB --weights ./Qwen3-8B --max-seq-len 32k
    """
    if dtype is not None:
        options.checked("--dtype", itemsize, dtype)
    size = options.checked("--memory", parse_size, memory)
    tokens = options.checked("--max-seq-len", parse_tokens, max_seq_len)
    loaded = None if weights is None else options.checked("--weights", weights_bytes, weights)
    rest = size if loaded is None else _beside_weights(size, loaded, dp)
    found = options.checked("CONFIG|PRESET", find_model, model)
    ignored = dict.fromkeys(assume or (), "ignored")

    def read(shards: int) -> tuple[ConfigReading, KVCacheParams]:
        reading = found.read(dtype, groups=not flat, mtp=mtp, assume=ignored, shards=shards)
        shape = with_copied_heads(reading.shape, shards)
        given = {"page_size": page_size, "n_devices": shards * dp, "data_parallel_degree": dp}
        return reading, KVCacheParams(**(shape | given))

    options.checked("CONFIG|PRESET", read, 1)
    # Read again with `tp`, because the reading divides states and heads among the devices.
    reading, params = options.checked("--tp", read, tp)
    needs = "a model with windows or chunks, without --flat"
    warn_unused(context, [Use(("max_chunk_tokens",), has_windows(params), needs)])
    answer = collect(params, rest, tokens, max_chunk_tokens) | _reading(reading, params)
    if loaded is not None:
        answer |= {"memory": size, "weights": loaded, "kv_memory": rest}
    if as_json:
        typer.echo(json.dumps({"model": model} | answer))
    else:
        print_plan(model, answer)


def _beside_weights(memory: int, weights: int, replicas: int) -> int:
    """Return the memory that the weights of all replicas leave; bad input if they do not fit."""
    rest = memory - weights * replicas
    if rest <= 0:
        raise typer.BadParameter(
            f"{format_size(weights)} of weights on each of {replicas} replicas do not fit into a "
            f"memory of {format_size(memory)}; expected more memory or more devices",
            param_hint="'--weights'",
        )
    return rest


def collect(
    params: KVCacheParams, memory: int, max_seq_len: int, max_chunk_tokens: int = MAX_CHUNK_TOKENS
) -> dict[str, Any]:
    """Collect what ``kvcore plan`` prints, ready for JSON.

    Parameters
    ----------
    params : KVCacheParams
    memory : int
        Bytes over all devices.
    max_seq_len, max_chunk_tokens : int
        Tokens of the longest sequence; maximum number of prompt tokens per step.

    Returns
    -------
    dict
        The shape of the model, the arguments, and the results of `_pages`: for the dtype of
        `params`, and under "quantised" for each dtype of `QUANTISED`. With groups, the dict also
        has the results of `_grouping`.

    Raises
    ------
    typer.BadParameter
        The memory of a replica is smaller than a page.
    """
    # One scale per token and head; the granularity must divide all row widths.
    granularity = math.gcd(*(width for group in _rows(params) for width in group))
    narrow = [
        dataclasses.replace(params, dtype=dtype, kv_scale_granularity=granularity)
        for dtype in QUANTISED
    ]
    shape = {name: getattr(params, name) for name in _SHAPE}
    asked = {"memory": memory, "max_seq_len": max_seq_len}
    sizes = (memory, max_seq_len, max_chunk_tokens)
    own, *quantised = [_pages(each, *sizes) for each in (params, *narrow)]
    groups = _grouping(params, max_seq_len, max_chunk_tokens) if params.groups is not None else {}
    return shape | asked | groups | own | {"quantised": quantised}


def _reading(reading: ConfigReading, params: KVCacheParams) -> dict[str, Any]:
    """Return the config fields that the numbers depend on, and the copies of each K/V head."""
    heads = reading.shape["n_kv_heads"]
    return {
        "n_kv_heads": heads,
        "kv_head_copies": 1 if params.is_mla else params.n_kv_heads // heads,
        "bytes_per_token_per_device": params.bytes_per_token // params.tensor_parallel_degree,
        "mtp_layers": reading.mtp_layers,
        "fields": {
            "read": reading.read,
            "defaults": reading.defaults,
            "ignored": reading.ignored,
            "assumed": list(reading.assumed),
        },
    }


def _rows(params: KVCacheParams) -> list[tuple[int, ...]]:
    if params.groups is None:
        return [params.row_widths]
    return [params.row_widths, *(row_widths(params, group) for group in params.attention_groups)]


def _pages(
    params: KVCacheParams, memory: int, max_seq_len: int, max_chunk_tokens: int
) -> dict[str, Any]:
    """Return the bytes of pages of one dtype, per replica over its devices, and their number."""
    replicas = params.data_parallel_degree
    batch = infer_optimal_batch_size(params, max_seq_len, memory, max_chunk_tokens)
    states = STATES_PER_REQUEST * batch // replicas * params.bytes_per_state_slot
    pages = options.fitting_pages(memory - states * replicas, replicas, params.bytes_per_page)
    told = {
        "dtype": params.dtype,
        "kv_scale_granularity": params.kv_scale_granularity,
        "bytes_per_token": params.bytes_per_token,
        "bytes_per_page": params.bytes_per_page,
        "pages": pages,
        "total_pages": pages * replicas,
        "tokens": pages * replicas * params.page_size,
        "batch": batch,
        "longest_sequence": pages * params.page_size,
    }
    if params.groups is None:
        return told
    each = pages_per_sequence(params, max_seq_len, max_chunk_tokens)
    flat = -(-max_seq_len // params.page_size) * params.page_size * params.flat_bytes_per_token
    return told | {
        "tokens": pages * max_seq_len // each * replicas,
        "longest_sequence": max_supported_sequence_length(params, memory, max_chunk_tokens),
        "bytes_per_sequence": sequence_bytes(params, max_seq_len, max_chunk_tokens),
        "flat_bytes_per_sequence": flat,
        "flat_batch": memory // replicas // flat * replicas,
    }


def _grouping(params: KVCacheParams, max_seq_len: int, max_chunk_tokens: int) -> dict[str, Any]:
    """Return the groups of layers, with their kept tokens and the pages of one sequence."""
    run = column_tokens(params)
    groups = [described(group) for group in params.groups or ()]
    for told, group in zip(groups, params.groups or (), strict=True):
        if isinstance(group, State):
            told["bytes_per_slot"] = group.bytes_per_slot * params.tensor_parallel_degree
            continue
        mine = bundles_of(params, group)
        runs = group.max_pages(max_seq_len, run, max_chunk_tokens)
        told["page_size"] = mine[0].page_size
        told["bundles"] = len(mine)
        told["pages_per_sequence"] = len(mine) * runs * (run // mine[0].page_size)
    return {
        "max_chunk_tokens": max_chunk_tokens,
        "layers_per_page": params.layers_per_page,
        "shared_layers": len(params.shared or ()),
        "bytes_per_state_slot": params.bytes_per_state_slot,
        "pages_per_sequence": pages_per_sequence(params, max_seq_len, max_chunk_tokens),
        "groups": groups,
    }
