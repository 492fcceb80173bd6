# SPDX-License-Identifier: Apache-2.0
"""Read texts with a tokenizer: OpenAI's requests, and ShareGPT's conversations."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcore.apps.traces.clock import Clock
from kvcore.apps.traces.errors import counted, shown_value
from kvcore.apps.traces.read_options import ReadOptions, require_used
from kvcore.apps.traces.rows import UnusedFields, json_rows, row_errors
from kvcore.apps.traces.tokens import TokenText, token_ids
from kvcore.apps.traces.trace import Requests, Trace, output_count, token_count
from kvcore.apps.traces.turns import SessionTurns

if TYPE_CHECKING:
    from kvcore.apps.traces.source import Source

__all__ = ["read_openai", "read_sharegpt"]

_MOST_CACHED = 1 << 14
_UNKNOWN = -1
_MOST_SECONDS = 1 << 40
_MOST_NAME = 256
_BATCH = frozenset({"custom_id", "method", "url", "body"})
_ROW = frozenset({"timestamp", "created", "session_id", "delay", "output_length", "usage"})
_BODY = frozenset(
    {"model", "messages", "prompt", "input", "text_input", "instructions", "tools"}
    | {"max_tokens", "max_completion_tokens", "max_output_tokens"}
)
#: Fields with a prompt: of chats, completions, responses, and AIPerf's rows of texts.
_PROMPTS = ("messages", "prompt", "input", "text_input")
_ASKS = ("human", "user", "system")
_ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard")

_Encode = Callable[[str], "array[int]"]


class _Encoder:
    """Tokenize texts, and remember the last of them: chats repeat their beginning."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode: Any = None
        self._known: dict[str, array[int]] = {}

    def __call__(self, text: str) -> array[int]:
        """Return the tokens of a text, without special tokens.

        Raises
        ------
        ValueError
            No tokenizer was named, or it cannot be loaded. The text is no Unicode text.
        """
        found = self._known.get(text)
        if found is None:
            if self._encode is None:
                self._encode = _loaded(self._tokenizer)
            text.encode("utf-8")  # UnicodeEncodeError is a ValueError: half of a surrogate pair
            found = array("i", self._encode(text, add_special_tokens=False).ids)
            if len(self._known) >= _MOST_CACHED:
                self._known.pop(next(iter(self._known)))
            self._known[text] = found
        return found

    def check_used(self) -> None:
        """Raise ValueError if a tokenizer was named and the trace has no text."""
        is_used = self._tokenizer is None or bool(self._known)
        require_used("tokenizer", "the token ids of this trace", is_used=is_used)


