# SPDX-License-Identifier: Apache-2.0
"""Known mistakes in the Python facade, from `support` to `apps`."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["PYTHON"]

KVCORE = "python/kvcore/"

PYTHON = (
    Mutant(
        "append writes over the first tokens",
        KVCORE + "ops/paging.py",
        "    _write(pools, pools.cache_lengths, k, v, row_offsets, scale, stream, threads)\n",
        "    _write(pools, None, k, v, row_offsets, scale, stream, threads)\n",
        "tests/python/ops/test_ops_paging.py"
        "::test_append_writes_the_new_positions_and_nothing_else",
    ),
    Mutant(
        "attention reads beyond the window of its layer",
        KVCORE + "ops/attention.py",
        "    if pools.window is not None or pools.chunk is not None:\n",
        "    if pools.chunk is not None:\n",
        "tests/python/ops/test_attention_groups.py::test_prompts_in_chunks_then_tokens_one_by_one",
    ),
    Mutant(
        "a column has pages of the smallest size only",
        KVCORE + "layers/layer_map.py",
        "tuple(tokens // bundle.page_size for bundle in bundles(params))",
        "tuple(tokens // params.page_size for bundle in bundles(params))",
        "tests/python/layers/test_groups_tables.py"
        "::test_tables_count_pages_of_their_own_size_and_hits_the_largest",
    ),
    Mutant(
        "a layer that reads the rows of another has no owner",
        KVCORE + "layers/layer_map.py",
        "self._places[owner]._replace(owner=owner)",
        "self._places[owner]",
        "tests/python/layers/test_groups_tables.py"
        "::test_a_layer_that_reads_those_of_another_reads_them_alone",
    ),
    Mutant(
        "a sequence has no page for its last tokens",
        KVCORE + "sizing.py",
        "        return -(-tokens // params.page_size)\n",
        "        return tokens // params.page_size\n",
        "tests/python/layers/test_params.py::test_estimated_memory_size",
    ),
    Mutant(
        "the pools of a replica overlap the pools of the next",
        KVCORE + "pools.py",
        "shards[r * tp : (r + 1) * tp]",
        "shards[r : r + tp]",
        "tests/python/cache/test_replicas.py::test_inputs_have_the_pools_of_their_devices",
    ),
    Mutant(
        "pages of several layouts are copied in part",
        KVCORE + "pools.py",
        "        whole[:, 3] = self._page_size\n",
        "",
        "tests/python/layers/test_groups_sharing.py"
        "::test_a_prefix_is_shared_where_every_bundle_that_is_still_read_shares_it",
    ),
    Mutant(
        "the ceiling of a tenant is that of one replica",
        KVCORE + "metrics.py",
        "None if most is None else most * len(found)",
        "most",
        "tests/python/request/test_tenants.py::test_quotas_are_those_of_each_replica",
    ),
    Mutant(
        "held pages that are cached are not exported",
        KVCORE + "metrics.py",
        "held = stats.total_pages - free - stats.evictable_pages",
        "held = stats.total_pages - free - stats.cached_pages",
        "tests/python/observe/test_dashboard.py"
        "::test_pages_that_requests_hold_are_exported_whether_they_are_cached_or_not",
    ),
    Mutant(
        "the oldest request is preempted",
        KVCORE + "scheduler.py",
        "max(rivals(holders, running[fitting], self._manager.quotas), key=_rank)",
        "min(rivals(holders, running[fitting], self._manager.quotas), key=_rank)",
        "tests/python/scheduler/test_scheduler.py"
        "::test_the_latest_goes_and_comes_back_with_the_same_tokens",
    ),
    Mutant(
        "a request that fills a hole keeps its row",
        KVCORE + "scheduler.py",
        "                self.decodes[request.row], last.row = last, request.row\n",
        "                self.decodes[request.row] = last\n",
        "tests/python/scheduler/test_scheduler.py"
        "::test_prompts_run_in_chunks_within_the_budget_of_a_step",
    ),
    Mutant(
        "the checksum of a file leaves out its tensors",
        KVCORE + "snapshots/format.py",
        "json_text({**header, _METADATA: metadata}).encode()",
        "json_text(metadata).encode()",
        "tests/python/snapshots/test_moved_files.py"
        "::test_the_checksum_of_the_header_is_of_all_its_entries",
    ),
    Mutant(
        "a saved request has lost its salt",
        KVCORE + "snapshots/request.py",
        '        cache_salt=getattr(context, "cache_salt", None),\n',
        "        cache_salt=None,\n",
        "tests/python/snapshots/test_moved_requests.py"
        "::test_whole_pages_are_found_by_others_afterwards",
    ),
    Mutant(
        "a page that is read does not stay longer",
        KVCORE + "stores/memory.py",
        "        self._pages.move_to_end(key)\n",
        "",
        "tests/python/stores/test_stores.py"
        "::test_forgets_what_is_removed_and_what_was_used_least_recently",
    ),
    Mutant(
        "a store whose trial fails is tried no more",
        KVCORE + "stores/breaker.py",
        "            self._trying = False\n            if self._failures",
        "            if self._failures",
        "tests/faults/test_tier_faults.py::test_a_store_that_fails_is_left_alone_and_tried_again",
    ),
    Mutant(
        "a step is checked against the run of an earlier request",
        KVCORE + "support/step_order.py",
        "runs if runs is not None and runs.generation == generation else None",
        "runs",
        "tests/python/cache/test_step_order.py::test_runs_of_an_earlier_request_do_not_count",
    ),
    Mutant(
        "numbers below a narrow dtype become infinite",
        KVCORE + "support/dtypes.py",
        "min(max(value, -largest), largest)",
        "min(value, largest)",
        "tests/python/max/test_view_elements.py::test_values_are_stored_to_the_nearest",
    ),
    Mutant(
        "keys of a cut context count extra keys after its end",
        KVCORE + "keys.py",
        "        extra_keys = [key for key in extra_keys or () if key[0] < end]\n",
        "",
        "tests/python/request/test_keys.py::test_an_object_of_the_callers_has_keys_too",
    ),
    Mutant(
        "a batch of events is applied twice",
        KVCORE + "routing.py",
        "            if number < feed.next or number in feed.early:\n",
        "            if number in feed.early:\n",
        "tests/python/routing/test_prefix_index.py::test_events_count_once_and_in_their_order",
    ),
    Mutant(
        "the first of equal workers is always chosen",
        KVCORE + "routing.py",
        "            self._chosen_at[place] = self._times\n",
        "",
        "tests/python/routing/test_prefix_index.py"
        "::test_policies_weigh_what_is_there_and_what_runs",
    ),
    Mutant(
        "a replay leaves out the batch that was asked for",
        KVCORE + "observe/publisher.py",
        "                if number >= first:\n",
        "                if number > first:\n",
        "tests/python/observe/test_event_publisher.py::test_the_frames_as_others_read_them",
    ),
    Mutant(
        "a forked child seems to publish",
        KVCORE + "observe/publisher.py",
        "return not self._is_forked and not self._is_stopping and len(self._threads) > 0",
        "return not self._is_stopping and len(self._threads) > 0",
        "tests/python/observe/test_event_publisher.py::test_a_forked_child_has_none",
    ),
    Mutant(
        "a bound serves requests that the model refuses",
        KVCORE + "apps/replay/comparison.py",
        ", replicas=pool.replicas, served=served)",
        ", replicas=pool.replicas)",
        "tests/integrations/test_replay_model.py"
        "::test_the_bound_refuses_the_requests_that_a_model_refuses",
    ),
    Mutant(
        "a session does not wait for its sub-agents",
        KVCORE + "apps/traces/sessions.py",
        "            agent.wait_for(child)\n",
        "",
        "tests/python/apps/test_sub_agents.py::test_a_parent_waits_for_its_sub_agents",
    ),
)
