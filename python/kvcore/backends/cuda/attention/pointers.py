# SPDX-License-Identifier: Apache-2.0
"""Pointers that Triton takes: an address and the name of a dtype, without a library."""

from __future__ import annotations

from typing import Any

from kvcore.backends.arrays import address_of

__all__ = ["Pointer", "pointer_to", "strides_of"]


class Pointer:
    """Hold the address and the dtype of memory.

    A compiled kernel reads ``data_ptr`` and ``dtype``. Triton's interpreter treats the pointer as a
    torch tensor, and copies it to the host and back: here both copies are the same memory.
    """

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: str) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return self.address

    def untyped_storage(self) -> Pointer:
        """Return the memory, for the interpreter."""
        return self

    cpu = untyped_storage

    def new_empty(self, size: int, device: str) -> Pointer:  # noqa: ARG002 - as torch has it
        """Return a tensor that ``set_`` is called on, for the interpreter."""
        return Pointer(self.address, self.dtype)

    def set_(self, *_: Any) -> None:
        """Do nothing: the tensor has this memory already."""

    def copy_(self, other: Pointer) -> None:
        """Copy nothing: the other is the same memory."""

    def storage_offset(self) -> int:
        """Return 0."""
        return 0

    def size(self) -> tuple[int, ...]:
        """Return an empty shape: the interpreter does not use it."""
        return ()

    stride = size


def pointer_to(array: Any, dtype: str | None = None) -> Pointer | None:
    """Return the pointer to a numpy or cupy array; None for None."""
    if array is None:
        return None
    return Pointer(address_of(array), dtype or _BITS.get(array.dtype.name, array.dtype.name))


#: Kernels take fp8 as bits, and decode the bits.
_BITS = {"float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def strides_of(array: Any, axes: int) -> tuple[int, ...]:
    """Return the first strides of an array, in elements.

    Raises
    ------
    ValueError
        A stride is not a multiple of the element size.
    """
    size = array.dtype.itemsize
    steps = tuple(array.strides[:axes])
    if any(step % size for step in steps):
        raise ValueError(
            f"strides are {steps} bytes for elements of {size}, must be multiples of them"
        )
    return tuple(step // size for step in steps)
