# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

_Tokens: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]
_ExtraKeys: TypeAlias = Iterable[tuple[int, int, bytes]] | None
_Scheme: TypeAlias = Literal["kvcore", "vllm"]
_Seed: TypeAlias = str | bytes | int | None

SCHEME_VERSION: Final[int]

def digest_of(item: Any) -> bytes:
    """Return SHA-256 of a value in canonical CBOR: None, int, str, bytes, lists and tuples."""

def root_key(
    *,
    extra_key: str | None = None,
    cache_salt: str | None = None,
    seed: _Seed = None,
    scheme: _Scheme = "kvcore",
) -> bytes:
    """Return what stands in front of the first page of a sequence.

    Parameters
    ----------
    extra_key, cache_salt : str, optional
        Prefix-cache namespace, as of a context.
    seed : str, bytes or int, optional
        Separates users of one store that must not find each other's pages.
    scheme : str
        "kvcore" or "vllm", see ``page_keys``.

    Returns
    -------
    bytes [32]

    Raises
    ------
    ValueError, TypeError
        As of ``page_keys``.

    Examples
    --------
    >>> from kvcore.keys import root_key
    >>> root_key().hex()
    'a630a5f1a5271031242f1fd64a16e4ada34d48cccd10ce74d45a95db82b3afdb'
    """

def page_key(parent: bytes, tokens: _Tokens, extra: Sequence[Any] | None = None) -> bytes:
    """Return the key of one page.

    Parameters
    ----------
    parent : bytes [32]
        The key of the page in front, or a root key.
    tokens : list of int, or array int32 or int64 [n]
        The page's tokens.
    extra : list, optional
        What tells the page's tokens from equal ones: lists and tuples of int, str, bytes and None.
        As ``kvcore.extra_keys.keys_of_pages`` lists it; None or empty where there is nothing.

    Returns
    -------
    bytes [32]
        SHA-256 of ``[parent, [tokens...], extra]`` in canonical CBOR.

    Raises
    ------
    ValueError
        A parent of another length, tokens beyond int32, an int of `extra` beyond int64.
    TypeError
        Another type than these.

    Examples
    --------
    >>> from kvcore.keys import page_key
    >>> page_key(bytes(32), list(range(16))).hex()
    '2464a2d934d06889ea9ce93b71642eaf2348923006a6214c1d6b1340eb482213'
    """

@final
class KeyChain:
    """Keep the keys of a sequence that grows.

    Parameters
    ----------
    page_size : int
        Tokens per page.
    extra_key, cache_salt, seed, prompt_embeds, scheme
        As of ``page_keys``.

    Raises
    ------
    ValueError, TypeError
        As of ``page_keys``.

    Notes
    -----
    Tokens are hashed as they come and not kept: a call costs O(new tokens), whatever the length.
    One thread at a time uses a chain.

    Examples
    --------
    >>> from kvcore.keys import KeyChain, page_keys
    >>> chain = KeyChain(2, cache_salt="tenant")
    >>> len(chain.extend([1, 2, 3])), len(chain.extend([4, 5]))
    (1, 1)
    >>> chain.keys == page_keys([1, 2, 3, 4, 5], 2, cache_salt="tenant")
    True
    """

    def __new__(
        cls,
        page_size: int,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        seed: _Seed = None,
        prompt_embeds: NDArray[Any] | None = None,
        scheme: _Scheme = "kvcore",
    ) -> Self: ...
    @property
    def page_size(self) -> int:
        """Tokens per page."""
    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
    @property
    def num_pages(self) -> int:
        """Complete pages so far, each with a key."""
    @property
    def root(self) -> bytes:
        """What stands in front of the first page, bytes [32]."""
    @property
    def keys(self) -> list[bytes]:
        """The keys of all complete pages, a list of bytes [32]."""
    def extend(self, tokens: _Tokens, extra_keys: _ExtraKeys = None) -> list[bytes]:
        """Append tokens.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_keys : list of (int, int, bytes), optional
            Those that start in these tokens, in any order; starts count from the first token of the
            sequence. They may reach behind the tokens.

        Returns
        -------
        list of bytes [32]
            The keys of the pages that are complete now and were not before.

        Raises
        ------
        ValueError
            Tokens beyond int32, an extra key that starts elsewhere or has a length below 1; with
            the scheme "vllm", one that is no UTF-8.
        TypeError
            Tokens of another dtype, an extra key that is not (int, int, bytes).
        """
    def truncate(self, num_pages: int) -> None:
        """Forget all behind the first pages, for a sequence that goes on in another way there.

        Raises
        ------
        ValueError
            `num_pages` outside ``0 .. num_pages``.
        """
    def copy(self) -> KeyChain:
        """Return a chain that goes on by itself from here, such as that of a fork; O(pages)."""
    def __copy__(self) -> KeyChain: ...
    def __deepcopy__(self, memo: Any) -> KeyChain: ...

def page_keys(
    tokens: _Tokens,
    page_size: int,
    *,
    extra_key: str | None = None,
    cache_salt: str | None = None,
    seed: _Seed = None,
    extra_keys: _ExtraKeys = None,
    prompt_embeds: NDArray[Any] | None = None,
    scheme: _Scheme = "kvcore",
) -> list[bytes]:
    """Return the keys of a sequence's complete pages.

    Parameters
    ----------
    tokens : list of int, or array int32 or int64 [n]
        The sequence; tokens behind its last complete page count for nothing.
    page_size : int
        Tokens per page.
    extra_key, cache_salt : str, optional
        Prefix-cache namespace, as of a context. With "vllm" the name of a LoRA, and the salt.
    seed : str, bytes or int, optional
        Separates users of one store that must not find each other's pages. With "vllm" the value of
        ``PYTHONHASHSEED`` there; None where that is not set.
    extra_keys : list of (int, int, bytes), optional
        Start, length and content of what is more than its token ids, as of a context.
    prompt_embeds : array [m, elements], optional
        With "vllm", embeddings that stand for the first `m` tokens; their bytes count.
    scheme : str
        "kvcore", or "vllm": as vLLM has them with ``--prefix-caching-hash-algo sha256_cbor``.

    Returns
    -------
    list of bytes [32]

    Raises
    ------
    ValueError
        A `page_size` below 1, tokens beyond int32, another scheme; an extra key that starts behind
        the tokens or has a length below 1; with "vllm" one that is no UTF-8.
    TypeError
        Tokens of another dtype; a namespace, seed, scheme or extra key of another type.

    Notes
    -----
    The same in every process, whatever its PYTHONHASHSEED. Costs O(tokens); other Python threads
    run meanwhile.

    Examples
    --------
    >>> from kvcore.keys import page_key, page_keys, root_key
    >>> keys = page_keys([1, 2, 3, 4, 5], 2)
    >>> keys == [page_key(root_key(), [1, 2]), page_key(keys[0], [3, 4])]
    True
    """
