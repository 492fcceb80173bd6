# SPDX-License-Identifier: Apache-2.0
"""Read and write sizes in bytes."""

import re
from fractions import Fraction

_UNITS = {"b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS[f"{_prefix}b"] = 1000**_power
    _UNITS[f"{_prefix}ib"] = 1024**_power

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST_CHARACTERS = 40  # more digits than any memory needs

_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def match_quantity(text: str) -> re.Match[str] | None:
    """Match a number and the letters after it; raise ValueError for a text of extreme length."""
    if len(text) > _MOST_CHARACTERS:
        shown = text[:_MOST_CHARACTERS]
        raise ValueError(f"expected at most {_MOST_CHARACTERS} characters, got '{shown}...'")
    return _QUANTITY.fullmatch(text.strip())


def parse_size(text: str) -> int:
    """Read a size such as ``80GiB``, ``1.5 GB`` or ``4096``.

    Parameters
    ----------
    text : str
        A number and a unit, any case: B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB
        (powers of 1024); no unit means bytes.

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    ValueError
        `text` is not a size.

    Examples
    --------
    >>> parse_size("1.5 KiB"), parse_size("2kB"), parse_size("77")
    (1536, 2000, 77)
    """
    match = match_quantity(text)
    factor = _UNITS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"expected a size such as 80GiB, 1.5GB or 4096 (bytes), got {text!r}")
    return int(Fraction(match[1]) * factor)


def format_size(size: int) -> str:
    """Write a number of bytes with the largest binary unit that leaves at least 1.

    Examples
    --------
    >>> format_size(80 << 30), format_size(1536), format_size(1023)
    ('80 GiB', '1.5 KiB', '1023 B')
    """
    power = min((max(size, 1).bit_length() - 1) // 10, len(_BINARY) - 1)
    return f"{round(size / 1024**power, 2):g} {_BINARY[power]}"
