# SPDX-License-Identifier: Apache-2.0
"""Known mistakes in the native modules: claims, batches, steps, forks, buffers, arguments."""

from __future__ import annotations

from mutant import NATIVE, Mutant

__all__ = ["CYTHON"]

CYTHON = (
    Mutant(
        "a claim that fails keeps its id",
        NATIVE + "engine/claims.pxi",
        "            self.drop(claim)\n            if isinstance(error, CapacityError):\n",
        "            if isinstance(error, CapacityError):\n",
        "tests/python/cache/test_replicas.py::test_each_replica_takes_its_share_of_the_batch",
    ),
    Mutant(
        "a context uses the claim of a later request",
        NATIVE + "engine/claims.pxi",
        "        and slots[sequence.index].generation == sequence.generation\n",
        "        and slots[sequence.index].generation != 0\n",
        "tests/python/cache/test_fetch_buffers.py"
        "::test_batch_list_is_read_again_when_its_contexts_have_changed",
    ),
    Mutant(
        "a claim that has ended keeps its context",
        NATIVE + "engine/claims.pxi",
        "        claim.context = None\n        return 0  # the context",
        "        return 0  # the context",
        "tests/python/request/test_recorded_contexts.py::test_a_released_request_holds_no_context",
    ),
    Mutant(
        "a batch is known after its contexts have changed",
        NATIVE + "engine/batches.pxi",
        "        return self.last_epoch == contexts_epoch and self.is_as_read(batch, last)\n",
        "        return self.is_as_read(batch, last)\n",
        "tests/python/cache/test_fetch_buffers.py"
        "::test_batch_list_is_read_again_when_its_contexts_have_changed",
    ),
    Mutant(
        "a batch that is reserved in part records all of its contexts",
        NATIVE + "engine/reservations.pxi",
        "    reader.record(&requests, contexts, call.done)\n",
        "    reader.record(&requests, contexts, call.n)\n",
        "tests/python/request/test_recorded_contexts.py"
        "::test_refused_and_pure_calls_do_not_replace_the_context",
    ),
    Mutant(
        "the pages that must fit are kept free",
        NATIVE + "engine/reservations.pxi",
        'options.must_fit = as_count(must_fit, "must_fit")',
        'options.keep_free = as_count(must_fit, "must_fit")',
        "tests/python/cache/test_reserve_options.py"
        "::test_room_that_must_be_counts_for_the_quota_of_its_tenant",
    ),
    Mutant(
        "a fork that fails keeps the ids of its children",
        NATIVE + "engine/forks.pxi",
        "            for claim in claims:\n                self.table.drop(claim)\n",
        "",
        "tests/python/request/test_fork_refusals.py::test_error_leaves_no_trace",
    ),
    Mutant(
        "a fork that fails leaves the position of its children",
        NATIVE + "engine/forks.pxi",
        "                requests.rows[i].start = requests.given[i].start\n",
        "",
        "tests/python/request/test_fork_refusals.py"
        "::test_a_fork_that_fails_moves_its_other_children_back",
    ),
    Mutant(
        "a fetch that fails keeps its buffers",
        NATIVE + "engine/steps.pxi",
        "    finally:\n        for buffer in taken:\n            buffer.busy = False\n",
        "    except RuntimeError:\n        raise\n    for buffer in taken:\n"
        "        buffer.busy = False\n",
        "tests/python/cache/test_fetch_buffers.py::test_failed_fetch_keeps_no_buffer",
    ),
    Mutant(
        "a table that the caller holds is written again",
        NATIVE + "engine/fetch_buffers.pxi",
        "    return Py_REFCNT(base) == 2 and Py_REFCNT(last) == 1\n",
        "    return Py_REFCNT(base) == 2\n",
        "tests/python/cache/test_fetch_buffers.py"
        "::test_every_fetch_of_a_growing_request_can_be_kept",
    ),
    Mutant(
        "later steps of a fetch have the lengths of the first",
        NATIVE + "engine/fetch_buffers.pxi",
        "data[2 * k + 1] = <uint32_t>(longest_active + k)",
        "data[2 * k + 1] = <uint32_t>longest_active",
        "tests/python/cache/test_paged_manager.py::test_empty_batch",
    ),
    Mutant(
        "a copy that fails is reported as done",
        NATIVE + "engine/settler.pxi",
        "            self.native.finish(transfers.ticket, False)\n",
        "            self.native.finish(transfers.ticket, True)\n",
        "tests/faults/test_failing_transfers.py::test_failed_copy_is_done_again",
    ),
    Mutant(
        "a request whose copy fails stays at its hit",
        NATIVE + "engine/settler.pxi",
        "        request.start = before.start\n",
        "",
        "tests/faults/test_failing_transfers.py::test_failed_copy_is_done_again",
    ),
    Mutant(
        "a closed manager answers",
        NATIVE + "engine/step_engine.pxi",
        "self._is_closed, self._is_made, self._is_alone = True, False, False",
        "self._is_closed, self._is_made, self._is_alone = True, True, False",
        "tests/python/stores/test_tier_writes.py::test_close_flushes_and_ends_everything",
    ),
    Mutant(
        "tokens of int64 wrap around",
        NATIVE + "contexts/arguments.pxi",
        "        if source[i] < INT32_LOW or source[i] > INT32_HIGH:\n",
        "        if source[i] < INT32_LOW:\n",
        "tests/python/request/test_context.py::test_bad_tokens_are_refused",
    ),
    Mutant(
        "a rewound context writes into tokens that it has returned",
        NATIVE + "contexts/text_generation.pxi",
        "        if Py_REFCNT(<PyObject*>self._buffer) > 1:\n",
        "        if Py_REFCNT(<PyObject*>self._buffer) > 2:\n",
        "tests/python/request/test_context.py"
        "::test_snapshots_stay_valid_when_the_context_is_rewound_and_overwritten",
    ),
    Mutant(
        "a rewound context runs no token again",
        NATIVE + "contexts/text_generation.pxi",
        "min(self._request.start, end - 1)",
        "min(self._request.start, end)",
        "tests/python/request/test_context.py::test_rewind_cuts_the_tokens",
    ),
    Mutant(
        "a rewound context keeps the extra keys of the tokens it lost",
        NATIVE + "contexts/text_generation.pxi",
        "        if self._keys is not None:\n            self._keys.cut(end)\n",
        "",
        "tests/python/request/test_extra_keys.py::test_rewind_drops_the_keys_behind",
    ),
    Mutant(
        "an insert keeps the place where it began",
        NATIVE + "tree/prefix_tree.pxi",
        "            self._native.unpin(base, False)\n",
        "            pass\n",
        "tests/python/tree/test_tree_forget.py::test_random_calls_agree_with_dicts",
    ),
    Mutant(
        "a handle that is destroyed keeps its last pin",
        NATIVE + "tree/prefix_handle.pxi",
        "        while self._pins > 0:\n            self._unpin()\n",
        "        while self._pins > 1:\n            self._unpin()\n",
        "tests/python/tree/test_building_blocks.py::test_dropped_handle_lets_go_and_keeps_its_tree",
    ),
    Mutant(
        "a release ignores the hint of its context",
        "python/kvcore/native/engine/step_engine.pxi",
        "            returns = return_of(claim.context)\n",
        "            returns = UNKNOWN\n",
        "tests/python/tree/test_hints.py",
    ),
    Mutant(
        "another prompt with the id of a request goes on with the request",
        "python/kvcore/native/engine/claims.pxi",
        "    return are_equal(prompt_of(view.tokens, end), ended.prompt)\n",
        "    return True\n",
        "tests/python/observe/test_prompt_counts.py",
    ),
)
