# SPDX-License-Identifier: Apache-2.0
"""The events of a manager's caches, for programs that track the caches."""

from __future__ import annotations

from kvcore.native.engine import CacheCleared, PagesRemoved, PagesStored

__all__ = ["CacheCleared", "PagesRemoved", "PagesStored"]
