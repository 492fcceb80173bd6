# SPDX-License-Identifier: Apache-2.0
"""Generate text with a model of transformers over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kvcore import PagedKVCacheManager
from kvcore.integrations.transformers.batch import PackedBatch
from kvcore.integrations.transformers.checks import (
    Limits,
    cache_params,
    check_manager,
    check_model,
)
from kvcore.integrations.transformers.memory import check_capacity, make_manager, written_tokens
from kvcore.integrations.transformers.progress import Report, progress_reports
from kvcore.integrations.transformers.requests import GenerationResult, Request, read_prompts
from kvcore.integrations.transformers.sampling import Sampler
from kvcore.integrations.transformers.scheduler import Scheduler
from kvcore.integrations.transformers.session import paged_attention
from kvcore.params import require_count

__all__ = ["generate"]

Stream = Callable[[int, int], object]


def generate(
    model: Any,
    prompts: Iterable[Sequence[int]],
    *,
    manager: PagedKVCacheManager | None = None,
    max_new_tokens: int = 20,
    eos_token_id: int | Sequence[int] | Literal["auto"] | None = "auto",
    num_return_sequences: int = 1,
    do_sample: bool = False,
    temperature: float = 1.0,
    seed: int | None = None,
    max_batch_tokens: int = 2048,
    stream: Stream | None = None,
    progress: bool | Report | None = None,
) -> list[GenerationResult]:
    """Generate from prompts, all together, over the pages of a manager.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers, on the CPU.
    prompts : iterable of list of int
        Token ids.
    manager : PagedKVCacheManager, optional
        Keep one for a model to reuse the prefixes of earlier calls; ``cache_params(model)`` gives
        its params.
        By default one for this call, with what half the free memory holds at most.
    max_new_tokens : int
        Per sequence.
    eos_token_id : int, list of int, "auto" or None
        What ends a sequence: "auto" is the model's generation config, None is nothing.
    num_return_sequences : int
        Sequences per prompt; they share the prompt's pages.
    do_sample : bool
        Draw from the distribution; the likeliest token otherwise.
    temperature : float
        Divides the logits before drawing.
    seed : int, optional
        Makes drawing reproducible, whatever runs beside it; out of torch's generator by default.
    max_batch_tokens : int
        Tokens of one forward; longer prompts run in chunks.
    stream : callable(prompt_index, token_id), optional
        Called with every token as it comes. What it raises ends the call.
    progress : bool or callable(sequences, tokens), optional
        True shows a bar on the terminal; a callable is told after each forward how many sequences
        have ended and how many tokens there are.

    Returns
    -------
    list of GenerationResult
        One per prompt and sequence, in order.

    Raises
    ------
    TypeError, ValueError
        A model that cannot run on pages, with the reason; prompts, numbers or a manager that do not
        fit. Nothing has been run.
    CapacityError
        A sequence that the pool or the manager's ``max_seq_len`` can never hold.
    InsufficientBlocksError
        Other requests of the manager hold so many pages that nothing fits.

    Notes
    -----
    However it ends, the manager holds no request of this call and the model's attention setting is
    what it was. One thread at a time is inside for a model.
    """
    limits = check_model(model)
    require_count(
        max_new_tokens=max_new_tokens,
        num_return_sequences=num_return_sequences,
        max_batch_tokens=max_batch_tokens,
    )
    vocabulary = model.get_input_embeddings().num_embeddings
    requests = read_prompts(prompts, vocabulary, max_new_tokens, num_return_sequences)
    sampler = Sampler(do_sample=do_sample, temperature=temperature, seed=seed)
    eos = _eos_of(model, eos_token_id)
    if not requests:
        return []
    budget = _within(limits, requests, max_batch_tokens)
    manager = _manager_for(model, manager, requests)
    check_capacity(manager, requests)
    for request in requests:
        sampler.prepare(request)
    run = _Run(model, manager, requests, sampler, eos, budget, stream)
    with progress_reports(progress, len(run.requests)) as report:
        run.to_the_end(report)
    return [request.result() for request in run.requests]


def _eos_of(model: Any, given: Any) -> frozenset[int]:
    if isinstance(given, str):
        if given != "auto":
            raise ValueError(f"eos_token_id is {given!r}, must be 'auto', None or token ids")
        given = model.generation_config.eos_token_id
    if given is None:
        return frozenset()
    return frozenset(np.atleast_1d(np.asarray(given)).tolist())


def _within(limits: Limits, requests: Sequence[Request], max_batch_tokens: int) -> int:
    """Answer the tokens of a forward, once every sequence is within the model's limits."""
    longest = max(map(written_tokens, requests))
    if limits.length is not None and longest > limits.length:
        raise ValueError(
            f"a sequence comes to {longest} tokens with max_new_tokens, this model goes up to "
            f"{limits.length} through kvcore: {limits.reason}; ask for fewer"
        )
    return min(max_batch_tokens, limits.batch_tokens or max_batch_tokens)


