# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels on host memory, through Triton's own interpreter."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conftest import require
from kvcore import PagedBatch
from kvcore.backends.host import HOST
from kvcore.backends.protocol import AttentionRequest
from kvcore.ops.batch import layer_pools
from kvcore.ops.nvfp4_calls import global_scales_of


def require_interpreter() -> Any:
    """Return triton with interpreted kernels, or skip the calling file."""
    triton = require("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is 0: kernels are compiled", allow_module_level=True)
    from triton.runtime.interpreter import InterpreterBuilder

    if InterpreterBuilder.create_dot is not _dot:
        InterpreterBuilder.create_dot = _dot
        InterpreterBuilder.create_fp_trunc = _rounded(InterpreterBuilder.cast_impl)
    return triton


def attend_on_host(
    batch: PagedBatch, q: Any, offsets: Any, *, splits: int | None = 1, **asked: Any
) -> tuple[Any, Any]:
    """Run ``ops.attention`` as on a GPU, on host arrays; return (o, lse)."""
    from kvcore.backends.cuda.attention import verb

    pools = layer_pools(batch, 0)
    rule = ("scale", "causal", "window", "chunk", "soft_cap", "sinks")
    request = AttentionRequest(
        pools.parts,
        global_scales_of(pools, HOST),
        asked.pop("v_head_dim", None),
        (pools.lookup_table, pools.cache_lengths, (offsets, offsets)),
        q,
        tuple(asked.pop(name, name == "causal" or None) for name in rule),
        (asked.pop("shared", ()), 0),
        asked.pop("out", None),
        asked.pop("lse", None),
        True,
        1,
        splits,
        asked.pop("scratch", None),
    )
    assert not asked
    return verb.run(HOST, request)


def _dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """Multiply numbers: Triton 3.9 treats the bits of bfloat16 as integers.

    Products of 16-bit numbers are exact in float32, as on a GPU.
    """
    from triton.runtime.interpreter import TensorHandle

    products = np.matmul(_wide(a), _wide(b), dtype=np.float32)
    return TensorHandle(products + d.data, d.dtype.scalar)


def _wide(handle: Any) -> Any:
    if str(handle.dtype.scalar) != "bf16":
        return handle.data.astype(np.float32)
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _rounded(cast: Any) -> Any:
    """Round to the nearest bfloat16 as GPUs do: Triton 3.9 truncates."""
    from triton.runtime.interpreter import TensorHandle

    def truncate(builder: Any, handle: Any, dtype: Any) -> Any:
        if str(dtype.scalar) != "bf16" or str(handle.dtype.scalar) != "fp32":
            return cast(builder, handle, dtype)
        bits = handle.data.astype(ml_dtypes.bfloat16).view(np.uint16)
        return TensorHandle(bits, dtype.scalar)

    return truncate
