# SPDX-License-Identifier: Apache-2.0
"""The settings of a demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore import Device
from kvcore.apps.demo.chats import Chat, ChatSettings, longest_chat, make_chats
from kvcore.apps.demo.engine import EngineSettings

# Size of the pool, relative to the need of `max_running` turns without shared pages. It is so small
# that the demo evicts cached pages and sometimes preempts a turn.
_POOL_SHARE = 0.4


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The settings of a demo.

    Attributes
    ----------
    chats, turns, seed : int
        Number of chats, messages in each chat, and seed of the chats and the model.
    dtype, page_size : str, int
        Dtype of the pages; tokens of a page.
    pages : int, optional
        Pages of the pool; by default fewer pages than the running turns need without shared pages.
    threads : int
        Threads of the cache's kernels in host memory.
    device : str
        Device of the pages and of attention: "cpu", "cuda" or "cuda:<index>". The model itself runs
        in numpy.
    """

    chats: int = ChatSettings.chats
    turns: int = ChatSettings.turns
    seed: int = 0
    dtype: str = EngineSettings.dtype
    page_size: int = EngineSettings.page_size
    pages: int | None = None
    threads: int = EngineSettings.threads
    device: str = str(EngineSettings.device)

    def make_chats(self) -> list[Chat]:
        """Generate the chats."""
        return make_chats(ChatSettings(chats=self.chats, turns=self.turns), seed=self.seed)

    def engine(self, chats: Sequence[Chat]) -> EngineSettings:
        """Return the settings of the engine for these chats."""
        tokens = int(_POOL_SHARE * EngineSettings.max_running * longest_chat(chats))
        return EngineSettings(
            pages=self.pages or -(-tokens // self.page_size),
            page_size=self.page_size,
            dtype=self.dtype,
            threads=self.threads,
            device=Device.parse(self.device),
        )
