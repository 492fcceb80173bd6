# SPDX-License-Identifier: Apache-2.0
"""The exchange table of torch: native code reads tensors through it without a Python call."""

from __future__ import annotations

import pytest

from conftest import REQUIRED, require


def require_exchange() -> None:
    """Skip the calling test if this torch has no exchange table; fail if torch is required."""
    if not hasattr(require("torch").Tensor, "__dlpack_c_exchange_api__"):
        if "torch" in REQUIRED:
            raise RuntimeError("KVCORE_REQUIRE names torch, but this one has no exchange table")
        pytest.skip("this torch has no exchange table")
