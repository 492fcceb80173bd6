# SPDX-License-Identifier: Apache-2.0
"""Find the instruction set of the processor."""

import platform
from collections.abc import Iterable
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")

# The features that each level of the x86-64 psABI adds, by their Linux names.
_X86_64_LEVELS = {
    "x86-64-v2": "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}


def x86_64_level(flags: Iterable[str]) -> str:
    """Return the highest level whose features the processor has.

    Parameters
    ----------
    flags : iterable of str
        CPU features as ``/proc/cpuinfo`` spells them.

    Returns
    -------
    str
        "x86-64" up to "x86-64-v4".

    Examples
    --------
    >>> x86_64_level("cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2 avx".split())
    'x86-64-v2'
    """
    have = set(flags)
    level = "x86-64"
    for name, added in _X86_64_LEVELS.items():
        if not have.issuperset(added.split()):
            break
        level = name
    return level


def isa_level() -> str:
    """Return this processor's instruction set, with its level on x86-64."""
    machine = platform.machine()
    if machine.lower() not in ("x86_64", "amd64") or not _CPUINFO.is_file():
        return machine
    for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return x86_64_level(value.split())
    return machine
