# SPDX-License-Identifier: Apache-2.0
"""Set up a demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore import Device
from kvcore.apps.demo.chats import Chat, ChatSettings, longest_chat, make_chats
from kvcore.apps.demo.engine import EngineSettings

# Of what the turns that may run at a time need if they share nothing: some of what is cached has to
# go, and now and then a turn.
_POOL_SHARE = 0.4


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Set up a demo.

    Attributes
    ----------
    chats, turns, seed : int
        What to serve; the model has the same seed.
    dtype, page_size : str, int
        Of the pages; tokens of each.
    pages : int, optional
        By default fewer than the turns that run at a time need if they share nothing.
    threads : int
        Of the cache's kernels in host memory.
    device : str
        Where the pages are and attention runs: "cpu", "cuda" or "cuda:<index>". The model itself is
        numpy.
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
        """Make up the chats."""
        return make_chats(ChatSettings(chats=self.chats, turns=self.turns), seed=self.seed)

    def engine(self, chats: Sequence[Chat]) -> EngineSettings:
        """Return the settings of the engine that serves some chats."""
        tokens = int(_POOL_SHARE * EngineSettings.max_running * longest_chat(chats))
        return EngineSettings(
            pages=self.pages or -(-tokens // self.page_size),
            page_size=self.page_size,
            dtype=self.dtype,
            threads=self.threads,
            device=Device.parse(self.device),
        )
