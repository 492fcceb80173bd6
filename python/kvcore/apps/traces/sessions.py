# SPDX-License-Identifier: Apache-2.0
"""Read the sessions of kv-cache-tester: a JSON document per session, or a tar file of them."""

from __future__ import annotations

import tarfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any, cast

from kvcore.apps.traces.blocks import BlockIds, BlockSize
from kvcore.apps.traces.clock import Clock
from kvcore.apps.traces.errors import LineError, counted, shown, shown_value
from kvcore.apps.traces.json_values import JsonDocument, parsed_row
from kvcore.apps.traces.read_options import ReadOptions
from kvcore.apps.traces.rows import row_errors
from kvcore.apps.traces.source import MOST_CHARACTERS, MOST_LINES, Source
from kvcore.apps.traces.trace import Requests, Trace, output_count, token_count

__all__ = ["is_tar", "read_sessions"]

_ROOT = -1
_AGENT = "subagent"
_TAR_MAGIC = slice(257, 262)
_MOST_DEPTH = 16
_CHUNK = 1 << 20


def is_tar(beginning: bytes) -> bool:
    """Return whether the bytes are the beginning of a tar file."""
    return beginning[_TAR_MAGIC] == b"ustar"


def read_sessions(source: Source, name: str, options: ReadOptions) -> Trace:
    """Read all sessions. Each session begins at time 0, because the format has no other start."""
    sessions = _Sessions(options)
    if is_tar(source.beginning):
        sessions.read_tar(source)
    elif b"\n" in source.beginning.strip() and _is_whole_line(source.beginning):
        for number, text in source.lines():
            with row_errors(number):
                sessions.add_row(parsed_row(text))
            if sessions.is_full:
                break
    else:
        sessions.read_document(source.chunks())
    return sessions.finish(name)


def _is_whole_line(beginning: bytes) -> bool:
    try:
        parsed_row(beginning.partition(b"\n")[0].decode("utf-8"))
    except ValueError:
        return False
    return True


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while data := file.read(_CHUNK):
        yield data


@dataclass
class _Agent:
    """The last request of an agent, and the other requests whose answers it waits for.

    A session is an agent. Sub-agents next to each other begin together, after the answer to the
    last request of their parent. The parent continues after the last answers of all of them.
    """

    last: int = _ROOT
    waits: tuple[int, ...] = ()
    started_by: tuple[int, ...] = ()

    @property
    def has_answers(self) -> bool:
        """Whether the next request follows any answer."""
        return self.last != _ROOT or bool(self.waits)

    def start(self) -> _Agent:
        """Return a sub-agent, whose first request follows the last request of this agent."""
        begin = self.started_by if self.last == _ROOT else (self.last,)
        return _Agent(waits=begin, started_by=begin)

    def wait_for(self, child: _Agent) -> None:
        """Let the next request also wait for the last answers of a sub-agent."""
        # The waits of a child are its own sub-agents, if it ends with them, or its start.
        known = {_ROOT, *child.started_by}
        ended = [each for each in child.waits or (child.last,) if each not in known]
        self.waits = tuple(dict.fromkeys((*self.waits, *ended)))


