# SPDX-License-Identifier: Apache-2.0
"""Three workers with caches of their own, and a router that hears what each of them has.

Each worker is a process with a manager, and publishes its events over ZeroMQ. The router feeds an
index with them and sends each turn of a chat where most of it is cached, beside what else runs. The
workers run no model here: what counts is which tokens they would not have to compute.

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
GENERATING = 5  # requests at a time


def work(link: Any) -> None:
    """Serve prompts; say of each how many of its tokens were cached."""
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
    """A worker's process as the router sees it."""

    def __init__(self, link: Any, process: Any) -> None:
        self.link, self.process = link, process
        endpoint, replay, self.fingerprint = link.recv()
        self.events = EventSubscriber(endpoint, replay_endpoint=replay)

    def serve(self, prompt: list[int]) -> int:
        """Have a prompt run; return the tokens that were cached."""
        self.link.send(prompt)
        return int(self.link.recv())


@contextmanager
def started() -> Iterator[Worker]:
    """Run a worker until the end of the block."""
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
    """Yield the prompts of chats that begin alike, turn by turn."""
    said = [[*SYSTEM, *range(100 * i + 100, 100 * i + 124)] for i in range(count)]
    for turn in range(turns):
        for i, tokens in enumerate(said):
            yield list(tokens)
            tokens += [1000 * turn + i] * 12


def main() -> None:
    """Route some chats, and print what each worker had of them."""
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
        seed = workers[WORKERS[0]].fingerprint  # the same model, so the same keys everywhere
        for number, prompt in enumerate(chats(count=7, turns=4)):
            for name, worker in workers.items():
                for batch in worker.events.receive(timeout=0.05):
                    index.apply(name, batch)
            keys = page_keys(prompt, PARAMS.page_size, seed=seed)
            chosen = str(router.choose(number, keys))
            found = workers[chosen].serve(prompt)
            running.append(number)  # those that came last generate still
            if len(running) > GENERATING:
                router.finish(running.popleft())
            served[chosen] += 1
            tokens += len(prompt)
            cached += found
    print(f"{options.policy}: {cached / tokens:.0%} of {tokens} tokens were cached; {served}")


if __name__ == "__main__":
    main()
