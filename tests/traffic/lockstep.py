# SPDX-License-Identifier: Apache-2.0
"""Drives kvcore and the reference with the same calls and compares everything but page ids."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import kvcore
from builders import make_manager, with_host
from foreign_context import Context, Refused
from paired_request import Request
from planned import Planned
from reference_claims import Key, Namespace, Page
from reference_policies import Manager
from same_arrays import assert_same
from source_hint import SourceHint

COUNTERS = (
    "input_tokens",
    "cache_tokens",
    "evicted_pages",
    "copied_tokens",
    "h2d_blocks_copied",
    "d2h_blocks_copied",
)


def stored_after(threshold: int | None) -> dict[str, Any]:
    """Return options of a manager that stores pages after `threshold` uses; None: all pages."""
    if threshold is None:
        return {}
    return {"write_policy": "write_through_selective", "write_threshold": threshold}


class Lockstep:
    """A manager and its reference, kept in step."""

    core: kvcore.PagedKVCacheManager
    model: Manager

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        *,
        replicas: int = 1,
        caching: bool = True,
        dedup: bool = True,
        partial: bool = True,
        max_batch_size: int = 8,
        max_seq_len: int = 1 << 16,
        pool: bool = False,
        host_pages: int = 0,
        eviction: str = "lru",
        threshold: int | None = None,
    ) -> None:
        shape = (num_pages, 2, 2, page_size, 1, 2)
        self.pools = [np.zeros(shape, np.float32) for _ in range(replicas)] if pool else []
        self.core = make_manager(
            page_size,
            num_pages,
            replicas=replicas,
            caching=caching,
            dedup=dedup,
            partial_page_reuse=partial,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            blocks=self.pools or None,
            params=with_host(page_size, host_pages),
            eviction=eviction,
            **stored_after(threshold),
            clock=lambda: float(self.model.now),
        )
        self.model = Manager(
            page_size,
            num_pages,
            max_batch_size,
            max_seq_len,
            replicas=replicas,
            caching=caching,
            dedup=dedup,
            partial=partial,
            copies_at_once=bool(self.pools),
            host_pages=host_pages,
            eviction=eviction,
            threshold=threshold,
        )
        self.requests: list[Request] = []
        self.pins: list[tuple[int, Any, list[Key]]] = []
        self.known: dict[Key, None] = {}
        self.fetched: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=6)

    def hold_loads(self) -> None:
        """Start a call that may load pages: see tiered_lockstep."""

    def do_loads(self) -> None:
        """End a call that may load pages."""

    # -- calls -----------------------------------------------------------------------------------
    def new(
        self,
        tokens: list[int],
        *,
        foreign: bool = False,
        ns: Namespace = (None, None),
        terms: dict[str, Any] | None = None,
        **rest: Any,
    ) -> Request:
        name = (len(self.requests), "request")
        rest |= {"extra_key": ns[0], "cache_salt": ns[1]}
        model = Context(name, tokens, **rest)
        if foreign:
            request = Request(Context(name, tokens, **rest), model, foreign)
        else:
            model.remembers = True
            core = kvcore.TextGenerationContext(name, tokens, **rest, **(terms or {}))
            request = Request(core, model, foreign)
            self.model.terms[name] = terms or {}
        self.requests.append(request)
        return request

    def same(self, core: Callable[[], Any], model: Callable[[], Any]) -> tuple[Any, Any]:
        """Return both answers, or None twice if both sides refuse for the same reason."""
        try:
            expected = model()
        except Refused as refusal:
            kind = refusal.kind
        else:
            return core(), expected
        try:
            core()
        except Exception as error:  # noqa: BLE001
            assert type(error).__name__ == kind, f"expected {kind}, got {error!r}"
            return None, None
        raise AssertionError(f"expected {kind}")

    def claim(self, request: Request, replica: int) -> None:
        self.same(
            lambda: self.core.external_claim(request.request_id, replica_idx=replica),
            lambda: self.model.claim(request.request_id, replica),
        )

    def release(self, request: Request) -> None:
        self.same(
            lambda: self.core.release(request.request_id),
            lambda: self.model.release(request.request_id),
        )

    def reserve(self, request: Request, num_steps: int = 1, **options: Any) -> bool | None:
        """Plan and reserve; check that the plan describes the reservation."""
        planned = Planned(self, request, num_steps, **options)
        hint = SourceHint(self)
        refused = False
        answer: bool | None = None
        try:
            answer = self.core.maybe_reserve(request.core, num_steps, **options)
        except Exception as error:  # noqa: BLE001
            refused, name = True, type(error).__name__
        copies = hint.take()
        chosen, dropped = hint.for_request(request)
        try:
            expected = self.model.reserve(
                request.model, num_steps, chosen, dropped=dropped, **options
            )
        except Refused as refusal:
            assert refused, f"expected {refusal.kind}, answered {answer}"
            assert name == refusal.kind
        else:
            assert not refused, f"expected {expected}, raised {name}"
            assert answer is expected
        self.check_copies(copies)
        planned.check(answer)
        return answer

    def reserve_batch(self, requests: Sequence[Request], num_steps: int) -> None:
        """Check that the batch form equals one call per context, up to the first failure."""
        hint = SourceHint(self)

        def core() -> int:
            return self.core.maybe_reserve_batch([r.core for r in requests], num_steps)

        def model() -> int:
            self.model.check([request.model for request in requests], num_steps)
            return -1

        answer, _ = self.same(core, model)
        copies = hint.take()
        if answer is None:
            assert not len(copies)
            return
        for row, request in enumerate(requests):
            chosen, dropped = hint.for_request(request)
            fits = self.model.reserve(request.model, num_steps, chosen, dropped=dropped)
            if not fits:
                assert answer == row
                break
        else:
            assert answer == len(requests)
        self.check_copies(copies)

    def fetch(self, requests: Sequence[Request], num_steps: int = 1) -> Any:
        hint = SourceHint(self)
        refused, inputs = "", None
        try:
            inputs = self.core.fetch([r.core for r in requests], num_steps)
        except Exception as error:  # noqa: BLE001
            refused = type(error).__name__
        copies = hint.take()
        found = [hint.for_request(request) for request in requests]
        chosen = next((source for source, _ in found if source is not None), None)
        try:
            self.model.fetch(
                [r.model for r in requests], num_steps, chosen, dropped=not len(copies)
            )
        except Refused as refusal:
            assert not len(copies)
            assert refused == refusal.kind, f"{refused or 'no error'}, expected {refusal.kind}"
            return None
        assert not refused, f"fetch raised {refused}"
        self.check_copies(copies)
        self.check_inputs(inputs, requests, num_steps)
        return inputs

    def step(self, requests: Sequence[Request]) -> None:
        swaps, expected = self.same(
            lambda: self.core.step([r.core for r in requests]),
            lambda: self.model.step([r.model for r in requests]),
        )
        if expected is not None:
            assert swaps.dtype == np.int32
            assert [tuple(row[:2]) for row in swaps.tolist()] == expected
            for row, column, page in swaps.tolist():
                assert self.core.get_req_blocks(requests[row].request_id)[column] == page

    def fork(self, parent: Request, children: Sequence[Request]) -> None:
        self.same(
            lambda: self.core.fork(parent.request_id, *[child.core for child in children]),
            lambda: self.model.fork(parent.model, [child.model for child in children]),
        )

    def truncate(self, request: Request, n: int) -> None:
        self.same(
            lambda: self.core.truncate(request.request_id, n),
            lambda: self.model.truncate(request.model, n),
        )

    def shared_prefixes(self, requests: Sequence[Request]) -> None:
        groups, expected = self.same(
            lambda: self.core.shared_prefixes([r.core for r in requests]),
            lambda: self.model.shared_prefixes([r.model for r in requests]),
        )
        if groups is not None:
            seen = [((group.replica, group.rows), group.num_tokens) for group in groups]
            assert sorted(seen) == sorted(expected.items())
            lengths = [group.num_tokens for group in groups]
            assert lengths == sorted(lengths, reverse=True)

    def pin(self, tokens: list[int], ns: Namespace, replica: int) -> None:
        path = self.model.pin(replica, tokens, ns)
        pinned = self.core.pin(tokens, ns[0], ns[1], replica_idx=replica)
        assert pinned.num_tokens == len(path) * self.model.page_size
        self.pins.append((replica, pinned, path))

    def unpin(self, index: int) -> None:
        replica, pinned, path = self.pins.pop(index)
        pinned.release()
        self.model.unpin(replica, path)

    def touch(self, tokens: list[int], ns: Namespace, replica: int) -> None:
        found = self.core.match_prefix(tokens, ns[0], ns[1], replica, touch=True)
        assert found == self.model.match_and_touch(replica, tokens, ns) * self.model.page_size

    # -- comparisons -----------------------------------------------------------------------------
    def check(self) -> None:
        self.core.check_integrity()
        self.check_counts()
        loads = self.model.loads()
        for request in self.requests:
            self.check_request(request, loads)
        self.check_cached()
        self.check_sharing()
        for array, copy in self.fetched:
            assert_same(array, copy, "an array of an earlier fetch changed")

    def check_copies(self, copies: Any) -> None:
        assert sorted(copies[:, 3].tolist()) == sorted(self.model.copies)
        self.model.copies.clear()
        self.model.read.clear()

    def check_counts(self) -> None:
        replicas = range(len(self.model.cache))
        free = [self.model.num_free(replica) for replica in replicas]
        total = self.model.num_pages * len(free)
        assert self.core.num_free_blocks == sum(free)
        assert abs(self.core.free_blocks_pct - sum(free) / total) < 1e-9
        assert abs(self.core.used_blocks_pct - 1 + sum(free) / total) < 1e-9
        metrics = self.core.metrics
        seen = {name: getattr(metrics, name) for name in COUNTERS}
        expected = {name: self.model.metrics[name] for name in COUNTERS}
        assert seen == expected, f"{seen}, expected {expected}"
        peak = metrics.peak_used_pages
        assert total - sum(free) <= peak <= total, (total - sum(free), peak, total)

    def check_request(self, request: Request, loads: list[tuple[int, int]]) -> None:
        core, model = request.core, request.model
        seen = core.start_idx, core.active_idx, core.end_idx
        assert seen == (model.start_idx, model.active_idx, model.end_idx), request.request_id
        assert_same(core.tokens, model.tokens)
        claim = self.model.claims.get(request.request_id)
        assert self.core.contains(request.request_id) is (claim is not None)
        if claim is not None:
            assert self.core.get_replica(core) == claim.replica
            assert len(self.core.get_req_blocks(request.request_id)) == len(claim.pages)
        else:
            assert self.core.get_or_recommend_replica(core) == self.model.recommend(model, loads)

    def check_cached(self) -> None:
        for cache in self.model.cache:
            self.known.update(dict.fromkeys(cache))
        for replica in range(len(self.model.cache)):
            for ns, tokens in self.known:
                found = self.core.match_prefix(list(tokens), ns[0], ns[1], replica_idx=replica)
                path = self.model.match(replica, tokens, ns, len(tokens))
                assert found == len(path) * self.model.page_size, (replica, ns, tokens)

    def check_sharing(self) -> None:
        """Check that page ids and the reference's pages are in a one-to-one relation."""
        for replica in range(len(self.model.cache)):
            pairs = [
                pair for key in self.model.cache[replica] for pair in self.tree_pairs(replica, key)
            ]
            for name, claim in self.model.claims.items():
                if claim.replica == replica:
                    pairs += zip(self.core.get_req_blocks(name), claim.pages, strict=True)
            by_id = {int(block): page for block, page in pairs}
            ids = {page: int(block) for block, page in pairs}
            assert all(by_id[int(block)] is page for block, page in pairs)
            assert all(ids[page] == block for block, page in pairs)
            assert all(0 <= block < self.model.num_pages for block in by_id)

    def tree_pairs(self, replica: int, key: Key) -> list[tuple[int, Page]]:
        (extra, salt), tokens = key
        size, cache = self.model.page_size, self.model.cache[replica]
        found, ids = self.core.match_prefix(
            list(tokens), extra, salt, replica_idx=replica, return_pages=True
        )
        assert found == len(tokens)
        assert ids.dtype == np.int32
        ends = range(size, found + 1, size)
        return [(b, cache[key[0], tokens[:end]]) for b, end in zip(ids, ends, strict=True)]

    def check_inputs(self, inputs: Any, requests: Sequence[Request], num_steps: int) -> None:
        assert len(inputs) == len(self.model.cache)
        for replica, entry in enumerate(inputs):
            rows = [r for r in requests if self.model.claims[r.request_id].replica == replica]
            table, lengths = self.expected_table(rows)
            for seen, expected in (
                (entry.lookup_table, table),
                (entry.cache_lengths, lengths),
                (entry.max_lengths, self.expected_max_lengths(rows, num_steps)),
            ):
                assert seen.dtype == np.uint32
                assert seen.shape == expected.shape
                assert_same(seen, expected)
                self.fetched.append((seen, np.array(seen)))

    def expected_table(self, rows: Sequence[Request]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        pages = [self.core.get_req_blocks(r.request_id) for r in rows]
        width = max(map(len, pages), default=0)
        table = np.full((len(rows), width), self.core.total_num_pages, np.uint32)
        for row, blocks in enumerate(pages):
            table[row, : len(blocks)] = blocks
        return table, np.array([r.model.start_idx for r in rows], np.uint32)

    def expected_max_lengths(self, rows: Sequence[Request], num_steps: int) -> npt.NDArray[Any]:
        active = max((r.model.active_length for r in rows), default=0)
        longest = max((r.model.active_idx for r in rows), default=0)
        later = [(1, longest + step) for step in range(1, num_steps)]
        return np.array([(active, longest), *later], np.uint32).reshape(num_steps, 2)
