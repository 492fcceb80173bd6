# SPDX-License-Identifier: Apache-2.0
"""Serves the scenes of a run with vLLM's LLM class; prints their answers as a line of JSON.

    python vllm_engine_scenes.py SETTINGS

SETTINGS is JSON: the folder of a model, the arguments of the engine, the names of scenes. The
scenes run one after the other on one engine, so each scene finds the cache of the scenes before it.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

VOCABULARY = 512
Answers = dict[str, list[int]]


def text(chance: random.Random, length: int) -> list[int]:
    """Return random tokens; no token ends an answer."""
    return [chance.randrange(8, VOCABULARY) for _ in range(length)]


def shared_prompts(seed: int, count: int) -> list[tuple[list[int], int]]:
    """Return prompts that share six prefixes, and the number of tokens of each answer."""
    chance = random.Random(seed)
    heads = [text(chance, chance.randrange(60, 420)) for _ in range(6)]
    made = []
    for index in range(count):
        head = heads[index % 6] if index % 8 else []
        tokens = head + text(chance, chance.randrange(5, 120))
        made.append((tokens, chance.randrange(1, 60)))
    return made


class Scenes:
    """The scenes of an engine; `cached` sums the cached tokens of all prompts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(settings["model"], **settings["engine"])
        self.count = settings["prompts"]
        self.cached = 0
        self.problems: list[str] = []

    def params(self, tokens: int, **more: Any) -> Any:
        """Return sampling parameters for `tokens` tokens, always the most likely token."""
        from vllm import SamplingParams

        greedy = {"temperature": 0.0} if more.get("n", 1) == 1 else {"top_k": 1}
        return SamplingParams(max_tokens=tokens, ignore_eos=True, **greedy, **more)

    def generate(self, prompts: list[Any], params: list[Any]) -> list[Any]:
        """Serve prompts together."""
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        self.cached += sum(each.num_cached_tokens or 0 for each in outputs)
        return list(outputs)

    def shared(self) -> Answers:
        """Many prompts with few prefixes, in chunks, with too few blocks for all at once."""
        wanted = shared_prompts(1, self.count)
        outputs = self.generate(
            [{"prompt_token_ids": tokens} for tokens, _ in wanted],
            [self.params(count) for _, count in wanted],
        )
        self.told = [
            (tokens, list(each.outputs[0].token_ids))
            for (tokens, _), each in zip(wanted, outputs, strict=True)
        ]
        return {str(i): answer for i, (_, answer) in enumerate(self.told)}

    def turns(self) -> Answers:
        """Second turns: the prompt, its answer, and a few more tokens."""
        chance = random.Random(2)
        prompts = [[*tokens, *answer, *text(chance, 20)] for tokens, answer in self.told[::3]]
        outputs = self.generate(
            [{"prompt_token_ids": tokens} for tokens in prompts], [self.params(12)] * len(prompts)
        )
        return {str(i): list(each.outputs[0].token_ids) for i, each in enumerate(outputs)}

    def several(self) -> Answers:
        """Three answers to each prompt."""
        wanted = shared_prompts(3, 8)
        outputs = self.generate(
            [{"prompt_token_ids": tokens} for tokens, _ in wanted],
            [self.params(24, n=3) for _ in wanted],
        )
        return {
            f"{i}.{k}": list(one.token_ids)
            for i, each in enumerate(outputs)
            for k, one in enumerate(each.outputs)
        }

    def salts(self) -> Answers:
        """One prompt under two salts: the second salt finds nothing, each salt finds its prompt."""
        tokens, _ = shared_prompts(4, 2)[1]
        found = {}
        for turn, salt in enumerate(("one", "two", "one", "two")):
            prompt = {"prompt_token_ids": tokens, "cache_salt": f"salt {salt}"}
            (each,) = self.generate([prompt], [self.params(8)])
            found[f"{turn}"] = list(each.outputs[0].token_ids)
            has_hit = bool(each.num_cached_tokens)
            if has_hit != (turn > 1) and self.has_cache:
                self.problems.append(f"salt {salt}, turn {turn}: {each.num_cached_tokens} cached")
        return found

    def logprobs(self) -> Answers:
        """Prompts with the logprobs of their own tokens, which read no cache."""
        wanted = shared_prompts(1, 6)
        outputs = self.generate(
            [{"prompt_token_ids": tokens} for tokens, _ in wanted],
            [self.params(6, prompt_logprobs=1) for _ in wanted],
        )
        found = {}
        for i, each in enumerate(outputs):
            found[f"{i}"] = list(each.outputs[0].token_ids)
            found[f"{i} best"] = [
                min(place, key=lambda token: (place[token].rank, token))
                for place in each.prompt_logprobs[1:]
            ]
        return found

    def aborts(self) -> Answers:
        """Requests whose clients disconnect while they wait or run."""
        engine = self.llm.llm_engine
        told: Answers = {}
        for i, (tokens, count) in enumerate(shared_prompts(5, 24)):
            engine.add_request(f"a{i}", {"prompt_token_ids": tokens}, self.params(count + 8))
        engine.abort_request(["a3"])
        gone = {f"a{i}" for i in range(0, 24, 5)}
        while engine.has_unfinished_requests():
            for each in engine.step():
                name = each.request_id.split("-")[0]
                told[name] = list(each.outputs[0].token_ids)
                if name in gone and len(told[name]) > 2:
                    gone.remove(name)
                    engine.abort_request([each.request_id])
        return {name: tokens[:3] if int(name[1:]) % 5 == 0 else tokens
                for name, tokens in told.items()}  # fmt: skip

    def reset(self) -> Answers:
        """After a reset no token is cached."""
        if not self.llm.reset_prefix_cache():
            self.problems.append("reset_prefix_cache() is False without requests")
        before = self.told[1]
        (each,) = self.generate([{"prompt_token_ids": before[0]}], [self.params(len(before[1]))])
        if each.num_cached_tokens:
            self.problems.append(f"{each.num_cached_tokens} tokens are cached after a reset")
        return {"again": list(each.outputs[0].token_ids)}

    @property
    def has_cache(self) -> bool:
        """Return true if the engine caches prefixes."""
        return bool(self.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching)


def main() -> None:
    """Serve the scenes."""
    settings = json.loads(sys.argv[1])
    scenes = Scenes(settings)
    answers: dict[str, Answers] = {}
    for name in settings["scenes"]:
        scene: Callable[[], Answers] = getattr(scenes, name)
        answers[name] = scene()
    result = {"answers": answers, "cached": scenes.cached, "problems": scenes.problems}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
