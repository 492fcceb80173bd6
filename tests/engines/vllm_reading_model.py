# SPDX-License-Identifier: Apache-2.0
"""A model without weights for vLLM's EngineCore: it computes its answers from its pages.

Each kind of layers keeps a number per token in its blocks, which depends on the token and on all
numbers that the layers read. A block that holds another request's tokens, or an overwritten block,
changes every later answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

PAGE = 4
VOCABULARY = 1000
WINDOW, CHUNK = 10, 12
SHAPE: dict[str, Any] = {
    "block_size": PAGE,
    "num_kv_heads": 1,
    "head_size": 8,
    "dtype": torch.float16,
}
#: Models, by their kinds of layers.
MODELS = {
    "full": {"full": FullAttentionSpec(**SHAPE)},
    "window": {"window": SlidingWindowSpec(**SHAPE, sliding_window=WINDOW)},
    "mixed": {
        "full": FullAttentionSpec(**SHAPE),
        "window": SlidingWindowSpec(**SHAPE, sliding_window=WINDOW),
        "chunks": ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=CHUNK),
    },
}


def first_read(layer: str, at: int) -> int:
    """Return the first position that a layer reads at a position."""
    return {"full": 0, "window": max(0, at - WINDOW + 1), "chunks": at // CHUNK * CHUNK}[layer]


def number(layer: str, token: int, first: int, read: np.ndarray) -> int:
    """Return a layer's number for a token, from the numbers that it reads from `first` on."""
    weights = np.arange(first, first + len(read), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    at, total = first + len(read), int((read * weights).sum(dtype=np.uint64))
    return zlib.crc32(f"{layer} {at} {token} {total}".encode())


def answers(layers: Sequence[str], prompt: list[int], count: int) -> list[int]:
    """Return the model's answers to a prompt, computed without a cache."""
    tokens = list(prompt)
    kept = {layer: np.zeros(len(prompt) + count, np.uint64) for layer in layers}
    for at in range(len(prompt) + count - 1):
        for layer, numbers in kept.items():
            first = first_read(layer, at)
            numbers[at] = number(layer, tokens[at], first, numbers[first:at])
        if at + 1 == len(tokens):
            tokens.append(sum(int(numbers[at]) for numbers in kept.values()) % VOCABULARY)
    return tokens[len(prompt) :]


class Held:
    """The state of a request in a model runner."""

    def __init__(self, tokens: list[int], blocks: Sequence[Sequence[int]]) -> None:
        self.num_prompt_tokens = len(tokens)
        self.tokens = list(tokens)
        self.blocks = [list(group) for group in blocks]


class ReadingModel(Executor):  # type: ignore[misc]
    """An executor and its model runner, by the protocol of vLLM's ``gpu_model_runner``."""

    layers: str = "full"  # a name in `MODELS`; set it before an engine makes the executor

    def _init_executor(self) -> None:
        self.requests: dict[str, Held] = {}
        self.drafts: dict[str, list[int]] = {}
        self.num_read = 0  # tokens found in the cache
        self._done: Future[Any] | None = None

    def collective_rpc(self, method: Any, *_: Any, non_block: bool = False, **__: Any) -> Any:
        """Answer the calls of an engine's start and end; they need no work."""
        answer = {
            "get_kv_cache_spec": MODELS[self.layers],
            "get_supported_kv_cache_layouts": ["LBNHC"],
            "determine_available_memory": 1 << 30,
            "get_supported_tasks": ("generate",),
        }.get(method)
        return [answer]

    def check_health(self) -> None:
        """Pass, because nothing can break."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Return true, because results are futures."""
        return True

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Allocate the memory and fill it with garbage, as on a GPU."""
        (config,) = kv_cache_configs
        self.groups = [layer for (layer,) in (g.layer_names for g in config.kv_cache_groups)]
        random = np.random.default_rng(0)
        shape = config.num_blocks * PAGE
        self.memory = [random.integers(1 << 32, size=shape, dtype=np.uint64) for _ in self.groups]

    def compile_or_warm_up_model(self) -> None:
        """Do nothing, because nothing must be compiled."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run a step; the answer is computed now and returned on request."""
        future: Future[Any] = Future()
        future.set_result(self._run(scheduler_output))
        self._done = future
        return future if non_block else future.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the answer of `execute_model`."""
        assert self._done is not None
        return self._done if non_block else self._done.result()

    def take_draft_token_ids(self) -> DraftTokenIds:
        """Propose draft tokens; some are wrong."""
        return DraftTokenIds(list(self.drafts), list(self.drafts.values()))

    def _run(self, output: Any) -> ModelRunnerOutput:
        self._note(output)
        sampled = {
            name: self._compute(name, count, output.scheduled_spec_decode_tokens.get(name, []))
            for name, count in output.num_scheduled_tokens.items()
        }
        self.drafts = {name: self._draft(name) for name, tokens in sampled.items() if tokens}
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={name: index for index, name in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _note(self, output: Any) -> None:
        """Update the requests from the scheduler's output."""
        for name in output.finished_req_ids:
            self.requests.pop(name, None)
        self.starts = {}
        for new in output.scheduled_new_reqs:
            held = Held(new.prompt_token_ids, new.block_ids)
            held.tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            self.requests[new.req_id] = held
            self.starts[new.req_id] = new.num_computed_tokens
            self.num_read += new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            held, blocks = self.requests[name], cached.new_block_ids[index]
            self.starts[name] = cached.num_computed_tokens[index]
            if name in cached.resumed_req_ids:
                held.tokens = list(cached.all_token_ids.get(name, held.tokens))
                held.blocks = [list(group) for group in blocks]
                self.num_read += self.starts[name]
            else:
                for mine, more in zip(held.blocks, blocks or (), strict=False):
                    mine.extend(more)
            del held.tokens[held.num_prompt_tokens + cached.num_output_tokens[index] :]

    def _compute(self, name: str, count: int, drafts: list[int]) -> list[int]:
        """Run the scheduled tokens of a request; return its answers."""
        held, start = self.requests[name], self.starts[name]
        inputs = held.tokens[start : start + count - len(drafts)] + drafts
        assert len(inputs) == count, (name, start, count, len(held.tokens))
        found = [self._position(held, start + i, token) for i, token in enumerate(inputs)]
        if start + count - len(drafts) < len(held.tokens):
            return []  # not the last chunk of a prompt
        sampled = [found[-1 - len(drafts)]]
        for index, draft in enumerate(drafts):
            if draft != sampled[-1]:
                break
            sampled.append(found[index - len(drafts)])
        held.tokens += sampled
        return sampled

    def _position(self, held: Held, at: int, token: int) -> int:
        """Run a token through all layers: read their blocks, and write into them."""
        total = 0
        for group, layer in enumerate(self.groups):
            first, memory = first_read(layer, at), self.memory[group]
            table = np.array(held.blocks[group])
            where = np.arange(first, at + 1)
            slots = table[where // PAGE] * PAGE + where % PAGE
            assert (slots >= PAGE).all(), "the model reads the null block"
            memory[slots[-1]] = number(layer, token, first, memory[slots[:-1]])
            total += int(memory[slots[-1]])
        return total % VOCABULARY

    def _draft(self, name: str) -> list[int]:
        """Propose right tokens before a wrong token, whose place depends on the length."""
        tokens = self.requests[name].tokens
        wrong = len(tokens) % 4
        right = answers(self.groups, tokens, 3)
        return [(t + 1) % VOCABULARY if i == wrong else t for i, t in enumerate(right)]
