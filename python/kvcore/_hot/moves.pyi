# SPDX-License-Identifier: Apache-2.0
from collections.abc import Hashable
from typing import Any, NamedTuple

from kvcore._hot.parts import EngineParts

class Mark(NamedTuple):
    """What a request has written, and in which pages.

    Attributes
    ----------
    written : int
        Tokens, as of the last ``step``.
    slot : int
        Of its state; -1 without.
    stands_at : int
        The token that its state is that of; -1 while it runs further.
    replica : int
    stamp : tuple
        Another one where pages were replaced, dropped or left, or the claim is another.
    context : object
        That it was used with last; None where it was claimed alone.
    """

    written: int
    slot: int
    stands_at: int
    replica: int
    stamp: tuple[int, ...]
    context: Any

def mark_of(engine: EngineParts, request_id: Hashable) -> Mark:
    """Return the Mark of a claimed request.

    Raises
    ------
    RequestNotFoundError
    """

def begin_at(engine: EngineParts, context: Any, n: int, name_space: bytes | None = None) -> bool:
    """Have a claimed request, which has no pages yet, go on behind tokens that the caller brings.

    Parameters
    ----------
    engine : EngineParts
    context : context
        Its ``start_idx`` moves to `n`, ``active_idx`` behind it.
    n : int
        Tokens whose K, V and state the caller writes before the next ``step``.
    name_space : bytes, optional
        Where pages are cached in place of the context's own namespace.

    Returns
    -------
    bool
        False when the pages do not fit; then nothing has changed.
    """
