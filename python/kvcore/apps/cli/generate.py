# SPDX-License-Identifier: Apache-2.0
"""``kvcore generate``: generate text with a local model and paged K and V."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcore import Device
from kvcore.apps.cli import options
from kvcore.apps.cli.devices import DeviceName, machine_errors, usable_device
from kvcore.apps.cli.held_pages import WatchedManager
from kvcore.apps.cli.live_text import LiveText
from kvcore.apps.cli.local_model import Conversation, LocalModel
from kvcore.layers.kinds import MAX_CHUNK_TOKENS
from kvcore.layers.layer_map import has_windows
from kvcore.sizing import (
    STATES_PER_REQUEST,
    batch_with_slots,
    longest_sequence,
    pages_per_sequence,
)
from kvcore.support.byte_sizes import format_size, parse_size

if TYPE_CHECKING:
    from kvcore.params import KVCacheParams

# Tokens of a forward pass if layers have windows: a window also needs pages for these tokens.
_MOST_WINDOWED = 512

ModelDir = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL_DIR", help="Folder with config.json, *.safetensors and a tokenizer."
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT...",
        help="Prompts that run together; equal beginnings share pages.",
        show_default=False,
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Run a conversation: each PROMPT, and after them each line of the input, is a turn, "
        "which hits the pages of earlier turns.",
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        metavar="N", callback=options.count, help="Maximum of new tokens per prompt or turn."
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="T",
        callback=options.within(0, math.inf),
        help="Sample tokens at this temperature; 0 takes the most likely token.",
        show_default="0",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N", callback=options.within(0, math.inf), help="Makes the samples repeatable."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Dtype of the model and its pages.", show_default="the model's"
    ),
]
Memory = Annotated[
    str,
    typer.Option(metavar="SIZE", help="Maximum memory for pages and states, such as 4GiB."),
]
Flat = Annotated[
    bool,
    typer.Option("--flat", help="Keep every token in every layer, also in layers with windows."),
]


def generate(
    *,
    model_dir: ModelDir,
    prompts: Prompts = None,
    chat: Chat = False,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = None,
    seed: Seed = None,
    dtype: Dtype = None,
    page_size: options.PageSize = 16,
    memory: Memory = "1GiB",
    flat: Flat = False,
    device: DeviceName = "cpu",
    as_json: options.AsJson = False,
) -> None:
    """Generate text with a local model, and print each token when it is generated.

    Needs torch and transformers: pip install 'kvcore[transformers]'. A GPU also needs torch with
    CUDA, and pip install 'kvcore[cuda13,attention]'.

    Example: kvcore generate ./Qwen3-0.6B "The capital of France is" --max-new-tokens 20

    Example: kvcore generate ./Qwen3-0.6B --chat --temperature 0.7
    """
    if not prompts and not chat:
        raise typer.BadParameter("expected a prompt, or --chat", param_hint="'PROMPT'")
    size = options.checked("--memory", parse_size, memory)
    drawing = {"do_sample": bool(temperature), "temperature": temperature or 1.0, "seed": seed}
    with machine_errors():
        where = usable_device(device)
        local = options.checked("MODEL_DIR", LocalModel.load, model_dir, dtype, where)
        pages = Pages(size, page_size, has_groups=not flat, device=where)
        writer = Writer(local, pages, max_new_tokens, drawing, is_live=not as_json)
        started = time.perf_counter()
        answers = _talk(writer, prompts or []) if chat else writer.complete(prompts or [])
    summary = writer.summary(answers, time.perf_counter() - started)
    if as_json:
        typer.echo(json.dumps({"model": str(model_dir)} | summary | {"results": answers}))
    else:
        typer.echo(f"\n{_told(summary)}")


Answer = dict[str, Any]


@dataclass(frozen=True)
class Pages:
    """Size the pool of a manager.

    Attributes
    ----------
    memory : int
        Maximum bytes of the pool and the states.
    page_size : int
        Tokens per page.
    has_groups : bool
        True if layers with windows keep only their windows.
    device : Device
        Device of the pool.
    """

    memory: int
    page_size: int
    has_groups: bool
    device: Device

    def manager(self, model: Any, lengths: Sequence[int], context: int) -> WatchedManager:
        """Make a manager with enough pages for sequences of these lengths, within `memory`."""
        params = self._params(model)
        most = self.max_batch_tokens(params)
        wanted = [pages_per_sequence(params, length, most) for length in lengths]
        batch = batch_with_slots(params, self.memory, max(wanted), len(lengths))
        slots = STATES_PER_REQUEST * batch if params.state_groups else 0
        beside = slots * params.bytes_per_state_slot
        affordable = options.fitting_pages(self.memory, 1, params.bytes_per_page, beside)
        pages = min(sum(wanted), affordable)
        return WatchedManager(
            params,
            max_batch_size=batch,
            max_seq_len=min(longest_sequence(params, pages, most), context),
            devices=[self.device],
            num_pages=pages,
            num_states=slots or None,
        )

    def _params(self, model: Any) -> KVCacheParams:
        from kvcore.integrations.transformers import cache_params

        params = options.checked("MODEL_DIR", cache_params, model, self.page_size)
        if self.has_groups:
            return params
        if params.state_groups:
            raise typer.BadParameter(
                f"layers of {type(model).__name__} keep a state, which is the same with and "
                f"without groups; remove the option",
                param_hint="'--flat'",
            )
        flat = partial(cache_params, groups=False)
        return options.checked("MODEL_DIR", flat, model, self.page_size)

    @staticmethod
    def max_batch_tokens(params: KVCacheParams) -> int:
        """Return the maximum number of tokens in a forward pass."""
        return _MOST_WINDOWED if has_windows(params) else MAX_CHUNK_TOKENS


@dataclass
class Writer:
    """Generate text with one model and the pages of one manager.

    Attributes
    ----------
    local : LocalModel
    pages : Pages
    max_new_tokens : int
    drawing : dict
        The options do_sample, temperature and seed.
    is_live : bool
        Write each text to the terminal while it is generated.
    manager : WatchedManager, or None
        None before the first prompt.
    """

    local: LocalModel
    pages: Pages
    max_new_tokens: int
    drawing: dict[str, Any]
    is_live: bool
    manager: WatchedManager | None = None

    def complete(self, texts: Sequence[str]) -> list[Answer]:
        """Return the continuation of each text; all texts run together."""
        prompts = [self.local.token_ids(text) for text in texts]
        longest = [len(prompt) + self.max_new_tokens for prompt in prompts]
        self.manager = self.pages.manager(self.local.model, longest, self.local.context)
        titles = [f"> {text}" for text in texts] if len(texts) > 1 else [""]
        return self.run(texts, prompts, titles)

    def converse(self, lines: Iterator[str]) -> Iterator[Answer]:
        """Yield the answer to each line, one turn after another."""
        context = self.local.context
        self.manager = self.pages.manager(self.local.model, [context], context)
        conversation = Conversation(self.local)
        for line in lines:
            prompt = options.checked("PROMPT", conversation.prompt, line)
            (answer,) = self.run([line], [prompt], [""])
            conversation.answered(prompt, answer["token_ids"])
            yield answer

    def run(
        self, texts: Sequence[str], prompts: list[list[int]], titles: Sequence[str]
    ) -> list[Answer]:
        """Generate from tokens; write the texts with their titles meanwhile if `is_live`."""
        live = LiveText(titles, self.local.text, self._has_ended, _write) if self.is_live else None
        results = options.checked("PROMPT", self._generate, prompts, live)
        return [
            {
                "prompt": texts[result.prompt_index],
                "text": self.local.text(result.token_ids),
                "token_ids": result.token_ids,
                "prompt_tokens": len(prompts[result.prompt_index]),
                "cached_tokens": result.cached_tokens,
                "finish_reason": result.finish_reason,
            }
            for result in results
        ]

    def _generate(self, prompts: list[list[int]], live: LiveText | None) -> list[Any]:
        from kvcore.integrations.transformers import generate as generate_tokens

        assert self.manager is not None
        return generate_tokens(
            self.local.model,
            prompts,
            manager=self.manager,
            max_new_tokens=self.max_new_tokens,
            max_batch_tokens=self.pages.max_batch_tokens(self.manager.params),
            stream=None if live is None else live.add,
            **self.drawing,
        )

    def _has_ended(self, count: int, token: int) -> bool:
        return count == self.max_new_tokens or token in self.local.eos

    def summary(self, answers: list[Answer], seconds: float) -> dict[str, Any]:
        """Return the counts, the speed and the memory of all answers."""
        assert self.manager is not None
        params, generated = self.manager.params, sum(len(a["token_ids"]) for a in answers)
        prompt_tokens = sum(a["prompt_tokens"] for a in answers)
        cached = sum(a["cached_tokens"] for a in answers)
        peak = self.manager.metrics.peak_used_pages
        states = self.manager.most_slots * params.bytes_per_state_slot
        peak_bytes = peak * params.bytes_per_page + states
        return {
            "dtype": params.dtype,
            "device": str(self.pages.device),
            "page_size": params.page_size,
            "pages": self.manager.total_num_pages,
            "peak_used_pages": peak,
            "peak_bytes": peak_bytes,
            "flat_bytes": self.manager.flat_bytes or peak_bytes,
            "groups": self.manager.groups_held(),
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached,
            "hit_rate": cached / prompt_tokens if prompt_tokens else 0.0,
            "generated_tokens": generated,
            "seconds": seconds,
            "tokens_per_second": generated / seconds,
        }


def _talk(writer: Writer, first: Sequence[str]) -> list[Answer]:
    return list(writer.converse(_lines(first, is_asked=writer.is_live and sys.stdin.isatty())))


def _lines(first: Sequence[str], *, is_asked: bool) -> Iterator[str]:
    """Yield the `first` turns, and after them the lines of stdin that are not blank."""
    yield from first
    while True:
        if is_asked:
            _write("> ")
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _told(summary: dict[str, Any]) -> str:
    text = (
        f"{summary['generated_tokens']} tokens at {summary['tokens_per_second']:.1f} per second; "
        f"{summary['cached_tokens']} of {summary['prompt_tokens']} prompt tokens from the cache "
        f"(hit rate {summary['hit_rate']:.1%}); K/V memory {format_size(summary['peak_bytes'])} "
        f"in {summary['peak_used_pages']} pages of {summary['page_size']}"
    )
    if not summary["groups"]:
        return text
    held = ", ".join(map(_told_group, summary["groups"]))
    return f"{text}: {held}; {format_size(summary['flat_bytes'])} without groups"


def _told_group(group: dict[str, Any]) -> str:
    if group["kind"] == "state":
        kept = f"with a state in {group['slots']} {'slot' if group['slots'] == 1 else 'slots'}"
    else:
        kept = {
            "full": "full",
            "window": f"with a window of {group['keeps']}",
            "chunk": f"with chunks of {group['keeps']}",
        }[group["kind"]]
    layers = "layer" if group["layers"] == 1 else "layers"
    return f"{format_size(group['bytes'])} of {group['layers']} {layers} {kept}"
