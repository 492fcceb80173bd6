# SPDX-License-Identifier: Apache-2.0
"""A scheduler in one process, the pool and the model in another: only page ids are sent.

The scheduler's manager has ``blocks=None``: it has page ids and no memory. For each step, the
scheduler sends inputs, tokens and pending page copies. The worker adds its pool to the inputs, runs
the model and returns a token for each request. The code is the same for one machine and for two.

    python examples/scheduler_and_worker.py          # a pipe of multiprocessing
    python examples/scheduler_and_worker.py --zmq    # a socket of pyzmq
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from kvcore import KVCacheParams, PagedKVCacheManager, RaggedKVCacheInputs, ops
from kvcore.context import TextGenerationContext
from kvcore.pools import shard_shapes
from kvcore.scheduler import Request, Scheduler

VOCABULARY = 64
PARAMS = KVCacheParams(
    "float32", n_kv_heads=2, head_dim=8, num_layers=2, page_size=4, enable_prefix_caching=True
)
NUM_PAGES = 24


class Step(NamedTuple):
    """The message from the scheduler to a worker for one step."""

    inputs: RaggedKVCacheInputs  # without a pool
    copies: Any  # int32 [n, 4]: replica, source page, destination page, tokens
    packed: Any  # tokens, positions, row offsets, last rows
    rows: Any  # rows that need logits of their last token


class Model:
    """Two layers of attention with random weights, equal in every process."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        width = PARAMS.n_kv_heads * PARAMS.head_dim
        self.embedding = random.standard_normal((VOCABULARY, width)).astype(np.float32)
        self.weights = random.standard_normal((PARAMS.num_layers, 3, width, width)) / width**0.5

    def __call__(self, inputs: RaggedKVCacheInputs, packed: Any, rows: Any) -> Any:
        """Return a token for each of `rows`."""
        x = self.embedding[packed.tokens] + np.sin(packed.positions[:, None] / 9.0)
        shape = (len(x), PARAMS.n_kv_heads, PARAMS.head_dim)
        for layer, weights in enumerate(self.weights):
            q, k, v = ((x @ w).astype(np.float32).reshape(shape) for w in weights)
            ops.append(inputs, layer, k, v, packed.row_offsets)
            x = x + ops.attention(inputs, layer, q, packed.row_offsets).reshape(x.shape)
        return (x[packed.last_rows[rows]] @ self.embedding.T).argmax(axis=1)


def work(link: Any) -> None:
    """Own the pool, and run each received step until None is received."""
    (shape,) = shard_shapes(PARAMS, NUM_PAGES)
    pool, model = np.zeros(shape, np.float32), Model()
    while (step := link.recv()) is not None:
        for _, source, target, tokens in step.copies.tolist():  # in this order, before the kernels
            pool[target, :, :, :tokens] = pool[source, :, :, :tokens]
        link.send(model(step.inputs.with_pool(pool), step.packed, step.rows))


def serve(link: Any, prompts: list[list[int]], limit: int) -> list[list[int]]:
    """Schedule the prompts; the worker returns the tokens over the link."""
    manager = PagedKVCacheManager(PARAMS, 8, 64, num_pages=NUM_PAGES, blocks=None)
    scheduler = Scheduler(manager, max_batch_tokens=16)
    for name, prompt in enumerate(prompts):
        scheduler.add(Request(TextGenerationContext(name, prompt), limit))
    answers: list[list[int]] = [[] for _ in prompts]
    while batch := scheduler.next_batch():
        (inputs,) = batch.inputs
        link.send(Step(inputs, batch.copies, ops.pack(inputs, batch.contexts), batch.rows))
        for request in scheduler.update(batch, link.recv()):
            context = request.context
            answers[context.request_id] = context.tokens[request.num_prompt :].tolist()
    link.send(None)
    return answers


# ---- links -------------------------------------------------------------------------------------


class ZmqLink:
    """One end of a pair of pyzmq sockets, with the methods of a pipe connection."""

    def __init__(self, endpoint: str, *, binds: bool) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 64 << 20)  # more than the page tables of a batch
        (self._socket.bind if binds else self._socket.connect)(endpoint)

    def send(self, message: Any) -> None:
        """Send a pickled message; use it only between processes that trust each other."""
        self._socket.send_pyobj(message)

    def recv(self) -> Any:
        """Wait for a message and return it."""
        return self._socket.recv_pyobj()

    def close(self) -> None:
        """Send the remaining messages and close the socket."""
        self._socket.close()
        self._context.term()


def work_over_zmq(endpoint: str) -> None:
    """Run a worker that connects to its scheduler."""
    link = ZmqLink(endpoint, binds=False)
    work(link)
    link.close()


@contextmanager
def worker(*, zmq: bool) -> Iterator[Any]:
    """Start a worker process; yield the scheduler's end of the link."""
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        if zmq:
            endpoint = f"ipc://{folder}/link"
            link: Any = ZmqLink(endpoint, binds=True)
            process = start.Process(target=work_over_zmq, args=(endpoint,), daemon=True)
        else:
            link, other = start.Pipe()
            process = start.Process(target=work, args=(other,), daemon=True)
        process.start()
        try:
            yield link
            process.join(30)
        finally:
            process.kill()
            process.join()
            link.close()


def main() -> None:
    """Serve a few prompts with the same beginning, and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zmq", action="store_true", help="talk over pyzmq")
    options = parser.parse_args()
    system = list(range(10))
    prompts = [[*system, 20 + n, 30 + n] for n in range(6)]
    with worker(zmq=options.zmq) as link:
        for prompt, answer in zip(prompts, serve(link, prompts, limit=8), strict=True):
            print(f"{prompt} -> {answer}")


if __name__ == "__main__":
    main()
