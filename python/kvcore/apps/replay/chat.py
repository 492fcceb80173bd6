# SPDX-License-Identifier: Apache-2.0
"""Generate multi-turn chat traffic from a seed.

Conversations begin as a Poisson process. Each conversation has a shared system prompt, a geometric
number of turns, and log-normal lengths of messages and answers. There are only a few system
prompts, and their popularity follows Zipf's law. The prompt of a turn is the whole conversation
plus the new message, so prompts grow. The next turn follows the answer after an exponential pause.
All token ids come from one vocabulary. The same seed gives the same tokens, so a later turn repeats
the tokens of the earlier turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.apps.replay.workload import Workload

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Shape the generated traffic.

    Attributes
    ----------
    conversations : int
        Number of conversations.
    conversations_per_second : float
        Rate of the Poisson process.
    system_prompts : int
        Number of distinct system prompts; the k-th has a weight of 1 / k.
    system_tokens : tuple of int
        Tokens of the shortest and the longest system prompt.
    mean_turns, max_turns : float, int
        Mean and maximum of the geometric number of turns.
    median_message, median_output : float
        Median tokens of a user message and of an answer; the sigma of both is 1.
    max_message, max_output : int
        Maximum tokens of a user message and of an answer.
    mean_pause : float
        Mean seconds between an answer and the user's next message.
    answer_rate : float
        Tokens per second of an answer; used only for the nominal order of arrivals.
    vocabulary : int
        Token ids are 0 to ``vocabulary - 1``.
    """

    conversations: int = 10_000
    conversations_per_second: float = 1.8
    system_prompts: int = 16
    system_tokens: tuple[int, int] = (200, 3_000)
    mean_turns: float = 5.0
    max_turns: int = 24
    median_message: float = 150.0
    median_output: float = 200.0
    max_message: int = 8_000
    max_output: int = 2_000
    mean_pause: float = 30.0
    answer_rate: float = 30.0
    vocabulary: int = 128_000


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ChatWorkload(Workload):
    """Read prompts from one text: a system prompt, and after it the conversation until now.

    Attributes
    ----------
    output_tokens : numpy.ndarray
        int32 ``[m]``, the text of all conversations.
    systems : list of numpy.ndarray
        int32, one array per system prompt.
    request_systems : list of int
        Index of the system prompt of each request.
    text_starts : list of int
        Index in `output_tokens` at which the conversation of each request starts.
    """

    output_tokens: NDArray[np.int32]
    systems: list[NDArray[np.int32]]
    request_systems: list[int]
    text_starts: list[int]
    _scratch: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        longest = int(self.prompt_lengths.max())
        object.__setattr__(self, "_scratch", np.empty(longest, np.int32))

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Return the prompt of one request (valid until the next call)."""
        tokens = self._scratch[: self.prompt_lengths[index]]
        system = self.systems[self.request_systems[index]]
        start = self.text_starts[index]
        tokens[: len(system)] = system
        tokens[len(system) :] = self.output_tokens[start : start + len(tokens) - len(system)]
        return tokens

    def output_tokens_at(self, places: NDArray[np.int64]) -> NDArray[np.int32]:
        """Read output tokens from the text."""
        return self.output_tokens.take(places, mode="clip")


def chat_workload(
    *, seed: int = 0, limit: int | None = None, settings: ChatSettings | None = None
) -> ChatWorkload:
    """Generate the built-in workload.

    Parameters
    ----------
    seed : int
        Seed of the generator; the same seed gives the same requests and tokens.
    limit : int, optional
        Maximum number of requests; keeps the first requests in nominal order of arrival.
    settings : ChatSettings, optional
        Shape of the traffic.

    Returns
    -------
    ChatWorkload
        Requests ordered by nominal arrival.
    """
    settings = settings or ChatSettings()
    rng = np.random.default_rng(seed)
    turns = _Turns(rng, settings)
    size = int(turns.text_ends.max()) + max(1 << 20, 2 * settings.conversations)
    text = rng.integers(0, settings.vocabulary, size, np.int32)
    shortest, longest = settings.system_tokens
    lengths = rng.integers(shortest, longest + 1, settings.system_prompts)
    systems = [rng.integers(0, settings.vocabulary, n, np.int32) for n in lengths.tolist()]
    # Each conversation has its own start in the text, so no two conversations are equal.
    places = rng.permutation(size - int(turns.text_ends.max()))[: settings.conversations]
    return _assemble(turns, text, systems, places, seed, limit)


class _Turns:
    """Draw every turn of every conversation; turns of one conversation are adjacent."""

    def __init__(self, rng: np.random.Generator, settings: ChatSettings) -> None:
        count = settings.conversations
        turns = np.minimum(rng.geometric(1 / settings.mean_turns, count), settings.max_turns)
        begins = np.cumsum(rng.exponential(1 / settings.conversations_per_second, count))
        weights = 1 / np.arange(1, settings.system_prompts + 1)
        systems = rng.choice(settings.system_prompts, count, p=weights / weights.sum())
        total = int(turns.sum())
        self.conversations: _Ints = np.repeat(np.arange(count), turns)
        self.systems: _Ints = systems[self.conversations]
        self.firsts: _Ints = (np.cumsum(turns) - turns)[self.conversations]
        self.is_last = np.append(self.conversations[1:] != self.conversations[:-1], True)
        messages = _lengths(rng, settings.median_message, settings.max_message, total)
        self.outputs = _lengths(rng, settings.median_output, settings.max_output, total)
        self.pauses: _Floats = rng.exponential(settings.mean_pause, total)
        self.pauses[self.firsts] = 0
        self.text_ends: _Ints = _running_sums(messages + self.outputs, self.firsts)
        answers = self.outputs / settings.answer_rate
        spent = _running_sums(self.pauses + answers, self.firsts) - answers
        self.arrivals: _Floats = begins[self.conversations] + spent


def _lengths(rng: np.random.Generator, median: float, longest: int, count: int) -> _Ints:
    drawn = rng.lognormal(np.log(median), 1.0, count)
    return np.clip(drawn.astype(np.int64), 1, longest)


def _running_sums(values: NDArray[Any], firsts: _Ints) -> NDArray[Any]:
    """Return running sums that begin again at the first turn of each conversation."""
    sums = np.cumsum(values)
    before = np.concatenate((np.zeros(1, sums.dtype), sums))[firsts]
    return np.asarray(sums - before)


def _assemble(
    turns: _Turns,
    text: NDArray[np.int32],
    systems: list[NDArray[np.int32]],
    places: _Ints,
    seed: int,
    limit: int | None,
) -> ChatWorkload:
    order = np.argsort(turns.arrivals, kind="stable")[:limit]
    rank = np.full(len(turns.arrivals) + 1, -1)  # the last entry: no next turn
    rank[order] = np.arange(len(order))
    following = np.where(turns.is_last, -1, np.arange(1, len(turns.arrivals) + 1))
    starts = places[turns.conversations]
    said = turns.text_ends - turns.outputs
    system_lengths = np.array([len(system) for system in systems])
    return ChatWorkload(
        name=f"built-in chat, seed {seed}",
        arrivals=turns.arrivals[order],
        prompt_lengths=(system_lengths[turns.systems] + said)[order],
        output_lengths=turns.outputs[order],
        output_tokens=text,
        output_starts=(starts + said)[order],
        next_turns=rank[following[order]],
        think_times=turns.pauses[order],
        systems=systems,
        request_systems=turns.systems[order].tolist(),
        text_starts=starts[order].tolist(),
    )
