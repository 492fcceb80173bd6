# SPDX-License-Identifier: Apache-2.0
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.parts import EngineParts

MEDIA: Final[tuple[str, str, str]]

@final
class PagesStored:
    """Pages one behind the other that can be found from now on.

    Of "STORAGE" the keys alone are known: there is no parent, and no token.
    """

    @property
    def replica(self) -> int:
        """Data parallel replica."""
    @property
    def medium(self) -> str:
        """Where the pages lie: "GPU", "CPU" (the host tier) or "STORAGE" (stores below it)."""
    @property
    def group_idx(self) -> int | None:
        """The group whose pages these are, by its index; None without groups, or for all."""
    @property
    def keys(self) -> list[bytes]:
        """Keys of the pages, bytes [32] each: as ``page_keys`` with the manager's fingerprint."""
    @property
    def hashes(self) -> list[int]:
        """The low 64 bits of each key, as int."""
    def __len__(self) -> int: ...
    @property
    def parent_key(self) -> bytes | None:
        """The key of the page in front of the first one, bytes [32]; None where that is first."""
    @property
    def parent_hash(self) -> int | None:
        """The low 64 bits of it, as int; None likewise."""
    @property
    def tokens(self) -> NDArray[np.int32]:
        """Tokens of the pages, int32 [pages * page_size], on the host; the caller's own."""
    @property
    def page_size(self) -> int:
        """Tokens of a page; with groups those of the largest."""
    @property
    def extra_key(self) -> str | None:
        """``extra_key`` of the requests, such as the name of a LoRA; None for none."""
    @property
    def cache_salt(self) -> str | None:
        """``cache_salt`` of the requests; None for none."""
    @property
    def extra_keys(self) -> list[list[tuple[bytes, int, int]] | None] | None:
        """For each page None, or [(bytes, start, length), ...] as of ``keys_of_pages``."""

@final
class PagesRemoved:
    """Pages that are found there no more, in any order."""

    @property
    def replica(self) -> int:
        """Data parallel replica."""
    @property
    def medium(self) -> str:
        """Where the pages lie: "GPU", "CPU" (the host tier) or "STORAGE" (stores below it)."""
    @property
    def group_idx(self) -> int | None:
        """The group whose pages these are, by its index; None without groups, or for all."""
    @property
    def keys(self) -> list[bytes]:
        """Keys of the pages, bytes [32] each: as ``page_keys`` with the manager's fingerprint."""
    @property
    def hashes(self) -> list[int]:
        """The low 64 bits of each key, as int."""
    def __len__(self) -> int: ...

@final
class CacheCleared:
    """A replica has nothing on any medium, but for what the events behind this say.

    Attributes
    ----------
    replica : int
        Data parallel replica.
    """

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    """A replica has nothing on any medium, but for what the events behind this say.

    Attributes
    ----------
    replica : int
        Data parallel replica.
    """

    @property
    def replica(self) -> int: ...

def take_events(
    engine: EngineParts,
) -> list[PagesStored | PagesRemoved | CacheCleared]:
    """Return the events of a manager since the last call."""
