# SPDX-License-Identifier: Apache-2.0
"""Loads from the host tier that arrive layer by layer."""

from __future__ import annotations

from kvcore.backends.cuda.availability import kernels

__all__ = ["LayerLoads"]


class LayerLoads:
    """Track for a device when each layer of the latest loaded pages has arrived.

    Parameters
    ----------
    device : int
    count : int
        Number of layer places in a page, at least 1.

    Notes
    -----
    One stream runs all loads of a device, so the event of a layer place covers all loads so far.
    No call makes the host wait.
    """

    def __init__(self, device: int, count: int) -> None:
        self._device = device
        self._events = [kernels().Event(device) for _ in range(count)]
        self._has_begun = False

    def arrived(self, position: int, stream: int) -> None:
        """Record the event of a layer place on the stream of the loads."""
        kernels().record(self._events[position].ptr, self._device, stream)
        self._has_begun = True

    @property
    def is_pending(self) -> bool:
        """True if a load may be in flight."""
        is_done = kernels().query
        return self._has_begun and not is_done(self._events[-1].ptr, self._device)

    def wait(self, position: int, stream: int) -> None:
        """Make a stream wait for a layer place in all pages.

        Raises
        ------
        ValueError
            The stream is captured into a graph.
        """
        if kernels().is_capturing(self._device, stream):
            raise ValueError(
                "loads from the host tier are in flight, and a captured stream cannot wait for "
                "them; load a GraphBatch, or call ops.wait_layer before the capture"
            )
        kernels().wait(self._events[position].ptr, self._device, stream)

    def wait_for_all(self, stream: int) -> None:
        """Make a stream wait for all layer places."""
        self.wait(len(self._events) - 1, stream)
