# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias, final, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray
from typing_extensions import Self

from kvcore.policies import EvictionPolicy
from kvcore.results import PrefixRun

_Tokens: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]
_Keys: TypeAlias = NDArray[np.uint64] | Sequence[bytes | int]
_ExtraKeys: TypeAlias = Iterable[tuple[int, int, bytes]] | None
_Scheme: TypeAlias = Literal["kvcore", "vllm"]
_Seed: TypeAlias = str | bytes | int | None

SCHEME_VERSION: Final[int]

class PrefixHandle:
    @property
    def num_pages(self) -> int: ...
    @property
    def partial_tokens(self) -> int: ...

@final
class FreedList: ...

class PrefixTree:
    def __new__(
        cls,
        page_size: int,
        eviction: EvictionPolicy | str = "lru",
        *,
        token_dtype: DTypeLike = "int32",
        paired: bool = False,
    ) -> Self: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def num_evictable(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...
    def match(
        self,
        tokens: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        *,
        touch: bool = False,
        lookahead: int = 0,
        out: NDArray[np.int32] | None = None,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
    ) -> tuple[NDArray[np.int32], PrefixHandle]: ...
    @overload
    def insert(
        self,
        tokens: _Tokens,
        pages: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        *,
        priority: int = 50,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_handle: Literal[False] = False,
        after: PrefixHandle | None = None,
        pin: Literal[False] = False,
    ) -> NDArray[np.int32]: ...
    @overload
    def insert(
        self,
        tokens: _Tokens,
        pages: _Tokens,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        *,
        priority: int = 50,
        extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
        return_handle: Literal[True],
        after: PrefixHandle | None = None,
        pin: bool = False,
    ) -> tuple[NDArray[np.int32], int, PrefixHandle]: ...
    def pin(self, handle: PrefixHandle) -> None: ...
    def unpin(self, handle: PrefixHandle) -> None: ...
    def pages_of(self, handle: PrefixHandle, first: int = 0) -> NDArray[np.int32]: ...
    def evict(self, n: int) -> NDArray[np.int32]: ...
    def reset(self) -> NDArray[np.int32]: ...
    def forget(self, pages: _Tokens) -> int: ...
    def take_forgotten(self) -> NDArray[np.int32]: ...
    def runs(self) -> list[PrefixRun]: ...
    def check_integrity(self) -> None: ...

def hashes_of(keys: _Keys) -> NDArray[np.uint64]: ...

@final
class WorkerPages:
    def __init__(self, num_workers: int) -> None: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def pages_of(self, worker: int) -> int: ...
    def store(self, worker: int, keys: _Keys, medium: int) -> None: ...
    def remove(self, worker: int, keys: _Keys, medium: int) -> None: ...
    def clear(self, worker: int) -> None: ...
    def match(self, keys: _Keys, media: int) -> NDArray[np.int32]: ...
    def check_integrity(self) -> None: ...

@final
class Prompt: ...

def digest_of(item: Any) -> bytes: ...
def root_key(
    *,
    extra_key: str | None = None,
    cache_salt: str | None = None,
    seed: _Seed = None,
    scheme: _Scheme = "kvcore",
) -> bytes: ...
def page_key(parent: bytes, tokens: _Tokens, extra: Sequence[Any] | None = None) -> bytes: ...

@final
class KeyChain:
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
    def page_size(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def root(self) -> bytes: ...
    @property
    def keys(self) -> list[bytes]: ...
    def extend(self, tokens: _Tokens, extra_keys: _ExtraKeys = None) -> list[bytes]: ...
    def truncate(self, num_pages: int) -> None: ...
    def copy(self) -> KeyChain: ...
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
) -> list[bytes]: ...
