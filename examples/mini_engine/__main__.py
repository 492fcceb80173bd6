# SPDX-License-Identifier: Apache-2.0
"""Generate from prompts with a small engine on kvcore.

python examples/mini_engine MODEL_DIR "Once upon a time" --workers 2 --n 2 --stream
python examples/mini_engine "Hello"    # a tiny model with random weights, made on the spot
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mini_engine.engine import Engine, Token
from mini_engine.random_model import write_random_model


class Bytes:
    """The tokenizer of the random model, whose tokens are bytes."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """Return a letter for each token: the model has learned no language."""
        return "".join(chr(ord("a") + token % 26) for token in tokens)


class FromFolder:
    """The tokenizer of a model's folder."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ValueError(f"{error}: pip install tokenizers") from error
        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the tokens that begin a text."""
        return [int(token) for token in self._tokenizer.encode(text).ids]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(tokens))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; the model's folder is optional."""
    parser = argparse.ArgumentParser(
        prog="mini_engine", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="folder with config.json, safetensors, tokenizer")
    parser.add_argument("prompts", nargs="*", metavar="prompt")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes; 0: this process (default)"
    )
    parser.add_argument("--n", type=int, default=1, help="sequences of each prompt (default 1)")
    parser.add_argument("--max-new-tokens", type=int, default=40, help="per sequence (default 40)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: likeliest (default)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default 0)")
    parser.add_argument("--num-pages", type=int, default=512, help="of 16 tokens (default 512)")
    parser.add_argument("--max-batch-tokens", type=int, default=512, help="per step (default 512)")
    parser.add_argument("--stream", action="store_true", help="print tokens as they are made")
    options = parser.parse_args(arguments)
    if options.model is not None and not (Path(options.model) / "config.json").is_file():
        options.prompts.insert(0, options.model)
        options.model = None
    options.prompts = options.prompts or ["You are a robot. Sing!", "You are a robot. Dance!"]
    return options


def serve(options: argparse.Namespace, folder: Path, tokenizer: Bytes | FromFolder) -> None:
    """Run the prompts and print the answers; print a summary to stderr."""
    answers: dict[tuple[int, int], list[int]] = defaultdict(list)
    shown: dict[tuple[int, int], int] = defaultdict(int)  # characters
    sizes = {"num_pages": options.num_pages, "max_batch_tokens": options.max_batch_tokens}
    with closing(Engine(folder, workers=options.workers, **sizes)) as engine:
        for prompt in options.prompts:
            tokens = tokenizer.encode(prompt)
            engine.add(tokens, options.max_new_tokens, options.n, options.temperature, options.seed)
        is_alone, start = len(options.prompts) * options.n == 1, time.perf_counter()
        for token in engine.stream():
            answers[token.sequence].append(token.token)
            if options.stream:
                _show(token, tokenizer.decode(answers[token.sequence]), shown, is_alone)
        seconds = time.perf_counter() - start
        for prompt, sample in sorted(answers) if not options.stream else ():
            text = tokenizer.decode(answers[prompt, sample])
            print(f"{prompt}.{sample} {options.prompts[prompt]!r} -> {text!r}")
        print(_summary(engine, answers, seconds), file=sys.stderr)


def _show(
    token: Token,
    text: str,
    shown: dict[tuple[int, int], int],
    is_alone: bool,  # noqa: FBT001
) -> None:
    """Print the new text of a sequence after its last character is complete."""
    piece = text[shown[token.sequence] :]
    if token.finish_reason is None and text.endswith("\ufffd"):
        return
    shown[token.sequence] = len(text)
    line = piece if is_alone else "{}.{} {!r}\n".format(*token.sequence, piece)
    print(line, end="", flush=True)


def _summary(engine: Engine, answers: dict[tuple[int, int], list[int]], seconds: float) -> str:
    count, metrics = sum(map(len, answers.values())), engine.manager.metrics
    return (
        f"\n{count} tokens in {seconds:.2f} s, {count / seconds:.0f} tokens/s; "
        f"{metrics.cache_tokens} of {metrics.prompt_tokens} prompt tokens were cached; "
        f"{engine.scheduler.num_preemptions} preemptions"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 2 after an error."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as made:
        try:
            if options.model is None:
                print("no model folder: use a tiny random model", file=sys.stderr)
                serve(options, write_random_model(Path(made)), Bytes())
            else:
                serve(options, Path(options.model), FromFolder(Path(options.model)))
        except (ValueError, RuntimeError, OSError) as error:
            print(f"mini_engine: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
