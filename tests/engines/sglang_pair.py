# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefix cache and kvcore's replacement, with the same calls.

Needs SGLang's sources (`sglang_sources.open_sources`).
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache import utils
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from kvcore.integrations.sglang.cache import KVCoreRadixCache, KVCoreWindowCache
from sglang_rules import RulesOut, WindowRulesOut

CONTEXT = 256
ROWS = 16


def init_params(page: int, slots: int, **options: Any) -> Any:
    """Return the parameters of a cache: a pool of rows, and an allocator of `slots` slots."""
    if page == 1:
        allocator = TokenToKVPoolAllocator(slots, torch.float16, "cpu", None, False)
    else:
        allocator = PagedTokenToKVPoolAllocator(slots, page, torch.float16, "cpu", None, False)
    rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", False)
    return CacheInitParams(False, rows, allocator, page, **options)


def page_hashes(key: Any, prior: bytes | None, page_size: int) -> list[str]:
    """Return hashes of pages for both caches; SGLang's own function must be compiled."""
    units, found = list(key), []
    for start in range(0, len(units), page_size):
        page = repr(units[start : start + page_size]).encode()
        prior = sha256((prior or b"") + page).digest()
        found.append(prior.hex())
    return found


utils.get_native_hash = page_hashes


@dataclass
class Request:
    """The fields of SGLang's request that a cache reads and writes."""

    origin_input_ids: array[int]
    full_untruncated_fill_ids: array[int]
    extra_key: str | None
    cache_salt: str | None
    priority: int | None
    kv: Any = field(default_factory=ReqKvInfo)
    last_node: Any = None
    lock: Any = None
    is_finished: bool = False
    session: Any = None
    session_id: str | None = None
    kv_rotation_base: int | None = None

    def finished(self) -> bool:
        """Return true if the last token is generated."""
        return self.is_finished


