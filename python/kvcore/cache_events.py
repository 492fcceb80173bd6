# SPDX-License-Identifier: Apache-2.0
"""What a manager tells of its caches to who keeps track of them elsewhere."""

from __future__ import annotations

from kvcore.native.engine import CacheCleared, PagesRemoved, PagesStored

__all__ = ["CacheCleared", "PagesRemoved", "PagesStored"]
