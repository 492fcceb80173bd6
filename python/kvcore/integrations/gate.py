# SPDX-License-Identifier: Apache-2.0
"""Checks before an engine gets kvcore's manager: the switch, exact versions, call signatures."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection
from typing import Any

__all__ = ["is_on", "is_served", "refused_call", "refused_calls"]

_ON = ("1", "true", "on", "yes")
_OFF = ("", "0", "false", "off", "no")


def is_on(name: str) -> bool:
    """Return true if an environment variable switches a feature on; an unset variable means off.

    Raises
    ------
    ValueError
        The value is neither a word for on nor a word for off.
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
    """Return true if a version, or the version of a build, is in the list.

    A build is the part after "+", such as "cpu" in "0.33.0+cpu". Pre-releases, post-releases and
    later patches count as other versions.
    """
    return version.partition("+")[0] in served


def refused_calls(ours: type, theirs: type) -> list[str]:
    """Return the methods of a class that refuse a call which the replaced method takes.

    Parameters
    ----------
    ours : type
        A class that kvcore passes to an engine.
    theirs : type
        The engine's class that it replaces.

    Returns
    -------
    list of str
        The name of each such method, and the reason why it refuses a call.
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
    """Return why a function refuses a call that another function takes; None if it takes all.

    Three calls represent all calls: every argument by position, every argument by name, and only
    the required arguments. Each argument's value is its own name, so that the check can see at
    which parameter the argument arrives.
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