class Side:
    """One cache with its allocator and its requests, and the scheduler's calls to them."""

    def __init__(self, cache_type: Any, page: int, slots: int, **options: Any) -> None:
        params = init_params(page, slots, **options)
        self.cache = cache_type(params)
        self.page, self.slots = page, slots
        self.allocator, self.rows = params.token_to_kv_pool_allocator, params.req_to_token_pool
        self.requests: dict[str, Request] = {}

    def key(self, tokens: list[int], name: tuple[str | None, str | None]) -> Any:
        """Return a new key of tokens for each call, because caches may change it."""
        return RadixKey(array("q", tokens), name[0], cache_salt=name[1])

    def match(self, tokens: list[int], name: tuple[str | None, str | None]) -> Any:
        """Find a prefix."""
        return self.cache.match_prefix(MatchPrefixParams(key=self.key(tokens, name)))

    def missing(self, tokens: int) -> int:
        """Return the number of slots to evict before `tokens` tokens fit."""
        return max(self.pages(tokens) * self.page - int(self.allocator.available_size()), 0)

    def pages(self, tokens: int) -> int:
        """Return the number of pages for `tokens` tokens."""
        return -(-tokens // self.page)

    def start(self, rid: str, tokens: list[int], name: Any, priority: int | None) -> int:
        """Match and lock a prompt without its last token, and allocate a row for it."""
        ids = array("q", tokens)
        request = Request(ids, array("q", ids), name[0], name[1], priority)
        found = self.match(tokens[:-1], name)
        request.last_node, hit = found.last_device_node, int(found.device_prefix_len)
        request.lock = self.cache.lock(request.last_node)
        request.kv.req_pool_idx = self.rows.alloc_rows(1)[0]
        slots = self.cache.path_device_indices(request.last_node)
        assert len(slots) == hit
        self.rows.write((request.kv.req_pool_idx, slice(0, hit)), slots)
        request.kv.cache_protected_len = request.kv.kv_allocated_len = hit
        self.requests[rid] = request
        return hit

    def grow(self, rid: str, end: int) -> None:
        """Allocate slots for the tokens before `end`; enough slots are free."""
        kv = self.requests[rid].kv
        first = self.pages(kv.kv_allocated_len) * self.page
        more = self.pages(end) * self.page - first
        if more > 0:
            slots = self.allocator.alloc(more)
            assert slots is not None
            self.rows.write((kv.req_pool_idx, slice(first, first + more)), slots)
        kv.kv_allocated_len = max(kv.kv_allocated_len, end)

    def checkpoint(self, rid: str, end: int) -> int:
        """Publish the computed tokens up to `end`."""
        request = self.requests[rid]
        self.cache.checkpoint(request, up_to=end)
        return int(request.kv.cache_protected_len)

    def release(self, rid: str, *, checkpoint: bool) -> None:
        """Do the steps of SGLang's release_kv_cache, in the same order."""
        request = self.requests.pop(rid)
        kv = request.kv
        request.is_finished = True
        if checkpoint:
            self.cache.checkpoint(request, up_to=kv.kv_allocated_len)
        self.cache.free_kv_row(kv, [(kv.cache_protected_len, kv.kv_allocated_len)])
        kv.kv_allocated_len = kv.cache_protected_len
        self.cache.unlock(request.lock)
        request.lock = None
        self.rows.free_slots.append(kv.req_pool_idx)

    def evict(self, tokens: int) -> int:
        """Evict; return the number of evicted tokens."""
        return int(self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def sizes(self) -> tuple[int, ...]:
        """Return the sizes from which the scheduler computes its budgets."""
        cache = self.cache
        return (
            *(cache.evictable_size(), cache.protected_size(), cache.total_size()),
            self.allocator.available_size(),
        )

    def check(self) -> None:
        """Check that every slot has one owner: the allocator, the tree or one request."""
        cached = self.cache.all_values_flatten().tolist() if self.cache.total_size() else []
        free = self.allocator.get_all_free_pages().tolist()
        owned = [slot // self.page for slot in cached[:: self.page]] + free
        for request in self.requests.values():
            kv = request.kv
            row = self.rows.req_to_token[kv.req_pool_idx]
            slots = row[kv.cache_protected_len : kv.kv_allocated_len : self.page]
            owned += (slots // self.page).tolist()
            path = self.cache.path_device_indices(request.last_node)[: kv.cache_protected_len]
            assert path.tolist() == row[: kv.cache_protected_len].tolist()
        assert sorted(owned) == list(range(1, self.slots // self.page + 1)), (
            "a page is lost or has two owners"
        )
        if isinstance(self.cache, KVCoreRadixCache):
            self.cache.tree.check_integrity()


def theirs_content(cache: Any) -> dict[Any, bool]:
    """Return the pages of SGLang's tree by namespace and tokens up to their end; true if locked."""
    found: dict[Any, bool] = {}
    left: list[tuple[Any, list[Any]]] = [(child, []) for child in cache.root_node.children.values()]
    while left:
        node, front = left.pop()
        units = front + list(node.key)
        for end in range(len(front) + cache.page_size, len(units) + 1, cache.page_size):
            name = (node.key.extra_key, node.key.cache_salt)
            found[name, tuple(units[:end])] = node.lock_ref > 0
        left += [(child, units) for child in node.children.values()]
    return found


def ours_content(cache: Any) -> dict[Any, bool]:
    """Return the pages of kvcore's tree in the same form."""
    found: dict[Any, bool] = {}
    units: list[list[Any]] = []
    for run in cache.tree.runs():
        tokens = run.tokens.tolist()
        own = list(pairwise(tokens)) if cache.is_eagle else tokens
        front = [] if run.parent is None else units[run.parent]
        units.append(front + own)
        size = cache.page_size
        for end in range(len(front) + size, len(units[-1]) + 1, size):
            found[(run.extra_key, run.cache_salt), tuple(units[-1][:end])] = run.is_pinned
    return found


@dataclass(frozen=True)
class Scene:
    """The settings of a random run."""

    page: int = 1
    policy: str = "lru"
    eagle: bool = False
    names: bool = False
    events: bool = False
    slots: int = 192
    ruled: bool = True  # True: SGLang with all of its rules
    windows: bool = False  # in all layers of the model
    seed: int = 0

    def __str__(self) -> str:
        words = [f"page {self.page}", self.policy]
        words += [w for w in ("eagle", "names", "events", "ruled", "windows") if getattr(self, w)]
        return " ".join([*words, f"seed {self.seed}"])


class Pair:
    """Both caches under the same random calls; AssertionError if an answer differs."""

    def __init__(self, scene: Scene) -> None:
        options = {
            "eviction_policy": scene.policy,
            "is_eagle": scene.eagle,
            "enable_kv_cache_events": scene.events,
        }
        self.scene, self.rng = scene, random.Random(str(scene))
        slots = scene.slots // scene.page * scene.page
        theirs, ours = (RadixCache if scene.ruled else RulesOut), KVCoreRadixCache
        if scene.windows:
            theirs, ours = (PureSWARadixCache if scene.ruled else WindowRulesOut), KVCoreWindowCache
            options["sliding_window_size"] = 8
        self.theirs, self.ours = (
            Side(each, scene.page, slots, **options) for each in (theirs, ours)
        )
        self.computed: dict[str, int] = {}
        self.names: dict[str, Any] = {}
        self.said: list[str] = []
        self.started = 0

    def both(self, verb: str, *args: Any, **options: Any) -> Any:
        """Call a verb on both sides and compare the answers."""
        self.said.append(f"{verb}{args}{options or ''}")
        answers = [getattr(side, verb)(*args, **options) for side in (self.theirs, self.ours)]
        assert answers[0] == answers[1], f"{self.scene}: {self.said[-1]}: {answers}"
        return answers[0]

    def prompt(self) -> list[int]:
        """Return tokens that may start like the tokens of other requests."""
        length = self.rng.randrange(2, 12 * self.scene.page // 2 + 10)
        base = random.Random(self.rng.randrange(3))
        tokens = [base.randrange(1, 2**40) for _ in range(length)]
        for i in range(length):
            if self.rng.random() < 0.3 / self.scene.page:
                tokens[i:] = [self.rng.randrange(3) for _ in range(length - i)]
                break
        return tokens

    def name(self) -> tuple[str | None, str | None]:
        choices = ((None, None), ("lora", None), (None, "salt"), ("lora", "salt"))
        return self.rng.choice(choices) if self.scene.names else choices[0]

    def make_room(self, tokens: int) -> bool:
        """Evict the missing slots: SGLang evicts whole leaves, kvcore evicts the same number."""
        missing = self.theirs.missing(tokens)
        if missing:
            self.said.append(f"evict {missing}")
            gone = self.theirs.evict(missing)
            assert self.ours.evict(gone) == gone
        return self.theirs.missing(tokens) == 0

    def start(self) -> None:
        if len(self.theirs.requests) == 4:
            return
        self.started += 1
        rid, tokens, name = f"r{self.started}", self.prompt(), self.name()
        priority = self.rng.choice((None, 0, 1, 5))
        hit = self.both("start", rid, tokens, name, priority)
        self.computed[rid], self.names[rid] = hit, name

    def advance(self) -> None:
        """Run a chunk of the prompt, or a decoded token."""
        if not self.computed:
            return
        rid = self.rng.choice([*self.computed])
        ids = self.theirs.requests[rid].full_untruncated_fill_ids
        done = self.computed[rid]
        if done >= len(ids):
            if len(ids) > CONTEXT - 2 * self.scene.page:
                return
            token = self.rng.randrange(3)
            for side in (self.theirs, self.ours):
                side.requests[rid].full_untruncated_fill_ids.append(token)
        end = self.rng.randint(done + 1, len(ids))
        if not self.make_room(end - done + self.scene.page):
            return
        self.both("grow", rid, end)
        self.computed[rid] = end
        if self.scene.windows and done < len(self.theirs.requests[rid].origin_input_ids):
            for side in (self.theirs, self.ours):  # windows slide only after the prompt
                side.requests[rid].kv.swa_evict_floor = end
        if self.rng.random() < 0.5:
            self.both("checkpoint", rid, end)

    def leave(self) -> None:
        if not self.computed:
            return
        rid = self.rng.choice([*self.computed])
        self.computed.pop(rid)
        new = self.theirs.requests[rid].kv
        publishes = new.kv_allocated_len > new.cache_protected_len and self.rng.random() < 0.8
        tokens = [*self.theirs.requests[rid].full_untruncated_fill_ids]
        self.both("release", rid, checkpoint=publishes)
        if not publishes:  # kvcore counts this as a use of the locked pages, SGLang does not
            self.touch(tokens, self.names[rid])

    def touch(self, tokens: list[int], name: Any) -> None:
        self.said.append(f"touch({tokens}, {name})")
        for side in (self.theirs, self.ours):
            side.cache.touch_prefix(side.key(tokens, name))

    def look(self) -> None:
        """Match without a lock, or with a short lock."""
        tokens, name = self.prompt(), self.name()
        self.said.append(f"look({tokens}, {name})")
        found = [side.match(tokens, name) for side in (self.theirs, self.ours)]
        assert found[0].device_prefix_len == found[1].device_prefix_len, (self.said, tokens)
        deltas = []
        for side, result in zip((self.theirs, self.ours), found, strict=True):
            node = result.last_device_node
            locked = side.cache.inc_lock_ref(node)
            deltas.append((locked.delta, side.sizes()))
            deltas.append((side.cache.dec_lock_ref(node, locked.to_dec_params()).delta, ()))
        assert deltas[:2] == deltas[2:], (self.scene, deltas)

    def reset(self) -> None:
        if self.computed or self.rng.random() < 0.7:
            return
        for side in (self.theirs, self.ours):
            side.cache.reset()
            side.allocator.clear()

    def step(self) -> None:
        """Make one random call and compare everything."""
        verbs = (self.start, self.start, self.advance, self.advance, self.advance, self.leave)
        self.rng.choice((*verbs, self.look, self.reset))()
        if not self.scene.ruled and self.rng.random() < 0.1:
            gone = self.theirs.evict(wanted := self.rng.randrange(1, 20))
            self.said.append(f"evict {wanted}")
            assert self.ours.evict(gone) == gone
        self.compare()

    def compare(self) -> None:
        """Compare sizes, events, the owners of pages, and the trees page by page."""
        sides = (self.theirs, self.ours)
        for side in sides:
            side.check()
        text = f"{self.scene} after {len(self.said)} calls: {self.said[-3:]}"
        contents = theirs_content(self.theirs.cache), ours_content(self.ours.cache)
        only = [sorted(map(str, contents[i].keys() - contents[1 - i].keys())) for i in (0, 1)]
        assert only == [[], []], f"{text}: cached on one side only: {only}"
        assert contents[0] == contents[1], f"{text}: locked on one side only"
        assert self.theirs.sizes() == self.ours.sizes(), text
        told = [as_told(side.cache.take_events()) for side in sides]
        assert told[0] == told[1], f"{text}: {told}"


def as_told(events: list[Any]) -> list[Any]:
    """Return events; sort the pages that left together, because SGLang evicts by leaves."""
    found: list[Any] = []
    for event in events:
        kind = type(event).__name__
        if kind == "BlockRemoved":
            found.append((kind, sorted(event.block_hashes), event.medium))
        else:
            found.append((kind, str(event)))
    return found