def _loaded(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise ValueError(
            "expected a tokenizer, because the trace has texts; "
            "--tokenizer FILE names a tokenizer.json or a folder with it"
        )
    if not isinstance(tokenizer, (str, os.PathLike)):
        return tokenizer.encode
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(
            "expected the package tokenizers for a trace of texts; "
            "pip install 'kvcore[tokenizers]' installs it"
        ) from None
    name = os.fspath(tokenizer)
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        if path.is_file():
            found = Tokenizer.from_file(str(path))
        elif path.suffix == ".json" or path.is_absolute():
            raise FileNotFoundError("there is no such file")
        else:
            found = Tokenizer.from_pretrained(name)
    except Exception as error:  # noqa: BLE001 - the package raises plain Exception
        raise ValueError(
            f"expected a tokenizer, got {shown_value(name)}, which cannot be loaded: "
            f"{shown_value(str(error))}; --tokenizer FILE names a tokenizer.json"
        ) from None
    return found.encode


def _dumped(part: Any) -> str:
    return json.dumps(part, sort_keys=True)


class _Parts:
    """Turn the messages of a request into tokens, one message after another."""

    def __init__(self, encode: _Encoder) -> None:
        self._encode = encode
        self.left_out = 0

    def of(self, body: dict[str, Any]) -> Iterator[Any]:
        """Yield the tokens of the parts of a prompt; ValueError for a body of another kind."""
        for name in ("tools", "instructions"):
            if body.get(name):
                part = body[name]
                yield self._encode(part if isinstance(part, str) else _dumped(part))
        name = next((each for each in _PROMPTS if body.get(each) is not None), "messages")
        prompt = body.get(name)
        if isinstance(prompt, str) and prompt and name != "messages":
            yield self._encode(prompt)
        elif isinstance(prompt, list) and prompt and name in ("messages", "input"):
            for message in prompt:
                yield self._encode(self._text(name, message))
        elif isinstance(prompt, list) and prompt and type(prompt[0]) is int:
            yield token_ids(name, prompt)
        else:
            raise ValueError(
                f"{name}: expected messages, a text or token ids, got {shown_value(prompt)}"
            )

    def _text(self, name: str, message: Any) -> str:
        if name == "input" and isinstance(message, dict) and "role" not in message:
            return _dumped(message)  # a call of a tool, or its result
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{name}: expected objects with a role, got {shown_value(message)}")
        content = message.get("content")
        if isinstance(content, list):
            texts = [each.get("text") for each in content if isinstance(each, dict)]
            kept = [each for each in texts if isinstance(each, str)]
            self.left_out += len(content) - len(kept)
            content = "\n".join(kept)
        elif content is None:
            content = ""
        elif not isinstance(content, str):
            raise ValueError(f"{name}: expected a text as content, got {shown_value(content)}")
        calls = message.get("tool_calls")
        if calls:
            content += _dumped(calls)
        return f"{message['role']}\n{content}\n"


def read_openai(source: Source, name: str, options: ReadOptions) -> Trace:
    """Read requests of OpenAI's API, one JSON object each, also as lines of a batch file."""
    unused = UnusedFields(_BATCH | _ROW | _BODY)
    clock = Clock(options.time_unit or "ms", is_forced=options.time_unit is not None)
    requests, text, turns = Requests(clock), TokenText(), SessionTurns()
    encode = _Encoder(options.tokenizer)
    parts = _Parts(encode)
    models: dict[str | None, int] = {}
    bounded = 0
    for number, row in json_rows(source, options.limit):
        with row_errors(number):
            body = row.get("body", row)
            if not isinstance(body, dict):
                raise ValueError(f"body: expected a JSON object, got {shown_value(body)}")
            if str(row.get("url", "")).endswith("/embeddings"):
                raise ValueError("url: expected a request that generates text, got embeddings")
            unused.look(row.keys() | body.keys())
            outputs, is_bound = _outputs(row, body)
            bounded += is_bound
            turn = turns.add(clock, len(requests), row.get("session_id"), row.get("delay"))
            _add_time(clock, row)
            start = len(text)
            for tokens in parts.of(body):
                text.extend(tokens)
            text.add(start)
            if key := models.setdefault(_model(body), len(models)):
                text.add_key(start, key)
            requests.add(token_count("tokens", len(text) - start), outputs, **turn)
    notes = turns.notes()
    if len(models) > 1:
        notes.append(f"prompts of different models share no prefix: {len(models)} models")
    if bounded:
        notes.append(f"outputs of max_tokens tokens, an upper bound: {counted(bounded, 'row')}")
    if parts.left_out:
        notes.append(f"not text, and left out: {counted(parts.left_out, 'part')} of messages")
    encode.check_used()
    line = (
        "tokens of the named tokenizer: role, content and tools of each message, no chat template"
    )
    return requests.finish(name, "openai", text.finish(line), [*notes, *unused.notes()])


def _model(body: dict[str, Any]) -> str | None:
    """Return the name of the model or of the adapter; ValueError for a name that is no text."""
    model = body.get("model")
    if model is not None and not (isinstance(model, str) and len(model) <= _MOST_NAME):
        raise ValueError(
            f"model: expected a text of at most {_MOST_NAME} characters, got {shown_value(model)}"
        )
    return model


def _outputs(row: dict[str, Any], body: dict[str, Any]) -> tuple[int, bool]:
    """Return the output tokens, and whether they are only an upper bound."""
    if row.get("output_length") is not None:
        return output_count("output_length", row["output_length"]), False
    usage = row.get("usage")
    if isinstance(usage, dict) and usage.get("completion_tokens") is not None:
        return output_count("completion_tokens", usage["completion_tokens"]), False
    for field in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
        if body.get(field) is not None:
            return output_count(field, body[field]), True
    return 0, False


def _add_time(clock: Clock, row: dict[str, Any]) -> None:
    """Append `timestamp`, or `created`, which is in seconds in every trace."""
    created = row.get("created")
    if row.get("timestamp") is not None or created is None:
        clock.add("timestamp", row.get("timestamp"))
        return
    if type(created) not in (int, float) or not 0 <= created < _MOST_SECONDS:
        raise ValueError(
            f"created: expected 0 to less than {_MOST_SECONDS} seconds since 1970, got "
            f"{shown_value(created)}"
        )
    clock.add_seconds("created", created)


def read_sharegpt(source: Source, name: str, options: ReadOptions) -> Trace:
    """Read conversations: each answer is the output of one request."""
    unused = UnusedFields(frozenset({"id", "conversations"}))
    requests, text = Requests(Clock("s")), TokenText()
    encode = _Encoder(options.tokenizer)
    others = conversations = 0
    for number, row in json_rows(source, None):
        if options.limit is not None and len(requests) >= options.limit:
            break
        with row_errors(number):
            unused.look(row.keys())
            messages = row.get("conversations")
            if not isinstance(messages, list):
                raise ValueError(f"conversations: expected a list, got {shown_value(messages)}")
            start, parent = len(text), _UNKNOWN
            for message in messages:
                if not isinstance(message, dict) or not isinstance(message.get("value"), str):
                    raise ValueError(
                        f"conversations: expected objects with from and value, got "
                        f"{shown_value(message)}"
                    )
                who = message.get("from")
                is_answer = who in _ANSWERS
                others += not is_answer and who not in _ASKS
                place = len(text)
                is_full = options.limit is not None and len(requests) >= options.limit
                if is_answer and place > start and not is_full:
                    output = encode(message["value"])
                    text.extend(output)
                    text.add(start, place if len(output) else _UNKNOWN)
                    requests.clock.add("time", None)
                    requests.add(
                        token_count("tokens", place - start),
                        output_count("tokens", len(output)),
                        session=conversations,
                        parent=parent,
                        delay=0.0 if parent != _UNKNOWN else float("nan"),
                    )
                    parent = len(requests) - 1
                else:
                    text.extend(encode(f"{message['value']}\n"))
            conversations += 1
    notes = [
        f"{counted(conversations, 'conversation')}; a turn follows the answer before it at once"
    ]
    if others:
        notes.append(f"text of other roles in prompts: {counted(others, 'message')}")
    line = "tokens of the named tokenizer, without a chat template"
    return requests.finish(name, "sharegpt", text.finish(line), [*notes, *unused.notes()])
