# SPDX-License-Identifier: Apache-2.0
"""Options of the functions of kvcore.ops: documented in one place, read in one place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcore import ops
from kvcore.backends.host import HOST
from kvcore.ops.options import Options, array_at, documents_options

VERBS = [verb for verb in map(vars(ops).get, ops.__all__) if inspect.isfunction(verb)]


def described(verb: Callable[..., Any]) -> list[str]:
    """Return the names in the section of parameters, in its order."""
    text = inspect.getdoc(verb) or ""
    section = re.split(r"\n\n\w+\n-{3,}\n", text.partition("Parameters\n----------\n")[2])[0]
    lines = [line.partition(" :")[0] for line in section.splitlines() if not line.startswith(" ")]
    return [name for line in lines for name in line.split(", ")]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_verbs_describe_each_parameter_once(verb: Callable[..., Any]) -> None:
    assert sorted(described(verb)) == sorted(inspect.signature(verb).parameters)


def test_options_are_described_behind_the_other_parameters() -> None:
    assert described(ops.quantize)[-3:] == ["out", "stream", "threads"]
    text = inspect.getdoc(ops.quantize) or ""
    assert text.index("caller's included.\n\nReturns\n") < text.index("\n\nRaises\n")


def test_a_verb_without_docstrings_stays_as_it_is() -> None:
    def verb(*, stream: Any = None) -> Any:
        return stream

    assert documents_options(verb) is verb
    assert verb.__doc__ is None


def test_a_description_may_be_the_last_section() -> None:
    def verb(*, threads: int = 1) -> int:
        """Do it.

        Parameters
        ----------
        x : int
        """
        return threads

    assert described(documents_options(verb)) == ["x", "threads"]


def test_results_are_those_given_or_fresh_ones() -> None:
    fresh, given = np.zeros(2), [np.zeros(2), np.zeros(2)]
    assert Options(out=given).result(HOST, fresh, fresh, fresh) is given
    assert Options().result(HOST, fresh, fresh) is fresh
    assert Options().result(HOST, fresh, *given) == tuple(given)


def test_places_and_last_arguments_are_of_the_arrays() -> None:
    assert Options().place({"x": np.zeros(2), "y": None}) is HOST
    assert HOST.launch_args(3) == (3,)
    assert array_at(HOST, memoryview(b"ab"), "x").tolist() == [97, 98]
    with pytest.raises(ValueError, match="stream is given for arrays in host memory"):
        Options(stream=7).place({"x": np.zeros(2)})
