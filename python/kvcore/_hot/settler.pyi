# SPDX-License-Identifier: Apache-2.0
from typing import final

from typing_extensions import Self

from kvcore._core import CacheManager
from kvcore.engine_parts import Copier, Mover

@final
class Settler:
    """Carry calls out, with what they leave to be copied.

    Parameters
    ----------
    core : CacheManager
    copier : kvcore.page_copies.Copier, or None
        None without a pool: then the manager's caller copies.
    mover : kvcore.swap.Mover, or None
        None without a host tier.
    """

    def __new__(cls, core: CacheManager, copier: Copier | None, mover: Mover | None) -> Self: ...