def _manager_for(
    model: Any, manager: PagedKVCacheManager | None, requests: Sequence[Request]
) -> PagedKVCacheManager:
    params = cache_params(model)
    if manager is None:
        return make_manager(params, requests)
    check_manager(manager, params)
    return manager


class _Run:
    """Run the requests of a call, step by step."""

    def __init__(
        self,
        model: Any,
        manager: PagedKVCacheManager,
        requests: Sequence[Request],
        sampler: Sampler,
        eos: frozenset[int],
        max_batch_tokens: int,
        stream: Stream | None,
    ) -> None:
        self.requests = [each for r in requests for each in (r, *r.siblings)]
        self._model = model
        self._manager = manager
        self._scheduler = Scheduler(manager, requests, max_batch_tokens)
        self._sampler = sampler
        self._eos = eos
        self._stream = stream
        self._ended = 0
        self._generated = 0

    def to_the_end(self, report: Report | None) -> None:
        """Step until every sequence has ended; release all of them in any case."""
        try:
            with paged_attention(self._model), torch.inference_mode():
                while self._scheduler:
                    self._step()
                    if report is not None:
                        report(self._ended, self._generated)
        finally:
            self._scheduler.close()

    def _step(self) -> None:
        batch = self._scheduler.next_batch()
        contexts = [request.context for request in batch]
        packed = PackedBatch(self._manager.fetch(contexts)[0], contexts)
        # The logits behind an unfinished prompt tell nothing; only the last of a batch can be one.
        whole = len(batch) - (contexts[-1].active_idx < contexts[-1].end_idx)
        wanted = packed.last_rows[: max(whole, 1)]
        logits = self._model(**packed.model_inputs(wanted)).logits[0]
        if len(logits) != len(wanted):  # a model without logits_to_keep answers all
            logits = logits[torch.from_numpy(wanted)]
        following = np.zeros(len(batch), np.int32)
        families = [[request, *request.siblings] for request in batch[:whole]]
        following[:whole] = self._sample(logits[:whole], families)
        self._scheduler.advance(batch, following, whole)
        self._book(families)

    def _sample(self, logits: torch.Tensor, families: list[list[Request]]) -> NDArray[np.int32]:
        """Choose for each request and its siblings; answer the tokens of the requests."""
        members = [member for family in families for member in family]
        firsts = np.cumsum([0, *map(len, families)])[:-1]
        if len(members) > len(families):
            logits = logits.repeat_interleave(torch.tensor([len(f) for f in families]), dim=0)
        tokens = self._sampler.choose(logits, members)
        for member, token in zip(members, tokens.tolist(), strict=True):
            member.take(token, self._eos)
        return tokens.take(firsts)

    def _book(self, families: list[list[Request]]) -> None:
        """Let siblings go on by themselves, release what has ended, tell the caller."""
        for family in families:
            for sibling in family[1:]:
                self._scheduler.fork(family[0], sibling)
            family[0].siblings = []
        for member in (member for family in families for member in family):
            self._generated += 1
            if member.reason is not None:
                self._ended += 1
                self._scheduler.retire(member)
            if self._stream is not None:
                self._stream(member.rank[0], member.last)
