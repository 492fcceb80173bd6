# SPDX-License-Identifier: Apache-2.0
from typing import final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

class PinnedPrefix:
    """Keep the cached pages of a prefix from eviction until ``release()`` or the end of ``with``.

    Attributes
    ----------
    num_tokens : int
        Tokens of the prefix that are cached in whole pages and so are kept.

    Notes
    -----
    An object that is dropped lets the pages go as well.
    """

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    def release(self) -> None:
        """Let the pages go; InvalidHandleError when that was done before."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

@final
class HeldPages:
    """Keep pages as they are until ``let_go()`` or the end of ``with``.

    Attributes
    ----------
    pages : int32 [n]
        As they were asked for.

    Notes
    -----
    An object that is dropped lets the pages go as well.
    """

    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def pages(self) -> NDArray[np.int32]: ...
    def let_go(self) -> None:
        """Let the pages go; InvalidHandleError when that was done before."""
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
