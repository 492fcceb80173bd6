# SPDX-License-Identifier: Apache-2.0
"""The backend of NVIDIA's GPUs; imported by ``selection`` when something of theirs is met."""

from __future__ import annotations

from kvcore.backends.cuda.backend import BACKEND

__all__ = ["BACKEND"]
