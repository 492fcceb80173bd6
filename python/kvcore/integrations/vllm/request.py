# SPDX-License-Identifier: Apache-2.0
"""A vLLM request as a kvcore context."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True, eq=False)
class RequestContext:
    """The present tokens of a request, in a growing buffer, and the state of its pages."""

    request: Any
    publish_at: int  # number of computed tokens that fills the next page
    leaves_at: int  # number of computed tokens at which windows leave a page
    # Not vLLM's id: pages may outlive the request.
    request_id: int = field(default_factory=itertools.count().__next__)
    extra_key: str | None = field(init=False)
    cache_salt: str | None = field(init=False)
    keys: list[tuple[int, int, bytes]] | None = field(init=False)
    tokens: Any = field(default_factory=lambda: np.zeros(1, np.int32))
    num_tokens: int = 0  # tokens copied from the request
    start_idx: int = 0  # published tokens
    active_idx: int = 1
    end_idx: int = 1
    hit: int = 0  # tokens adopted from the cache
    num_pages: int = 0
    room: int = 0  # tokens that fit into its pages
    left: int = 0  # computed tokens at which windows last left pages
    idle_until: int = field(init=False)

    def __post_init__(self) -> None:
        lora = self.request.lora_request
        self.extra_key = lora.lora_name if lora else None
        self.cache_salt = self.request.cache_salt or None
        self.keys = own_keys(self.request)
        self.idle_until = min(self.publish_at, self.leaves_at)

    @property
    def extra_keys(self) -> list[tuple[int, int, bytes]] | None:
        """The keys that start before ``end_idx``."""
        return None if self.keys is None else [key for key in self.keys if key[0] < self.end_idx]

    def stand(self, start: int, end: int) -> None:
        """Set `start` tokens as published, and the tokens up to `end` as the next to run."""
        self._make_room(end)
        self.start_idx = start
        self.active_idx = self.end_idx = end

    def expect(self, end: int) -> None:
        """Expect a prompt of `end` tokens; tokens after the current step count."""
        if end > self.end_idx:
            self._make_room(end)
            self.end_idx = end

    def _make_room(self, end: int) -> None:
        if end > len(self.tokens):
            grown = np.zeros(max(end, 2 * len(self.tokens)), np.int32)
            grown[: self.num_tokens] = self.tokens[: self.num_tokens]
            self.tokens = grown

    def read(self, num_tokens: int) -> None:
        """Copy the request's first `num_tokens` tokens; skip the tokens copied before."""
        prompt: Any = getattr(self.request.block_hashes, "prompt", ())
        if self.num_tokens == 0 and len(prompt) >= len(self.tokens):
            self.tokens = prompt
            self.num_tokens = len(prompt)
            self.stand(self.start_idx, max(self.num_tokens, self.end_idx))
        if num_tokens > self.num_tokens:
            new = self.request.all_token_ids[self.num_tokens : num_tokens]
            self.stand(self.start_idx, max(num_tokens, self.end_idx))
            self.tokens[self.num_tokens : num_tokens] = new
            self.num_tokens = num_tokens


def own_keys(request: Any) -> list[tuple[int, int, bytes]] | None:
    """Return keys for a request's inputs other than token ids: images and prompt embeddings."""
    keys = [
        (item.mm_position.offset, item.mm_position.length, str(item.identifier).encode())
        for item in request.mm_features
    ]
    if request.prompt_embeds is not None:
        data = request.prompt_embeds.float().contiguous().cpu().numpy().tobytes()
        keys.append((0, request.num_prompt_tokens, hashlib.sha256(data).digest()))
    return keys or None
