# SPDX-License-Identifier: Apache-2.0
"""Settings that ``kvcore tune-attention`` measured on a GPU, in a JSON file."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from kvcore.backends.cuda.attention.settings import Row, Settings

__all__ = ["VARIABLE", "measured_rows", "read_rows", "write_row"]

#: Environment variable with the path of the file; the first call of GPU attention reads it.
VARIABLE = "KVCORE_ATTENTION_SETTINGS"


def measured_rows() -> tuple[Row, ...]:
    """Return the rows of the file that `VARIABLE` names; an empty tuple if it is not set.

    Raises
    ------
    OSError, ValueError
        See ``read_rows``.
    """
    name = os.environ.get(VARIABLE)
    return _rows_of(name) if name else ()


@cache
def _rows_of(name: str) -> tuple[Row, ...]:
    return read_rows(Path(name))


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read a file of settings.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        The file does not hold settings.
    """
    try:
        return tuple(_row(each) for each in json.loads(path.read_text())["rows"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} holds no settings of attention: {error!r}; write it with "
            f"`kvcore tune-attention`"
        ) from error


def write_row(path: Path, row: Row) -> None:
    """Write a row to a file; replace the row for the same kernels, keep all other rows."""
    others = [each for each in read_rows(path) if each[:3] != row[:3]] if path.exists() else []
    rows = [_fields(each) for each in sorted([*others, row])]
    path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def _row(given: dict[str, Any]) -> Row:
    both = (_settings(given[phase]) for phase in ("decode", "prompt"))
    arch, dim, has_codes = (given[name] for name in Row._fields[:3])
    if type(arch) is not int or type(dim) is not int or type(has_codes) is not bool:
        raise ValueError(f"arch is {arch}, dim {dim}, has_codes {has_codes}")
    return Row(arch, dim, has_codes, *both)


def _settings(given: dict[str, Any]) -> Settings:
    found = Settings(**given)
    for name, value in found._asdict().items():
        is_power = type(value) is int and value > 0 and value & (value - 1) == 0
        if not is_power and not (name == "stages" and value == 3):
            raise ValueError(f"{name} is {value}")
    if min(found.block_m, found.block_n) < 16:
        raise ValueError(f"tiles are {found.block_m} by {found.block_n}, at least 16 by 16")
    return found


def _fields(row: Row) -> dict[str, Any]:
    phases = {name: getattr(row, name)._asdict() for name in ("decode", "prompt")}
    return row._asdict() | phases
