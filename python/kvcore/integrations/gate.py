# SPDX-License-Identifier: Apache-2.0
"""Whether an engine gets kvcore's manager: a switch, exact versions, and calls that still fit."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection
from typing import Any

__all__ = ["is_on", "is_served", "refused_call", "refused_calls"]

_ON = ("1", "true", "on", "yes")
_OFF = ("", "0", "false", "off", "no")


def is_on(name: str) -> bool:
    """Return whether a variable of the environment switches something on; unset is off.

    Raises
    ------
    ValueError
        The variable has a word that means neither.
    """
    word = os.environ.get(name, "")
    if word.strip().lower() in _ON:
        return True
    if word.strip().lower() in _OFF:
        return False
    raise ValueError(
        f"{name} is {word!r}, must be one of {', '.join(_ON)} or {', '.join(filter(None, _OFF))}"
    )


def is_served(version: str, served: Collection[str]) -> bool:
    """Return whether a version is one of those listed, in any build of it.

    A build is the part behind "+", such as that of "0.33.0+cpu". Pre-releases, post-releases and
    later patches are versions of their own.
    """
    return version.partition("+")[0] in served


def refused_calls(ours: type, theirs: type) -> list[str]:
    """Return the methods of a class that do not take every call of the methods they replace.

    Parameters
    ----------
    ours : type
        A class that kvcore hands to an engine.
    theirs : type
        The class of the engine in whose place it is.

    Returns
    -------
    list of str
        The name of each method, and why a call is refused.
    """
    found = []
    for name, own in vars(ours).items():
        replaced = inspect.getattr_static(theirs, name, None)
        if inspect.isfunction(own) and inspect.isfunction(replaced) and name != "__init__":
            why = refused_call(own, replaced)
            if why is not None:
                found.append(f"{ours.__name__}.{name}: {why}")
    return found


def refused_call(own: Callable[..., Any], replaced: Callable[..., Any]) -> str | None:
    """Return why a function refuses a call that another one takes; None where it takes all.

    Three calls stand for all: with every argument by place, every one by name, and required ones
    only. The value of each argument is its name, so that it shows where the argument arrives.
    """
    signature = inspect.signature(own)
    parameters = [*inspect.signature(replaced).parameters.values()]
    places = [each.name for each in parameters if each.kind in _BY_PLACE]
    more = ["more"] if any(each.kind is each.VAR_POSITIONAL for each in parameters) else []
    names = {each.name: each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    required = [each for each in parameters if each.default is each.empty]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        names["another_name"] = "another_name"
    try:
        for arrived in (
            signature.bind(*places, *more, **names),
            signature.bind(*places[:1], **{name: name for name in places[1:]}, **names),
            signature.bind(
                *(each.name for each in required if each.kind in _BY_PLACE),
                **{each.name: each.name for each in required if each.kind is each.KEYWORD_ONLY},
            ),
        ):
            for name, value in arrived.arguments.items():
                if isinstance(value, str) and value != name:
                    return f"{value!r} arrives as {name!r}"
    except TypeError as error:
        return str(error)
    return None


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
