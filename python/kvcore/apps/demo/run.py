# SPDX-License-Identifier: Apache-2.0
"""Run the demo: the same chats with and without the prefix cache, and the check."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

from kvcore.apps.demo.blas import one_blas_thread
from kvcore.apps.demo.chats import ChatSettings, longest_chat, make_chats
from kvcore.apps.demo.check import check
from kvcore.apps.demo.engine import EngineSettings
from kvcore.apps.demo.model import Transformer
from kvcore.apps.demo.protocol import LanguageModel
from kvcore.apps.demo.report import DemoReport
from kvcore.apps.demo.serve import ChatServer
from kvcore.apps.demo.settings import DemoSettings


class Watcher:
    """Callbacks for the progress of a demo; this base class does nothing."""

    def serving(self, server: ChatServer) -> None:
        """Receive a server after each of its steps."""

    def checking(self, done: int) -> None:
        """Receive the number of checked chats."""


def run_demo(settings: DemoSettings, watcher: Watcher | None = None) -> DemoReport:
    """Serve the chats twice and check the generated tokens.

    Parameters
    ----------
    settings : DemoSettings
    watcher : Watcher, optional

    Raises
    ------
    CapacityError
        The longest chat does not fit the pool.
    ValueError
        The cache does not support the dtype, or `device` is not the name of a device.
    KVCacheError
        The device does not exist, or Triton is missing for attention on a GPU.
    AssertionError
        The manager broke a conservation law.

    Examples
    --------
    >>> from kvcore.apps.demo import DemoSettings, run_demo
    >>> report = run_demo(DemoSettings(chats=2, turns=1))
    >>> report.is_right, report.without_cache.cached_tokens
    (True, 0)
    """
    started = perf_counter()
    watcher = watcher or Watcher()
    model, chats = Transformer(seed=settings.seed), settings.make_chats()
    engine = settings.engine(chats)
    with one_blas_thread():
        _warm_up(model, engine)
        with_cache, without = (
            ChatServer(model, chats, replace(engine, prefix_caching=cached)).run(watcher.serving)
            for cached in (True, False)
        )
        checked = check(model, with_cache.conversations, watcher.checking)
    return DemoReport.of(
        replace(settings, pages=engine.pages),
        engine.params(model),
        with_cache,
        without,
        checked,
        perf_counter() - started,
    )


def _warm_up(model: LanguageModel, engine: EngineSettings) -> None:
    """Run a small chat, so that one-time costs such as the start of BLAS count for no run."""
    chats = make_chats(ChatSettings(chats=1, turns=1, answer_tokens=(2, 2)))
    pages = -(-longest_chat(chats) // engine.page_size)
    ChatServer(model, chats, replace(engine, pages=pages)).run()
