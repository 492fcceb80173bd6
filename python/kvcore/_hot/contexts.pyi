# SPDX-License-Identifier: Apache-2.0
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from kvcore.context import Exported

_Tokens: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.int64] | Exported

class TextGenerationContext:
    """Hold the tokens of one request and how far their KV is written.

    Parameters
    ----------
    request_id
        Any hashable object that names the request.
    tokens : list of int, or array int32 or int64 [n]
        The prompt, at least one token; copied. Of numpy, torch, or any library with DLPack, in host
        memory.
    active_idx : int, optional
        End of the first chunk to run; the whole prompt by default.
    extra_key, cache_salt : str, optional
        Prefix-cache namespace (LoRA id; tenant). Requests of different namespaces never share
        pages. "" is a key of its own, None is none.
    priority : int
        0 .. 100: how long its pages stay cached, where the manager's eviction policy is
        "priority"; others ignore it, as they do the next two. Pages have the highest priority of
        those who use them.
    ttl : float, optional
        Seconds after their last use for which the pages have that priority; 0 from then on.
    retention : list of (start, end, priority, seconds), optional
        The same for tokens of the prompt, in order: a page is in the range that its first token is
        in. `end` and `seconds` may be None: to the end, for ever.
    extra_keys : list of (int, int, bytes), optional
        Start, length and content of what is more than its token ids, such as images: the bytes tell
        contents apart, a digest for example. A key counts from its start on: pages in front of it
        are shared whatever it is, pages with it or behind it only with requests that have equal
        keys at equal places. In any order; ranges may overlap, at most 64 of them over one token.
    tenant : str, optional
        Whose its pages are, for the quotas of the manager. One that has no quota there is as none;
        a fork without one is of its parent's.

    Raises
    ------
    ValueError
        No tokens, tokens beyond int32, more than one dimension, ``active_idx`` outside ``1 .. n``,
        a priority or a time that is none, ranges that overlap or are not in order, an extra
        key that is empty or outside the tokens.
    TypeError
        Tokens of another dtype, a namespace or tenant that is not a string, a priority or time that
        is no number, an extra key that is not (int, int, bytes), a subclass that overrides what
        managers read.

    Notes
    -----
    ``0 <= start_idx < active_idx <= end_idx`` always. One thread at a time uses a context.

    A subclass may add attributes and methods, and override ``update``, ``extend`` and ``rewind``:
    ``update_batch`` calls ``update`` of each of its contexts. What a manager reads (``tokens``,
    ``start_idx``, ``priority`` and so on) it reads where this class keeps it, so that subclasses
    cost it nothing; one that overrides such an attribute cannot be made. ``__new__`` takes the
    arguments of the constructor: a subclass with others of its own overrides that.

    Examples
    --------
    >>> from kvcore import TextGenerationContext
    >>> ctx = TextGenerationContext("r1", [10, 11, 12])
    >>> ctx.update(13)
    >>> ctx.start_idx, ctx.active_idx, ctx.tokens.tolist()
    (3, 4, [10, 11, 12, 13])
    """

    request_id: Hashable
    extra_key: str | None
    cache_salt: str | None
    def __new__(
        cls,
        request_id: Hashable,
        tokens: _Tokens,
        *,
        active_idx: int | None = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        priority: int = 50,
        ttl: float | None = None,
        retention: Iterable[tuple[int, int | None, int, float | None]] | None = None,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        tenant: str | None = None,
    ) -> Self: ...
    def __deepcopy__(self, memo: object) -> Self: ...
    @property
    def tenant(self) -> str | None:
        """Whose its pages are; None without."""
    @property
    def priority(self) -> int:
        """Priority of its cached pages, 0 .. 100."""
    @property
    def ttl(self) -> float | None:
        """Seconds after the last use for which they have it; None for ever."""
    @property
    def retention(self) -> tuple[tuple[int, int | None, int, float | None], ...]:
        """Ranges of the prompt with a priority of their own, a tuple."""
    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens, int32 [end_idx], read-only: a snapshot that stays valid and unchanged."""
    @property
    def pending(self) -> bool:
        """Whether pages for it are on their way from stores; see ``manager.poll()``."""
    def _set_pending(self, is_pending: bool) -> None: ...
    @property
    def extra_keys(self) -> tuple[tuple[int, int, bytes], ...] | None:
        """Extra keys as (start, length, bytes), sorted, each once; None without."""
    @property
    def start_idx(self) -> int:
        """Tokens whose KV is written; settable within ``0 .. start_idx``: the rest runs again."""
    @start_idx.setter
    def start_idx(self, value: int) -> None: ...
    @property
    def active_idx(self) -> int:
        """End of the chunk to run now; settable within ``start_idx + 1 .. end_idx``."""
    @active_idx.setter
    def active_idx(self, value: int) -> None: ...
    @property
    def end_idx(self) -> int:
        """Number of all tokens."""
    @property
    def active_length(self) -> int:
        """Tokens to run now: ``active_idx - start_idx``."""
    @property
    def current_length(self) -> int:
        """Number of all tokens, the same as ``end_idx``."""
    def update(self, token: int) -> None:
        """Advance past the chunk that ran.

        After the last chunk of the prompt `token`, the newly sampled one, is appended and is what
        runs next; after an earlier chunk the rest of the prompt is, and `token` is discarded.

        Raises
        ------
        ValueError
            A token beyond int32.
        """
    def extend(self, tokens: _Tokens) -> None:
        """Append tokens to run, such as draft tokens: ``active_idx = end_idx =`` the new length.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        """
    def rewind(self, n: int) -> None:
        """Cut the tokens to the first `n`; at least the last of them is to run again.

        Extra keys that start behind them are gone.

        Raises
        ------
        ValueError
            `n` outside ``1 .. end_idx``.
        """
