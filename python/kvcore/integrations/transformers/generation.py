# SPDX-License-Identifier: Apache-2.0
"""Generate text with a model of transformers over a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from kvcore import Device, PagedKVCacheManager
from kvcore.integrations.transformers.batch import PackedBatch
from kvcore.integrations.transformers.checks import (
    Limits,
    cache_params,
    check_manager,
    check_model,
)
from kvcore.integrations.transformers.memory import check_capacity, make_manager, written_tokens
from kvcore.integrations.transformers.progress import Report, progress_reports
from kvcore.integrations.transformers.requests import GenerationResult, read_prompts, result_of
from kvcore.integrations.transformers.sampling import Sampler
from kvcore.integrations.transformers.session import paged_attention
from kvcore.layers.kinds import MAX_CHUNK_TOKENS
from kvcore.params import require_count
from kvcore.scheduler import Batch, Request, Scheduler, is_soon_cached

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
    max_batch_tokens: int = MAX_CHUNK_TOKENS,
    stream: Stream | None = None,
    progress: bool | Report | None = None,
) -> list[GenerationResult]:
    """Generate from all prompts together, over the pages of a manager.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers, on the CPU or on one GPU.
    prompts : iterable of list of int
        Token ids.
    manager : PagedKVCacheManager, optional
        Pass the same manager in each call for a model to reuse the prefixes of earlier calls;
        ``cache_params(model)`` returns its params. By default, the call makes a manager on the
        model's device, in at most half the free memory.
    max_new_tokens : int
        Per sequence.
    eos_token_id : int, list of int, "auto" or None
        The tokens that end a sequence: "auto" takes them from the model's generation config; None
        means that no token ends a sequence.
    num_return_sequences : int
        Sequences per prompt; they share the prompt's pages.
    do_sample : bool
        Draw from the distribution; otherwise take the likeliest token.
    temperature : float
        Divides the logits before drawing.
    seed : int, optional
        Makes drawing reproducible, whatever else runs; by default, drawn from torch's generator.
    max_batch_tokens : int
        Largest number of tokens in a forward pass; longer prompts run in chunks.
    stream : callable(prompt_index, token_id), optional
        Called with each new token. An exception that it raises ends the call.
    progress : bool or callable(sequences, tokens), optional
        True shows a bar on the terminal; a callable is called after each forward pass with the
        number of finished sequences and the number of generated tokens.

    Returns
    -------
    list of GenerationResult
        One per prompt and sequence, in order.

    Raises
    ------
    TypeError, ValueError
        A model that cannot run on pages, with the reason; or prompts, numbers or a manager that do
        not fit. No forward pass has run.
    CapacityError
        A sequence that the pool or the manager's ``max_seq_len`` can never hold.
    KVCacheError
        The model is on a GPU, and kvcore's kernels, cupy or Triton are missing, with the reason.
    InsufficientBlocksError
        The manager's other requests hold pages, and the free pages suffice for no sequence.

    Notes
    -----
    After the call, even if it raises, the manager holds no request of this call and the model has
    its former attention setting. Calls for one model run one after the other: a second thread
    waits.

    On a GPU all work runs on torch's current stream. The host waits once for each forward pass, for
    the next tokens.
    """
    limits = check_model(model)
    require_count(
        max_new_tokens=max_new_tokens,
        num_return_sequences=num_return_sequences,
        max_batch_tokens=max_batch_tokens,
    )
    vocabulary = model.get_input_embeddings().num_embeddings
    eos = _eos_of(model, eos_token_id)
    requests = read_prompts(prompts, vocabulary, max_new_tokens, num_return_sequences, eos)
    sampler = Sampler(do_sample=do_sample, temperature=temperature, seed=seed)
    if not requests:
        return []
    _check_lengths(limits, requests)
    manager = _manager_for(model, manager, requests, max_batch_tokens, limits.device)
    check_capacity(manager, requests, max_batch_tokens)
    for request in requests:
        sampler.prepare(request)
    run = _Run(model, manager, requests, sampler, max_batch_tokens, stream)
    with progress_reports(progress, len(run.requests)) as report:
        run.to_the_end(report)
    return [result_of(request) for request in run.requests]


def _eos_of(model: Any, given: Any) -> frozenset[int]:
    if isinstance(given, str):
        if given != "auto":
            raise ValueError(f"eos_token_id is {given!r}, must be 'auto', None or token ids")
        given = model.generation_config.eos_token_id
    if given is None:
        return frozenset()
    return frozenset(np.atleast_1d(np.asarray(given)).tolist())


def _check_lengths(limits: Limits, requests: Sequence[Request]) -> None:
    longest = max(map(written_tokens, requests))
    if limits.length is not None and longest > limits.length:
        raise ValueError(
            f"a sequence has up to {longest} tokens with max_new_tokens, this model goes up to "
            f"{limits.length} through kvcore: {limits.reason}; reduce max_new_tokens"
        )


def _manager_for(
    model: Any,
    manager: PagedKVCacheManager | None,
    requests: Sequence[Request],
    max_batch_tokens: int,
    device: Device,
) -> PagedKVCacheManager:
    params = cache_params(model)
    if manager is None:
        return make_manager(params, requests, max_batch_tokens, device)
    check_manager(manager, params, device)
    return manager


class _Run:
    """The run of a call's requests, step by step."""

    def __init__(
        self,
        model: Any,
        manager: PagedKVCacheManager,
        requests: Sequence[Request],
        sampler: Sampler,
        max_batch_tokens: int,
        stream: Stream | None,
    ) -> None:
        self.requests = [each for r in requests for each in (r, *r.siblings)]
        self._model = model
        self._manager = manager
        self._scheduler = Scheduler(
            manager,
            max_batch_tokens=max_batch_tokens,
            hold=lambda request: is_soon_cached(manager, request, self._scheduler.prefills),
        )
        for request in requests:
            self._scheduler.add(request)
        self._sampler = sampler
        self._stream = stream
        self._may_admit = True
        self._ended = 0
        self._generated = 0

    def to_the_end(self, report: Report | None) -> None:
        """Step until every sequence has ended; always release all sequences."""
        try:
            with paged_attention(self._model), torch.inference_mode():
                while batch := self._next_batch():
                    self._step(batch)
                    if report is not None:
                        report(self._ended, self._generated)
        finally:
            self._scheduler.close()
            for request in self.requests:  # an interrupt may have left a claim
                if self._manager.contains(request.context.request_id):
                    self._manager.release(request.context.request_id)

    def _next_batch(self) -> Batch | None:
        # After a preemption, admit no request until one ends: it would be the next to be preempted.
        batch = self._scheduler.next_batch(admit=self._may_admit or not self._scheduler.num_running)
        if batch is not None and batch.preempted:
            self._may_admit = False
        return batch

    def _step(self, batch: Batch) -> None:
        packed = PackedBatch(batch.inputs[0], batch.contexts, manager=self._manager)
        # A prompt with a further chunk has no next token yet; siblings share one row of logits.
        rows, places = np.unique(batch.rows, return_inverse=True)
        wanted = packed.last_rows[rows] if len(rows) else packed.last_rows[:1]
        logits = self._model(**packed.model_inputs(wanted)).logits[0]
        if len(logits) != len(wanted):  # without logits_to_keep, a model returns all logits
            logits = logits[torch.from_numpy(wanted).to(logits.device)]
        if len(rows) < len(places):
            logits = logits[torch.from_numpy(places).to(logits.device)]
        tokens = self._sampler.choose(logits[: len(places)], batch.requests)
        ended = self._scheduler.update(batch, tokens)
        self._may_admit = self._may_admit or bool(ended)
        self._ended += len(ended)
        self._generated += len(tokens)
        if self._stream is not None:
            for request in batch.requests:
                self._stream(request.owner.prompt_index, request.last_token)
