# SPDX-License-Identifier: Apache-2.0
"""Run the demo: the same chats with and without the prefix cache, then the check."""

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
    """See a demo run; this one looks away."""

    def serving(self, server: ChatServer) -> None:
        """See a server after one of its steps."""

    def checking(self, done: int) -> None:
        """See that so many chats are checked."""


def run_demo(settings: DemoSettings, watcher: Watcher | None = None) -> DemoReport:
    """Serve the chats twice and check what was generated.

    Parameters
    ----------
    settings : DemoSettings
    watcher : Watcher, optional

    Raises
    ------
    CapacityError
        The longest chat does not fit the pool.
    ValueError
        A dtype that no cache is stored in, or no device.
    KVCacheError
        A device that is not there, or attention on GPUs that lacks Triton.
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
    """Let no run pay for what only the first one costs, such as starting BLAS."""
    chats = make_chats(ChatSettings(chats=1, turns=1, answer_tokens=(2, 2)))
    pages = -(-longest_chat(chats) // engine.page_size)
    ChatServer(model, chats, replace(engine, pages=pages)).run()
