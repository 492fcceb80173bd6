# SPDX-License-Identifier: Apache-2.0
"""The backend of NVIDIA GPUs; ``selection`` imports it on first use."""

from __future__ import annotations

from kvcore.backends.cuda.backend import BACKEND

__all__ = ["BACKEND"]
