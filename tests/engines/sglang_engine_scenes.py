# SPDX-License-Identifier: Apache-2.0
"""Serves scenes with SGLang's engine; prints their answers as a line of JSON.

    python sglang_engine_scenes.py SETTINGS

SETTINGS is JSON: the arguments of the engine, and the number of prompts in the large scenes. The
scenes run one after the other on one engine, so each scene finds the cache of the scenes before it.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

from vllm_engine_scenes import Answers, shared_prompts, text

#: The number of tokens of an aborted answer that are compared.
BEFORE_ABORT = 3


def greedy(tokens: int, **more: Any) -> dict[str, Any]:
    """Return sampling parameters for `tokens` tokens, always the most likely token."""
    return {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0} | more


class Scenes:
    """The scenes of an engine; `cached` sums the cached tokens of all prompts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self.engine = Engine(**settings["engine"])
        self.manager = self.engine.tokenizer_manager
        self.page = settings["engine"]["page_size"]
        self.count = settings["prompts"]
        self.cached: dict[str, int] = {}
        self.problems: list[str] = []

    async def send(self, message: Any) -> None:
        """Send a message to the scheduler."""
        await self.manager._async_dispatch_to_scheduler(message)

    async def generate(
        self, prompts: list[list[int]], params: list[dict[str, Any]], **more: Any
    ) -> list[Any]:
        """Serve prompts that the scheduler receives together, so each run has the same batches."""
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            GenerateReqInput,
            PauseGenerationReqInput,
        )

        request = GenerateReqInput(input_ids=prompts, sampling_params=params, **more)
        await self.send(PauseGenerationReqInput(mode="in_place"))
        answer = asyncio.ensure_future(anext(self.manager.generate_request(request, None)))
        while len(self.manager.rid_to_state) < len(prompts) and not answer.done():
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        await self.send(ContinueGenerationReqInput())
        return list(await answer)

    async def answers(
        self, scene: str, prompts: list[list[int]], params: list[dict[str, Any]], **more: Any
    ) -> list[list[int]]:
        """Return the answers to prompts, and count the cached tokens of a scene."""
        outputs = await self.generate(prompts, params, **more)
        cached = sum(each["meta_info"]["cached_tokens"] for each in outputs)
        self.cached[scene] = self.cached.get(scene, 0) + cached
        for each in outputs:
            reason = each["meta_info"]["finish_reason"]["type"]
            if reason not in ("length", "stop"):
                self.problems.append(f"{scene}: an answer ends by {reason!r}")
        return [each["output_ids"] for each in outputs]

    async def shared(self) -> Answers:
        """Many prompts with few prefixes, in chunks, with too few slots for all at once."""
        wanted = shared_prompts(1, self.count)
        prompts = [tokens for tokens, _ in wanted]
        told = await self.answers("shared", prompts, [greedy(count) for _, count in wanted])
        self.told = list(zip(prompts, told, strict=True))
        return {f"{i}": answer for i, answer in enumerate(told)}

    async def turns(self) -> Answers:
        """Second turns: the prompt, its answer, and a few more tokens."""
        chance = random.Random(2)
        prompts = [[*tokens, *answer, *text(chance, 20)] for tokens, answer in self.told[::3]]
        told = await self.answers("turns", prompts, [greedy(12)] * len(prompts))
        return {f"{i}": answer for i, answer in enumerate(told)}

    async def long(self) -> Answers:
        """Short prompts whose answers outgrow the slots, so some requests are retracted.

        SGLang keeps slots for the whole answer of a request that ignores the end of a text.
        """
        chance = random.Random(8)
        head = text(chance, 40)
        prompts = [head + text(chance, chance.randrange(5, 40)) for _ in range(16)]
        params = greedy(160, ignore_eos=False)
        told = await self.answers("long", prompts, [params] * len(prompts))
        return {f"{i}": answer for i, answer in enumerate(told)}

    async def several(self) -> Answers:
        """Three answers to each prompt."""
        wanted = shared_prompts(3, 8)
        params = [greedy(24, n=3) for _ in wanted]
        told = await self.answers("several", [tokens for tokens, _ in wanted], params)
        if len(told) != 3 * len(wanted):
            self.problems.append(f"several: {len(told)} answers to {len(wanted)} prompts of n = 3")
        return {f"{i // 3}.{i % 3}": answer for i, answer in enumerate(told)}

    async def stream(self, name: str, tokens: list[int], count: int, goes: bool) -> list[int]:
        """Return a streamed answer; for a client that disconnects, return its first tokens."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=tokens, sampling_params=greedy(count), rid=name, stream=True
        )
        told: list[int] = []
        async for part in self.manager.generate_request(request, None):
            told = part["output_ids"]
            if goes and len(told) >= BEFORE_ABORT:
                self.manager.abort_request(name)
        return told[:BEFORE_ABORT] if goes else told

    async def aborts(self) -> Answers:
        """Requests whose clients disconnect while they run and while the cache is flushed."""
        wanted = shared_prompts(5, 24)
        waiting = [
            asyncio.ensure_future(self.stream(f"a{i}", tokens, count + 8, i % 5 == 0))
            for i, (tokens, count) in enumerate(wanted)
        ]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if (await self.manager.flush_cache()).success:
            self.problems.append("the cache is flushed beside requests")
        told = await asyncio.gather(*waiting)
        return {f"a{i}": answer for i, answer in enumerate(told)}

    async def flush(self) -> Answers:
        """After a flush no token is cached; later prompts are cached as before."""
        while not (await self.manager.flush_cache()).success:  # aborted requests end a moment later
            await asyncio.sleep(0.1)
        tokens, answer = self.told[1]
        found = {}
        for turn in range(2):
            before = self.cached.get("flush", 0)
            (told,) = await self.answers("flush", [tokens], [greedy(len(answer))])
            found[f"{turn}"] = told
            cached = self.cached["flush"] - before
            if cached != turn * ((len(tokens) - 1) // self.page * self.page):
                self.problems.append(f"turn {turn} after a flush: {cached} tokens are cached")
            if told != answer:
                self.problems.append(f"turn {turn} after a flush has another answer")
        return found

    async def salts(self) -> Answers:
        """One prompt under two salts: the second salt finds nothing, each salt finds its prompt."""
        tokens, _ = shared_prompts(4, 2)[1]
        found = {}
        for turn, salt in enumerate(("one", "two", "one", "two")):
            before = self.cached.get("salts", 0)
            (told,) = await self.answers("salts", [tokens], [greedy(8)], cache_salt=[salt])
            found[f"{turn}"] = told
            cached = self.cached["salts"] - before
            if cached != (turn > 1) * ((len(tokens) - 1) // self.page * self.page):
                self.problems.append(f"salt {salt}, turn {turn}: {cached} tokens are cached")
        return found

    async def again(self) -> Answers:
        """The prompts of the first scene in another order, after the flush."""
        order = random.Random(7).sample(range(self.count), self.count)
        prompts = [self.told[i][0] for i in order]
        told = await self.answers("again", prompts, [greedy(len(self.told[i][1])) for i in order])
        for i, answer in zip(order, told, strict=True):
            if answer != self.told[i][1]:
                self.problems.append(f"prompt {i} has another answer after the flush")
        return {f"{i}": answer for i, answer in zip(order, told, strict=True)}

    async def run(self) -> dict[str, Answers]:
        """Serve all scenes."""
        full = (self.shared, self.turns, self.long, self.several, self.aborts)
        scenes = (*full, self.flush, self.salts, self.again)  # nothing is evicted after a flush
        return {scene.__name__: await scene() for scene in scenes}


def main() -> None:
    """Serve the scenes."""
    scenes = Scenes(json.loads(sys.argv[1]))
    answers = scenes.engine.loop.run_until_complete(scenes.run())
    result = {"answers": answers, "cached": scenes.cached, "problems": scenes.problems}
    print("RESULT " + json.dumps(result), flush=True)
    scenes.engine.shutdown()


if __name__ == "__main__":
    main()
