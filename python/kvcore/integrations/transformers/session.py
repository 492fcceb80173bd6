# SPDX-License-Identifier: Apache-2.0
"""A block in which a model uses kvcore's attention."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers

from kvcore.integrations.transformers.attention import NAME
from kvcore.integrations.transformers.mixers import mixing

__all__ = ["paged_attention", "refused"]

# By the config, which has the attention setting; models may share a config.
_GUARD = threading.Lock()
_LOCKS: dict[int, threading.RLock] = {}


def refused(model: Any, reason: str) -> ValueError:
    """Make the error for a model that cannot run on kvcore's pages."""
    return ValueError(
        f"{type(model).__name__} cannot generate through kvcore: {reason}; "
        f"model.generate still works"
    )


def _lock_of(config: Any) -> Any:
    with _GUARD:
        lock = _LOCKS.get(id(config))
        if lock is None:
            lock = _LOCKS[id(config)] = threading.RLock()
            weakref.finalize(config, _LOCKS.pop, id(config), None)
        return lock


def _settings(config: Any) -> dict[str, Any] | str:
    """Return the argument of ``set_attn_implementation`` that restores the present settings."""
    current: str = config._attn_implementation  # noqa: SLF001 - there is no public reader
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    settings = {name: _settings(part) for name, part in parts.items() if part is not None}
    return {"": current, **settings} if settings else current


@contextmanager
def paged_attention(model: Any) -> Iterator[None]:
    """Set a model's attention to "kvcore" inside the block, and restore it after the block.

    Inside the block, recurrent layers run the rows of a packed batch from their slots.

    Parameters
    ----------
    model : PreTrainedModel

    Raises
    ------
    ValueError
        The model does not attend through transformers' attention interface.

    Notes
    -----
    The setting belongs to the model's config, so the block admits one thread at a time for a
    config. Costs about 0.1 ms, and a walk over all modules.
    """
    config = model.config
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        raise refused(model, f"its attention is not open to kvcore ({NAME} cannot be set)")
    with _lock_of(config):
        before = _settings(config)
        try:
            model.set_attn_implementation(NAME)
            if config._attn_implementation != NAME:  # noqa: SLF001
                raise refused(
                    model,
                    f"its attention stays {config._attn_implementation!r} "  # noqa: SLF001
                    f"in transformers {transformers.__version__}",
                )
            with mixing(model):
                yield
        finally:
            model.set_attn_implementation(before)
