# SPDX-License-Identifier: Apache-2.0
"""Loads from the host tier that arrive layer by layer."""

from __future__ import annotations

from kvcore.backends.cuda.availability import kernels

__all__ = ["LayerLoads"]


class LayerLoads:
    """Know of a device when each layer's part of the pages that were loaded last is there.

    Parameters
    ----------
    device : int
    count : int
        Places of layers in a page, at least 1.

    Notes
    -----
    One stream makes all loads of a device, so the event of a place stands for all of them up to the
    last one. No call makes the host wait.
    """

    def __init__(self, device: int, count: int) -> None:
        self._device = device
        self._events = [kernels().Event(device) for _ in range(count)]
        self._has_begun = False

    def arrived(self, position: int, stream: int) -> None:
        """Let the event of a place stand for what the stream of the loads has to do now."""
        kernels().record(self._events[position].ptr, self._device, stream)
        self._has_begun = True

    @property
    def is_pending(self) -> bool:
        """Some of it may not be there yet."""
        is_done = kernels().query
        return self._has_begun and not is_done(self._events[-1].ptr, self._device)

    def wait(self, position: int, stream: int) -> None:
        """Let a stream wait for a place in all pages.

        Raises
        ------
        ValueError
            The stream is captured into a graph.
        """
        if kernels().is_capturing(self._device, stream):
            raise ValueError(
                "pages are still on their way from the host tier, which a captured stream cannot "
                "wait for; load a GraphBatch, or call ops.wait_layer before the capture"
            )
        kernels().wait(self._events[position].ptr, self._device, stream)

    def wait_for_all(self, stream: int) -> None:
        """Let a stream wait for all places."""
        self.wait(len(self._events) - 1, stream)
