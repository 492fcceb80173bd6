# SPDX-License-Identifier: Apache-2.0
"""Arguments of moving that are looked at before anything is copied."""

from __future__ import annotations

import io
import os
from typing import Any

from kvcore.context import TextGenerationContext

__all__ = ["require_context", "require_model", "require_target"]

_NEEDED = ("request_id", "tokens", "start_idx", "active_idx", "end_idx", "update")


def require_context(context: Any) -> None:
    """Raise TypeError for what is no context."""
    if isinstance(context, TextGenerationContext):
        return
    missing = [name for name in _NEEDED if not hasattr(context, name)]
    if missing:
        raise TypeError(f"ctx is a {type(context).__name__}, no context: it has no {missing[0]}")


def require_model(model: Any) -> None:
    """Raise TypeError for a model that is no name."""
    if model is not None and not isinstance(model, str):
        raise TypeError(f"model is a {type(model).__name__}, must be a str or None")


def require_target(file: Any) -> None:
    """Raise TypeError for what cannot be written to."""
    is_binary = hasattr(file, "write") and not isinstance(file, io.TextIOBase)
    if file is not None and not isinstance(file, str | os.PathLike) and not is_binary:
        raise TypeError(
            f"file is a {type(file).__name__}, must be a path, or a file opened in binary mode"
        )
