# SPDX-License-Identifier: Apache-2.0
"""What runs per request and per step, in Cython: Python objects in, calls of C++ out.

Modules need only those named before them: ``tensors`` of torch; ``arguments``; ``extra_keys`` of
tokens, ``contexts`` of requests, ``foreign`` objects like them, ``packing`` of their tokens,
``inputs`` of kernels, the ``prefix_tree`` by itself, with ``tree_tokens``, ``tree_runs`` and the
``prefix_handle``; ``claims`` of request ids; ``batches`` of contexts; the ``settler`` of copies,
with the one loop that attempts a call again; what verbs do: ``prefixes``, ``reservations``,
``forks`` and ``steps``; and the ``engine``, whose parts all of them are.
``cache_events`` are what a manager's caches tell, and the ``prefix_index`` what workers hold.
"""
