# SPDX-License-Identifier: Apache-2.0
"""Attention on pages in the memory of GPUs, in Triton; imported when it is first asked for."""

from __future__ import annotations

from kvcore.backends.cuda.attention.call import Call, attend, scratch_elements

__all__ = ["Call", "attend", "scratch_elements"]
