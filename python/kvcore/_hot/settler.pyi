# SPDX-License-Identifier: Apache-2.0
from typing import final

from typing_extensions import Self

from kvcore._core import CacheManager
from kvcore.backends.protocol import Copier, Mover

@final
class Settler:
    """Carry calls out, with what they leave to be copied.

    Parameters
    ----------
    core : CacheManager
    copier : kvcore.backends.protocol.Copier, or None
        None without a pool: then the manager's caller copies.
    mover : kvcore.backends.protocol.Mover, or None
        None without a host tier.
    """

    def __new__(cls, core: CacheManager, copier: Copier | None, mover: Mover | None) -> Self: ...
