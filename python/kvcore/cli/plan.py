# SPDX-License-Identifier: Apache-2.0
"""``kvcore plan``: how many tokens, sequences and pages a model's cache gets out of memory."""

import dataclasses
import json
import math
from typing import Annotated, Any

import typer

from kvcore import KVCacheParams
from kvcore.cli import options
from kvcore.cli.plan_table import print_plan
from kvcore.cli.presets import PRESETS, model_params
from kvcore.cli.sizes import parse_size, parse_tokens
from kvcore.dtypes import itemsize
from kvcore.replay import PoolSettings
from kvcore.sizing import infer_optimal_batch_size

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
        help="For K and V, over all devices, such as 80GiB: what weights and activations leave.",
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
    str | None, typer.Option(metavar="NAME", help="Of the pages.", show_default="the model's")
]


def plan(
    *,
    model: Model,
    memory: Memory,
    max_seq_len: MaxSeqLen,
    tp: Tp = 1,
    dp: Dp = 1,
    dtype: Dtype = None,
    page_size: options.PageSize = PoolSettings.page_size,
    as_json: options.AsJson = False,
) -> None:
    """Tell what a model's cache costs and what fits into the memory that is left for it.

    Every layer keeps every token, whatever its sliding window. Beside the pages asked for stand
    quantised ones, with one float32 scale per token and head.

    Example: kvcore plan llama-3.1-70b --memory 640GiB --max-seq-len 32k --tp 8
    """
    if dtype is not None:
        options.checked("--dtype", itemsize, dtype)
    size = options.checked("--memory", parse_size, memory)
    tokens = options.checked("--max-seq-len", parse_tokens, max_seq_len)
    params = options.checked("CONFIG|PRESET", model_params, model, page_size, dtype)
    params = options.checked("--tp", _spread, params, tp, dp)
    answer = collect(params, size, tokens)
    if as_json:
        typer.echo(json.dumps({"model": model} | answer))
    else:
        print_plan(model, answer)


def _spread(params: KVCacheParams, tp: int, dp: int) -> KVCacheParams:
    return dataclasses.replace(params, n_devices=tp * dp, data_parallel_degree=dp)


def collect(params: KVCacheParams, memory: int, max_seq_len: int) -> dict[str, Any]:
    """Collect what ``kvcore plan`` prints, ready for JSON.

    Parameters
    ----------
    params : KVCacheParams
    memory : int
        Bytes over all devices.
    max_seq_len : int
        Tokens.

    Returns
    -------
    dict
        The model's shape and the request; then, for the params' own dtype and under "quantised" for
        each of `QUANTISED`, what `_pages` returns.

    Raises
    ------
    typer.BadParameter
        A replica gets no page.
    """
    # One scale per token and head; rows of two widths need one that divides both.
    granularity = math.gcd(*params.row_widths)
    narrow = [
        dataclasses.replace(params, dtype=dtype, kv_scale_granularity=granularity)
        for dtype in QUANTISED
    ]
    shape = {name: getattr(params, name) for name in _SHAPE}
    asked = {"memory": memory, "max_seq_len": max_seq_len}
    own, *quantised = [_pages(each, memory, max_seq_len) for each in (params, *narrow)]
    return shape | asked | own | {"quantised": quantised}


def _pages(params: KVCacheParams, memory: int, max_seq_len: int) -> dict[str, Any]:
    """Tell what pages of one dtype cost (per replica, over its devices) and how many there are."""
    replicas = params.data_parallel_degree
    pages = options.fitting_pages(memory, replicas, params.bytes_per_page)
    return {
        "dtype": params.dtype,
        "kv_scale_granularity": params.kv_scale_granularity,
        "bytes_per_token": params.bytes_per_token,
        "bytes_per_page": params.bytes_per_page,
        "pages": pages,
        "total_pages": pages * replicas,
        "tokens": pages * replicas * params.page_size,
        "batch": infer_optimal_batch_size(params, max_seq_len, memory),
        "longest_sequence": pages * params.page_size,
    }
