# SPDX-License-Identifier: Apache-2.0
"""torch tensors in host memory as numpy arrays and back, in a microsecond each.

DLPack does the same, but takes five times as long; each layer needs three conversions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcore.support.dtypes import numpy_dtype

__all__ = ["array_of", "tensor_of"]


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """View a tensor as an array; bfloat16 has the dtype of ml_dtypes."""
    if tensor.dtype == torch.bfloat16:
        seen: NDArray[Any] = tensor.detach().view(torch.int16).numpy()
        return seen.view(numpy_dtype("bfloat16"))
    return tensor.detach().numpy()


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """View an array as a tensor."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