class _Sessions:
    """Collect the requests of all sessions."""

    def __init__(self, options: ReadOptions) -> None:
        unit = options.time_unit or "s"
        self._requests = Requests(Clock(unit, is_forced=options.time_unit is not None))
        self._ids = BlockIds()
        self._lengths = array("q")
        self._counts = array("q")
        self._limit = options.limit
        self._forced = options.block_size
        self._sizes: set[int] = set()
        self._sessions = self._agents = self._next_id = self._other_files = 0
        self._scopes: set[str] = set()

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self._limit is not None and len(self._requests) >= self._limit

    def read_tar(self, source: Source) -> None:
        """Read every JSON file of a tar file, in the order of the tar file."""
        read = members = 0
        try:
            stream = cast("IO[bytes]", source.stream)
            with tarfile.open(fileobj=stream, mode="r|") as files:
                for member in files:
                    members += 1
                    read += max(member.size, 0)
                    if members > MOST_LINES or read > MOST_CHARACTERS:
                        raise LineError(
                            members, f"expected at most {MOST_CHARACTERS} bytes of files"
                        )
                    if not member.isfile():
                        continue
                    if not member.name.endswith(".json"):
                        self._other_files += 1
                        continue
                    data = cast("IO[bytes]", files.extractfile(member))
                    try:
                        self.read_document(_pieces(data))
                    except LineError as error:
                        raise LineError(error.line, f"{shown(member.name)}: {error}") from None
                    if self.is_full:
                        return
        except tarfile.TarError as error:
            raise LineError(members, f"expected a whole tar file, got an error: {error}") from None

    def read_document(self, chunks: Iterable[bytes]) -> None:
        """Read one session, request by request."""
        document = JsonDocument(chunks)
        first = len(self._ids)
        fields: dict[str, Any] = {}
        has_requests = False
        for key in document.names():
            if key == "requests":
                has_requests = True
                self._add_requests(document.items(), document)
                if self.is_full:
                    break
            else:
                value = document.value()
                if key in ("block_size", "hash_id_scope"):
                    fields[key] = value
        else:
            document.end()
        if not has_requests:
            raise LineError(document.number, "requests: expected a list, got no such field")
        with row_errors(document.number):
            self._end(fields, first)

    def add_row(self, row: dict[str, Any]) -> None:
        """Read one session that is in memory."""
        first = len(self._ids)
        requests = row.get("requests")
        if not isinstance(requests, list):
            raise ValueError("requests: expected a list")
        self._add_requests(iter(requests), None)
        self._end(row, first)

    def _end(self, fields: dict[str, Any], first: int) -> None:
        size = fields.get("block_size", self._forced)
        if type(size) is not int or not 1 <= size <= 1 << 24:
            raise ValueError(
                f"block_size: expected a positive integer, got {shown_value(size)}; "
                f"--block-size N names the size"
            )
        self._sizes.add(self._forced or size)
        if len(self._sizes) > 1:
            raise ValueError(f"block_size: expected one size, got {sorted(self._sizes)}")
        scope = fields.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise ValueError(
                f'hash_id_scope: expected "local" or "global", got {shown_value(scope)}'
            )
        self._scopes.add(scope)
        if len(self._scopes) > 1:
            raise ValueError("hash_id_scope: expected the same scope in all sessions")
        if scope == "local":
            self._next_id = self._ids.make_local(first, self._next_id)
        self._sessions += 1

    def _add_requests(self, requests: Iterator[Any], document: JsonDocument | None) -> None:
        agent = _Agent()
        for index, request in enumerate(requests):
            with row_errors(index + 1 if document is None else document.number):
                self._add(request, agent, 0)
            if self.is_full:
                return

    def _add(self, request: Any, agent: _Agent, depth: int) -> None:
        """Add a request of an agent, or the requests of a sub-agent."""
        if not isinstance(request, dict):
            raise ValueError(f"requests: expected JSON objects, got {shown_value(request)}")
        if request.get("type") == _AGENT:
            inner = request.get("requests")
            if not isinstance(inner, list) or depth >= _MOST_DEPTH:
                raise ValueError(f"requests: expected a list, at most {_MOST_DEPTH} agents deep")
            self._agents += 1
            child = agent.start()
            for each in inner:
                if self.is_full:
                    break
                self._add(each, child, depth + 1)
            agent.wait_for(child)
            return
        inputs = token_count("in", request.get("in"))
        outputs = output_count("out", request.get("out"))
        ids = self._ids.check("hash_ids", request.get("hash_ids"))
        think = request.get("think_time")
        follows = think is not None and agent.has_answers
        delay = self._requests.clock.duration("think_time", think) if follows else float("nan")
        self._requests.clock.add("t", request.get("t"))
        self._ids.add(ids)
        self._lengths.append(inputs)
        self._counts.append(len(ids))
        waits = agent.waits if follows else ()
        links: dict[str, Any] = {"parent": agent.last, "delay": delay, "waits": waits}
        self._requests.add(inputs, outputs, session=self._sessions, **links)
        agent.last, agent.waits = len(self._requests) - 1, ()

    def finish(self, name: str) -> Trace:
        """Check the number of blocks of each prompt, and return the trace."""
        if not self._sizes:
            raise ValueError("expected at least one session, got none")
        (block,) = self._sizes
        size = BlockSize(block, block)
        for index, (tokens, ids) in enumerate(zip(self._lengths, self._counts, strict=True)):
            with row_errors(index + 1):
                size.add("hash_ids", tokens, ids)
        _, line = size.finish()
        if self._forced is None:
            line = line.replace("as --block-size says", "as the file says")
        content = self._ids.finish(block, line)
        notes = [
            f"{counted(self._sessions, 'session')}, from time 0; a request follows the answer "
            f"before it after its think time (online mode)"
        ]
        if self._scopes == {"local"}:
            notes.append("block ids are local to a session: no two sessions share a block")
        if self._agents:
            notes.append(
                f"{counted(self._agents, 'sub-agent')}: begins after the answer before it, and its "
                f"parent waits for its last answer (online mode)"
            )
        if self._other_files:
            notes.append(f"not JSON, and left out: {counted(self._other_files, 'file')}")
        return self._requests.finish(name, "sessions", content, notes, has_rows_in_order=False)
