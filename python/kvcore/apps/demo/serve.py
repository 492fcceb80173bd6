# SPDX-License-Identifier: Apache-2.0
"""Serve chats with a model, a paged KV cache and the batches of ``kvcore.scheduler``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from kvcore import CapacityError, PagedKVCacheManager, TextGenerationContext, ops, update_batch
from kvcore.apps.demo.attention import PagedAttention
from kvcore.apps.demo.chats import Chat, longest_chat
from kvcore.apps.demo.conversation import Conversation, Turn, arrivals_of, prompt_of, turns_of
from kvcore.apps.demo.engine import EngineSettings
from kvcore.apps.demo.protocol import Floats, LanguageModel
from kvcore.apps.demo.served import Served, Tally
from kvcore.apps.replay.timing import CallTimer, TimedManager
from kvcore.scheduler import Batch, Request, Scheduler
from kvcore.support.dtypes import itemsize, numpy_dtype


class ChatServer:
    """Serve chats once with greedy sampling.

    Parameters
    ----------
    model : LanguageModel
    chats : sequence of Chat
    settings : EngineSettings

    Raises
    ------
    CapacityError
        The longest chat does not fit the pool.

    Notes
    -----
    The order of events depends only on steps, not on time, so runs with the same settings are the
    same.
    """

    def __init__(
        self, model: LanguageModel, chats: Sequence[Chat], settings: EngineSettings
    ) -> None:
        longest = longest_chat(chats)
        if longest > settings.pages * settings.page_size:
            raise CapacityError(
                f"{settings.pages} pages of {settings.page_size} tokens hold no chat of {longest} "
                f"tokens; expected at least {-(-longest // settings.page_size)} pages"
            )
        self.settings = settings
        self.num_turns = sum(len(chat.messages) for chat in chats)
        self.manager = PagedKVCacheManager(
            settings.params(model),
            settings.max_running,
            longest,
            devices=[settings.device],
            num_pages=settings.pages,
        )
        self._model = model
        self._chats = chats
        self._conversations = [Conversation(chat.system) for chat in chats]
        self._dtype = numpy_dtype(settings.dtype if itemsize(settings.dtype) > 1 else "float32")
        self._turns = turns_of(chats)
        self._arrivals = arrivals_of(chats)
        self._tally = Tally()
        self._timer = CallTimer()
        timed: Any = TimedManager(self.manager, self._timer)
        self._scheduler = Scheduler(
            timed,
            max_running=settings.max_running,
            max_batch_tokens=settings.step_tokens,
            update=self._timer.timed(update_batch),
        )
        self._open = self._timer.timed(TextGenerationContext)
        self._arrived = 0
        self._started = 0.0

    # -- values for a display ----------------------------------------------------------------

    @property
    def num_answered(self) -> int:
        """Number of finished turns."""
        return self._arrived - len(self._scheduler)

    @property
    def num_running(self) -> int:
        """Number of running turns."""
        return self._scheduler.num_running

    @property
    def hit_rate(self) -> float:
        """Share of the admitted prompt tokens that were cached, 0..1."""
        return self._tally.cached_tokens / max(1, self._tally.prompt_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Admitted prompt tokens and generated tokens, per second of the run until now."""
        tokens = self._tally.prompt_tokens + self._tally.generated_tokens
        return tokens / max(1e-9, perf_counter() - self._started)

    # -- the loop ----------------------------------------------------------------------------

    def run(self, on_step: Callable[[ChatServer], None] | None = None) -> Served:
        """Serve every turn of every chat.

        Parameters
        ----------
        on_step : callable, optional
            Called with this object after each step.

        Raises
        ------
        AssertionError
            The manager broke a conservation law.
        """
        self._started = perf_counter()
        while self._arrivals or self._scheduler:
            self._step()
            if on_step is not None:
                on_step(self)
        seconds = perf_counter() - self._started
        self.manager.check_integrity()
        self._tally.preemptions = self._scheduler.num_preemptions
        self._tally.recomputed_tokens = self._scheduler.recomputed_tokens
        return Served(
            conversations=self._conversations,
            seconds=seconds,
            manager_seconds=self._timer.spent_ns / 1e9,
            leaked_pages=self.settings.pages - self.manager.num_free_blocks,
            metrics=self.manager.metrics,
            **vars(self._tally),
        )

    def _step(self) -> None:
        self._receive()
        if batch := self._scheduler.next_batch():
            self._count_admitted(batch)
            self._execute(batch)
        self._tally.steps += 1

    def _receive(self) -> None:
        """Queue each message that arrives at this step."""
        while self._arrivals.next_time <= self._tally.steps:
            _, index = self._arrivals.pop()
            number, place = self._turns[index]
            chat = self._chats[number]
            prompt = prompt_of(chat, self._conversations[number], place)
            context = self._open((number, place), prompt)
            turn = Turn(index=index, chat=number, arrived=perf_counter())
            self._scheduler.add(Request(context, chat.answer_lengths[place], owner=turn))
            self._arrived += 1

    def _count_admitted(self, batch: Batch) -> None:
        tally, running = self._tally, self._scheduler.num_running
        tally.peak_running = max(tally.peak_running, running)
        for request in batch.admitted:
            if not request.owner.was_admitted:
                request.owner.was_admitted = True
                tally.prompt_tokens += request.num_prompt
                tally.cached_tokens += request.cached_tokens

    def _execute(self, batch: Batch) -> None:
        logits = self._logits(batch)
        tokens = logits.argmax(axis=1).astype(np.int32)  # of equal logits, the lowest id
        chosen = logits[np.arange(len(tokens)), tokens].tolist()
        ended = self._scheduler.update(batch, tokens)
        for request, logit in zip(batch.requests, chosen, strict=True):
            self._count_token(request.owner, logit)
        for request in ended:
            self._finish(request)

    def _logits(self, batch: Batch) -> Floats:
        """Run the model on the active tokens of a batch; return the logits of the next tokens."""
        (inputs,) = batch.inputs
        packed = ops.pack(inputs, batch.contexts)
        settings = self.settings
        attend = PagedAttention.of(
            inputs, packed.row_offsets, self._dtype, settings.threads, settings.device
        )
        wanted = packed.last_rows[batch.rows]
        return self._model.forward(packed.tokens, packed.positions, attend, wanted)

    def _count_token(self, turn: Turn, logit: float) -> None:
        if not turn.logits:
            self._tally.first_token_seconds.append(perf_counter() - turn.arrived)
        turn.logits.append(logit)
        self._tally.generated_tokens += 1

    def _finish(self, request: Request) -> None:
        turn, context = request.owner, request.context
        said = self._conversations[turn.chat]
        said.tokens = context.tokens.copy()
        said.places += range(request.num_prompt, context.end_idx)
        said.logits += turn.logits
        self._arrivals.answered(turn.index, self._tally.steps)
