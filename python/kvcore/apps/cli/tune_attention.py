# SPDX-License-Identifier: Apache-2.0
"""``kvcore tune-attention``: measure tile sizes on a GPU of this machine."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcore.apps.cli import options
from kvcore.apps.cli.devices import machine_errors, require_gpu
from kvcore.backends.selection import backend_of
from kvcore.support.dtypes import NARROW, WIDE

_MOST = 1 << 16


def tune_attention(
    *,
    output: Annotated[
        str, typer.Option(metavar="FILE", help="File to write; keeps its other rows.")
    ] = "attention.json",
    device: Annotated[int, typer.Option(min=0, help="Index of the GPU.")] = 0,
    dim: Annotated[int, typer.Option(min=1, max=512, help="Elements of a head.")] = 128,
    heads: Annotated[int, typer.Option(min=1, max=_MOST, help="Heads of K and V.")] = 8,
    q_heads: Annotated[int, typer.Option(min=1, max=_MOST, help="Heads of the queries.")] = 32,
    dtype: Annotated[
        str, typer.Option(help="Dtype of the queries: float16 or bfloat16.")
    ] = "bfloat16",
    pool_dtype: Annotated[str, typer.Option(help="Dtype of K and V.")] = "bfloat16",
    page_size: Annotated[int, typer.Option(min=1, max=_MOST, help="Tokens of a page.")] = 16,
    as_json: options.AsJson = False,
) -> None:
    """Measure attention on a GPU with several tile sizes, and write the fastest to a file.

    To use the file, set KVCORE_ATTENTION_SETTINGS to its path.

    Example: kvcore tune-attention --dim 128 --output attention.json
    """
    if q_heads % heads:
        raise typer.BadParameter(f"expected a multiple of the {heads} --heads, got {q_heads}")
    _one_of("--dtype", dtype, WIDE[1:])
    _one_of("--pool-dtype", pool_dtype, (*WIDE[1:], *NARROW))
    with machine_errors():
        require_gpu(device)
        row = _tuned(device, (dim, heads, q_heads, dtype, pool_dtype, page_size), quiet=as_json)
    from kvcore.backends.cuda.attention.settings_file import VARIABLE, write_row

    options.checked("--output", write_row, Path(output), row)
    if as_json:
        phases = {name: getattr(row, name)._asdict() for name in ("decode", "prompt")}
        typer.echo(json.dumps({"output": output} | row._asdict() | phases))
    else:
        typer.echo(f"wrote {output}; to use it: export {VARIABLE}={output}")


def _tuned(device: int, shape: tuple[Any, ...], *, quiet: bool) -> Any:
    from kvcore.backends.cuda.attention import launch, tuning
    from kvcore.backends.cuda.attention.kernel import attend
    from kvcore.backends.cuda.attention.settings import Row

    place, model = backend_of("cuda").current_place(device), tuning.Model(*shape)
    found = []
    for phase, made in (("decode", tuning.decoding), ("prompt", tuning.prompts)):
        call = made(model, place)
        report = partial(_report, phase, quiet=quiet)
        tried = tuning.candidates(is_prompt=phase == "prompt")
        measure = partial(tuning.microseconds, place)
        found.append(tuning.best(call, tried, measure, report))
    has_codes = model.pool_dtype in NARROW
    return Row(launch.architecture(attend, place), model.dim, has_codes, found[0], found[1])


def _report(phase: str, settings: Any, time: float, *, quiet: bool) -> None:
    if not quiet:
        sizes = " ".join(f"{name}={value}" for name, value in settings._asdict().items())
        typer.echo(f"{phase:<7} {time:>10.1f} us  {sizes}")


def _one_of(option: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise typer.BadParameter(f"{option} is {given}, expected one of {', '.join(allowed)}")
