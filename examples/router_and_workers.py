# SPDX-License-Identifier: Apache-2.0
"""Three workers, each with its own cache, and a router with an index of the cached pages.

Each worker is a process with a manager, and publishes its cache events over ZeroMQ. The router
applies the events to its index. By default it sends each turn of a chat to the worker with the best
score: many cached tokens and a low load. The workers run no model here. The example only counts the
cached tokens, which a model would not compute again.

    python examples/router_and_workers.py                        # prefix+load
    python examples/router_and_workers.py --policy round-robin
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvcore import KVCacheParams, PagedKVCacheManager
from kvcore.context import TextGenerationContext
from kvcore.events import EventPublisher, EventSubscriber
from kvcore.keys import page_keys
from kvcore.routing import POLICIES, PrefixIndex, Router

PARAMS = KVCacheParams(
    "float32", n_kv_heads=2, head_dim=8, num_layers=2, page_size=4, enable_prefix_caching=True
)
WORKERS = ("w0", "w1", "w2")
SYSTEM = list(range(16))
GENERATING = 5  # maximum number of running requests


def work(link: Any) -> None:
    """Serve prompts; for each prompt, send the number of its cached tokens to the router."""
    manager = PagedKVCacheManager(PARAMS, 4, 512, num_pages=256, blocks=None, events=True)
    with EventPublisher(manager, "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*") as out:
        link.send((out.endpoints[0], out.replay_endpoints[0], manager.fingerprint))
        while (prompt := link.recv()) is not None:
            context = TextGenerationContext("request", prompt)
            manager.claim("request")
            manager.fetch([context])
            cached = context.start_idx
            context.update(0)
            manager.step([context])
            manager.release("request")
            out.flush(5.0)
            link.send(cached)


class Worker:
    """The router's handle of a worker process."""

    def __init__(self, link: Any, process: Any) -> None:
        self.link, self.process = link, process
        endpoint, replay, self.fingerprint = link.recv()
        self.events = EventSubscriber(endpoint, replay_endpoint=replay)

    def serve(self, prompt: list[int]) -> int:
        """Run a prompt on the worker; return the number of its cached tokens."""
        self.link.send(prompt)
        return int(self.link.recv())


@contextmanager
def started() -> Iterator[Worker]:
    """Run a worker process until the end of the block."""
    start = multiprocessing.get_context("spawn")
    link, other = start.Pipe()
    process = start.Process(target=work, args=(other,), daemon=True)
    process.start()
    try:
        worker = Worker(link, process)
        with worker.events:
            yield worker
        link.send(None)
        process.join(30)
    finally:
        process.kill()
        process.join()
        link.close()


def chats(count: int, turns: int) -> Iterator[list[int]]:
    """Yield the prompts of chats with the same system prompt, turn by turn."""
    said = [[*SYSTEM, *range(100 * i + 100, 100 * i + 124)] for i in range(count)]
    for turn in range(turns):
        for i, tokens in enumerate(said):
            yield list(tokens)
            tokens += [1000 * turn + i] * 12


def main() -> None:
    """Route some chats; print the share of cached tokens and the number of prompts per worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", choices=POLICIES, default="prefix+load")
    options = parser.parse_args()
    index = PrefixIndex(WORKERS)
    router = Router(index, options.policy, prefix_weight=4.0)
    served = dict.fromkeys(WORKERS, 0)
    tokens = cached = 0
    running: deque[int] = deque()
    with ExitStack() as stack:
        workers = {name: stack.enter_context(started()) for name in WORKERS}
        seed = workers[WORKERS[0]].fingerprint  # same model, so same keys on all workers
        for number, prompt in enumerate(chats(count=7, turns=4)):
            for name, worker in workers.items():
                for batch in worker.events.receive(timeout=0.05):
                    index.apply(name, batch)
            keys = page_keys(prompt, PARAMS.page_size, seed=seed)
            chosen = str(router.choose(number, keys))
            found = workers[chosen].serve(prompt)
            running.append(number)  # the last few requests still generate
            if len(running) > GENERATING:
                router.finish(running.popleft())
            served[chosen] += 1
            tokens += len(prompt)
            cached += found
    print(f"{options.policy}: {cached / tokens:.0%} of {tokens} tokens were cached; {served}")


if __name__ == "__main__":
    main()
