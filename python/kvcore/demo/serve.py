# SPDX-License-Identifier: Apache-2.0
"""Serve chats with a model, batching continuously over a paged KV cache.

A step runs one token of every turn that is being answered and, in what is left of its token budget,
chunks of prompts, oldest turn first. When the next tokens do not fit the pool, the youngest turn
goes back to the queue and its pages go; it comes back with what is still cached.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvcore import CapacityError, PagedKVCacheManager, TextGenerationContext, update_batch
from kvcore.demo.attention import PagedAttention
from kvcore.demo.chats import Chat, longest_chat
from kvcore.demo.conversation import Conversation, Turn, prompt_of
from kvcore.demo.engine import EngineSettings
from kvcore.demo.protocol import Floats, LanguageModel
from kvcore.demo.served import Served, Tally
from kvcore.demo.stopwatch import Stopwatch
from kvcore.dtypes import itemsize, numpy_dtype


class ChatServer:
    """Serve chats once, greedily.

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
    A turn that arrived is in `_waiting` (a heap by order of arrival) or in `_running`, whose rows
    keep their places: a hole is filled with the last one. The order of all that happens depends on
    steps, never on time, so runs with the same settings do the same.
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
            settings.params(model), settings.max_running, longest, num_pages=settings.pages
        )
        self._model = model
        self._chats = chats
        self._conversations = [Conversation(chat.system) for chat in chats]
        self._dtype = numpy_dtype(settings.dtype if itemsize(settings.dtype) > 1 else "float32")
        # What users do next: at a step, in a chat, a turn.
        self._coming = [(chat.opens, number, 0) for number, chat in enumerate(chats)]
        heapq.heapify(self._coming)
        self._waiting: list[tuple[int, Turn]] = []
        self._running: list[Turn] = []
        self._tally = Tally()
        self._clock = Stopwatch()
        self._arrived = 0
        self._started = 0.0

    # -- what a display shows ----------------------------------------------------------------

    @property
    def num_answered(self) -> int:
        """Turns that are done."""
        return self._arrived - len(self._waiting) - len(self._running)

    @property
    def num_running(self) -> int:
        """Turns that run now."""
        return len(self._running)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens admitted so far that were cached, 0..1."""
        return self._tally.cached_tokens / max(1, self._tally.prompt_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens admitted and tokens generated so far, per second."""
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
        while self._coming or self._waiting or self._running:
            self._step()
            if on_step is not None:
                on_step(self)
        seconds = perf_counter() - self._started
        self.manager.check_integrity()
        return Served(
            conversations=self._conversations,
            seconds=seconds,
            manager_seconds=self._clock.seconds,
            leaked_pages=self.settings.pages - self.manager.num_free_blocks,
            metrics=self.manager.metrics,
            **vars(self._tally),
        )

    def _step(self) -> None:
        self._receive()
        if self._make_room():
            self._admit()
        batch = self._cut()
        if batch:
            self._execute(batch)
        self._tally.steps += 1

    def _receive(self) -> None:
        """Open a context for each message that comes with this step."""
        while self._coming and self._coming[0][0] <= self._tally.steps:
            _, number, turn = heapq.heappop(self._coming)
            chat = self._chats[number]
            prompt = prompt_of(chat, self._conversations[number], turn)
            with self._clock:
                context = TextGenerationContext((number, turn), prompt)
            arrived = Turn(
                chat=number,
                number=turn,
                rank=self._arrived,
                context=context,
                prompt_tokens=len(prompt),
                length=len(prompt) + chat.answer_lengths[turn],
                arrived=perf_counter(),
            )
            heapq.heappush(self._waiting, (arrived.rank, arrived))
            self._arrived += 1

    # -- memory ------------------------------------------------------------------------------

    def _make_room(self) -> bool:
        """Reserve the next tokens of all that runs; answer whether nothing had to go for that."""
        before = self._tally.preemptions
        while True:
            contexts = [turn.context for turn in self._running]
            with self._clock:
                fitting = self.manager.maybe_reserve_batch(contexts)
            if fitting == len(contexts):
                return self._tally.preemptions == before
            self._preempt_youngest()

    def _preempt_youngest(self) -> None:
        turn = max(self._running, key=lambda each: each.rank)
        turn.written = turn.context.start_idx
        self._drop(turn)
        heapq.heappush(self._waiting, (turn.rank, turn))
        self._tally.preemptions += 1

    def _drop(self, turn: Turn) -> None:
        with self._clock:
            self.manager.release(turn.context.request_id)
        row = self._running.index(turn)
        self._running[row] = self._running[-1]
        self._running.pop()

    def _admit(self) -> None:
        """Admit in order of arrival while there is room in the step, the batch and the pool."""
        running = self._running
        budget = self.settings.step_tokens - sum(turn.left_to_write for turn in running)
        while self._waiting and budget > 0 and len(running) < self.settings.max_running:
            turn = self._waiting[0][1]
            if not self._claim(turn):
                return
            heapq.heappop(self._waiting)
            running.append(turn)
            self._count_hit(turn)
            budget -= turn.left_to_write
        self._tally.peak_running = max(self._tally.peak_running, len(running))

    def _claim(self, turn: Turn) -> bool:
        request_id = turn.context.request_id
        with self._clock:
            self.manager.claim(request_id)
            fits = self.manager.reserve(turn.context)
            if not fits:
                self.manager.release(request_id)
        return fits

    def _count_hit(self, turn: Turn) -> None:
        hit = turn.context.start_idx
        if turn.written >= 0:
            self._tally.recomputed_tokens += max(0, turn.written - hit)
            return
        turn.written = 0
        self._tally.prompt_tokens += turn.prompt_tokens
        self._tally.cached_tokens += hit

    # -- one step ----------------------------------------------------------------------------

    def _cut(self) -> list[Turn]:
        """Share the step's tokens: one for each answer, then prompts, oldest first."""
        budget = self.settings.step_tokens
        counts = {}
        for turn in sorted(self._running, key=lambda each: (each.left_to_write > 1, each.rank)):
            counts[turn.rank] = min(budget, turn.left_to_write)
            budget -= counts[turn.rank]
        batch = [turn for turn in self._running if counts[turn.rank]]
        for turn in batch:
            turn.context.active_idx = turn.context.start_idx + counts[turn.rank]
        return batch

    def _execute(self, batch: list[Turn]) -> None:
        contexts = [turn.context for turn in batch]
        is_last = [context.active_idx == context.end_idx for context in contexts]
        logits = self._logits(contexts)
        tokens = logits.argmax(axis=1).astype(np.int32)  # of equal ones the lowest id
        with self._clock:
            update_batch(contexts, tokens)
            self.manager.step(contexts)
        for row in np.flatnonzero(is_last).tolist():
            self._count_token(batch[row], float(logits[row, tokens[row]]))

    def _logits(self, contexts: list[TextGenerationContext]) -> Floats:
        """Run the model on the active tokens of a batch; answer the logits behind each row."""
        with self._clock:
            (inputs,) = self.manager.fetch(contexts)
        spans = [(context.start_idx, context.active_idx) for context in contexts]
        tokens = [c.tokens[slice(*span)] for c, span in zip(contexts, spans, strict=True)]
        ends = np.cumsum([len(each) for each in tokens])
        offsets: NDArray[np.uint32] = np.append(0, ends).astype(np.uint32)
        attend = PagedAttention(inputs, offsets, self._dtype, self.settings.threads)
        positions = np.concatenate([np.arange(*span) for span in spans])
        return self._model.forward(np.concatenate(tokens), positions, attend, ends - 1)

    def _count_token(self, turn: Turn, logit: float) -> None:
        if not turn.logits:
            self._tally.first_token_seconds.append(perf_counter() - turn.arrived)
        turn.logits.append(logit)
        self._tally.generated_tokens += 1
        if turn.context.end_idx == turn.length:
            self._finish(turn)

    def _finish(self, turn: Turn) -> None:
        self._drop(turn)
        said = self._conversations[turn.chat]
        said.tokens = turn.context.tokens.copy()
        said.places += range(turn.prompt_tokens, turn.length)
        said.logits += turn.logits
        chat, following = self._chats[turn.chat], turn.number + 1
        if following < len(chat.messages):
            step = self._tally.steps + chat.pauses[turn.number]
            heapq.heappush(self._coming, (step, turn.chat, following))
