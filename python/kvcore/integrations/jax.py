# SPDX-License-Identifier: Apache-2.0
"""Let ``kvcore.functional`` run in functions that jax compiles for the CPU.

Importing this module registers `PagedKVCache` with jax as a pytree of its four arrays, so that
compiled functions take and return caches. Compiled functions may then call ``append_kv``,
``gather_kv`` and ``attend_kv``; call ``allocate_blocks`` outside them.

If jaxlib was installed when kvcore was built, XLA calls kvcore's handlers and updates a donated
cache (``donate_argnums=``) in place. Otherwise XLA calls back into Python, and each append copies
the pools.

Examples
--------
>>> import jax  # doctest: +SKIP
>>> import kvcore.integrations.jax  # doctest: +SKIP
>>> from kvcore.functional import append_kv, attend_kv
>>> @partial(jax.jit, donate_argnums=0)  # doctest: +SKIP
... def step(cache, k, v, q):
...     cache = append_kv(cache, 0, k, v)
...     return cache, attend_kv(cache, 0, q)
"""

from __future__ import annotations

import dataclasses

import jax

from kvcore.functional import PagedKVCache
from kvcore.ops.jax_calls import has_handlers

__all__ = ["has_handlers"]

jax.tree_util.register_dataclass(
    PagedKVCache, [each.name for each in dataclasses.fields(PagedKVCache)], []
)
