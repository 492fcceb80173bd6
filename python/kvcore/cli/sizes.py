# SPDX-License-Identifier: Apache-2.0
"""Read and write sizes in bytes."""

import re

_UNITS = {"b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS[f"{_prefix}b"] = 1000**_power
    _UNITS[f"{_prefix}ib"] = 1024**_power

_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


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
        For anything else.

    Examples
    --------
    >>> parse_size("1.5 KiB"), parse_size("2kB"), parse_size("77")
    (1536, 2000, 77)
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"expected a size such as 80GiB, 1.5GB or 4096 (bytes), got {text!r}")
    number = float(match[1])
    return int(match[1]) * factor if match[1].isdecimal() else int(number * factor)
