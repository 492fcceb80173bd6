// SPDX-License-Identifier: Apache-2.0
// What help() and the API reference say of CacheManager. A first line `name(self, arguments)` and
// `--` is what Python shows as the signature.
#pragma once

namespace kvcore::python::docs {

constexpr const char* kManager =
    R"(Keep the books of pages for sequences: ids only, one sequence per call.

What ``kvcore.PagedKVCacheManager`` is built on, for engines that bring their own contexts
and pool.

Parameters
----------
num_blocks : int
    Pages of each replica.
page_size : int
    Tokens per page.
max_sequences : int
    Sequences claimed at a time, in each replica.
max_seq_len : int
    Tokens of the longest sequence.
num_replicas : int
prefix_caching, dedup : bool
partial_page_reuse : int
    As for PagedKVCacheManager.
host_pages : int
    Pages of each replica's host tier, 0 for none. Only PagedKVCacheManager moves their bytes:
    with a tier, ``reserve`` and ``commit`` of this class are a ValueError.
eviction : str or kvcore.policies.EvictionPolicy
    Which cached pages go first when memory is full.
groups : list of (kind, span, bundles, page_size)
    Layers that do not all keep every token: kind is "full", "sliding" or "chunked", span the tokens
    of the window or chunk, page_size divides that of the manager. None by default.
reserve_chunks : bool
max_draft_tokens : int
    As for PagedKVCacheManager.
quotas : list of (reserved_pages, max_pages)
    Of tenants, which are their numbers here; max_pages is None for no ceiling.
states : list of int
    For each group of layers with a state the tokens between its checkpoints; 0: none but at ends of
    prompts and at branches.
num_states : int
    Slots of states of each replica, at least max_sequences where there are such groups.
num_host_states : int
    Slots of the host tier of each replica for checkpoints of states.
write_policy : {"write_through", "write_through_selective", "write_back"}
    When a cached page goes to the host tier.
write_threshold : int
    With "write_through_selective": once it was used so often, 1 .. 255.
host_eviction : str or kvcore.policies.EvictionPolicy
    Which pages of the host tier go first when it is full.
host_min_priority : int
    With ``eviction="priority"``: of a prefix no page goes there from the first of a lower priority on.
has_stores : bool
    What arrives in the host tier has keys and waits to be written to stores below it.
key_seed : bytes
    Of these keys, one item of canonical CBOR; empty for none.
stand_ins : capsule, optional
    The names of tokens with extra keys.
event_pages : int
    Pages of which events wait to be taken, at most; 0 for no events.
first_page : int
    Where page ids begin.
keep_windows : bool
    ``step`` gives back no page that a window has passed; ``leave_windows`` does.

Raises
------
ValueError, TypeError
    A size below 1, or no such policy.

Notes
-----
Thread-safe: any number of threads may call any method. A call that raises or returns "no" has
changed nothing. Wherever tokens are passed they are a list of int or an int32 or int64 array.

Examples
--------
>>> from kvcore import CacheManager
>>> manager = CacheManager(num_blocks=8, page_size=2, max_sequences=4, max_seq_len=16)
>>> sequence = manager.claim()
>>> manager.reserve(sequence, [5, 6, 7])  # fits, start, active
(True, 0, 3)
>>> len(manager.commit(sequence, [5, 6, 7], written=3)), manager.match([5, 6, 7])[0]
(0, 2))";

constexpr const char* kClaim = R"(claim(self, replica=0)
--

Register a sequence; takes no pages.

Returns
-------
SequenceHandle
    Names the sequence until it is released, and nothing afterwards.

Raises
------
IndexError
    No such replica.
CapacityError
    The replica has `max_sequences` sequences.)";

constexpr const char* kContains = R"(contains(self, sequence)
--

Tell whether a sequence is claimed now.)";

constexpr const char* kReplicaOf = R"(replica_of(self, sequence)
--

Return the index of a sequence's replica; RequestNotFoundError when it is not claimed.)";

constexpr const char* kPagesOf = R"(pages_of(self, sequence, bundle=0, first=0)
--

Return a sequence's page ids in logical order, of a bundle where there are groups.

Parameters
----------
first : int
    From this page on, as what a reservation has added.

Returns
-------
int32 [pages - first]
    Empty where there are no more. -1 stands for a page that no layer of the bundle reads any more,
    or that is not reserved yet.

Raises
------
ValueError
    `first` is below 0.
RequestNotFoundError, IndexError)";

constexpr const char* kGroupStats = R"(group_stats(self, replica=0)
--

Return the GroupStats of each group of a replica, in their order; none without groups. O(pages).)";

constexpr const char* kSetTenant = R"(set_tenant(self, sequence, tenant)
--

Have the pages that a sequence takes from now on count for a tenant: one of ``quotas``, or None.)";

constexpr const char* kTenantStats = R"(tenant_stats(self, replica=0)
--

Return the TenantStats of each quota of a replica, in their order; none without quotas. O(tenants).)";

constexpr const char* kRelease = R"(release(self, sequence)
--

Forget a sequence: committed pages stay cached; RequestNotFoundError when it is not claimed.)";

constexpr const char* kReserve =
    R"(reserve(self, sequence, tokens, start=0, *, active=None, num_steps=1, extra_key=None, cache_salt=None, max_hit=None, keep_free=0, must_fit=None)
--

Reuse the cached prefix of a sequence and allocate the pages that its next steps need.

Parameters
----------
sequence : SequenceHandle
tokens : list of int, or array int32 or int64 [n]
    All tokens of the sequence.
start, active : int
    ``tokens[start:active]`` run next; `active` is n unless given.
num_steps : int
    Steps before the next reservation.
extra_key, cache_salt : str, optional
    Prefix-cache namespace.
max_hit : int, optional
    The sequence has so many tokens of the cache at most, or what it had before; 0: none.
keep_free : int
    Pages of the replica that are free or evictable afterwards.
must_fit : int, optional
    Beside `keep_free` there is room for the sequence with so many tokens, of which it gets no page
    by that.

Returns
-------
fits : bool
    False when there are not enough pages; nothing has changed, and nothing was evicted.
start, active : int
    Where the sequence stands now: behind the prefix found.

Raises
------
CapacityError
    The sequence, or what must fit, can never fit.
ValueError
    An option below 0, and what else is wrong with the arguments.
RequestNotFoundError)";

constexpr const char* kPlan =
    R"(plan(self, sequence, tokens, start=0, *, active=None, num_steps=1, extra_key=None, cache_salt=None, max_hit=None, keep_free=0, must_fit=None)
--

Tell what ``reserve`` would do now; changes nothing.

Returns
-------
ReservePlan
    With the fields of ``kvcore.ReservePlan``.)";

constexpr const char* kCommit = R"(commit(self, sequence, tokens, written)
--

Put the pages whose tokens are all written into the prefix cache.

Parameters
----------
sequence : SequenceHandle
tokens : list of int, or array int32 or int64 [n]
written : int
    Tokens whose K and V are written, ``0 .. n``.

Returns
-------
int32 [swaps, 2]
    Pages swapped for equal cached ones: column, page.

Raises
------
ValueError
    More tokens than the sequence's pages hold, or than there are.
RequestNotFoundError)";

constexpr const char* kMatch =
    R"(match(self, tokens, replica=0, extra_key=None, cache_salt=None, *, touch=False)
--

Find the cached whole pages of a prefix; changes nothing unless it is to touch.

Parameters
----------
touch : bool
    It is a use of these pages, by which they are evicted later.

Returns
-------
num_tokens : int
pages : int32 [num_tokens / page_size])";

constexpr const char* kPin = R"(pin(self, tokens, replica=0, extra_key=None, cache_salt=None)
--

Keep the cached whole pages of a prefix from eviction until unpinned.

Returns
-------
PinHandle
    Its ``num_tokens`` are kept.)";

constexpr const char* kUnpin = R"(unpin(self, pin)
--

Let pinned pages go; InvalidHandleError when that was done before.)";

constexpr const char* kForget = R"(forget(self, pages, replica=0)
--

Take cached pages out of the cache whose contents are wrong, say of a load that failed.

Parameters
----------
pages : list of int, or array int32 or int64 [n]
    Ids, of any bundle. Those of free pages are passed over.

Returns
-------
int
    Pages that left: these, and what was cached behind them. Sequences, pins and holds keep theirs;
    a sequence commits nothing from the first of them on. Costs O(cached pages + sequences).

Raises
------
InvalidHandleError
    An id that is no page's; nothing has changed.
IndexError, TypeError, ValueError)";

constexpr const char* kNextPages = R"(next_pages(self, replica=0)
--

List the pages that can be had, in the order in which sequences would be given them.

Returns
-------
int32 [n]
    Free pages, then cached ones as they would be evicted now.

Raises
------
ValueError
    With groups of layers, and with quotas, where it depends on who asks for how many.
IndexError

Notes
-----
For tests, and for looking at a cache; changes nothing. Exact with ``"lru"``; other policies may
have a run wait that another one follows now, which is listed right behind that one. Costs O(pages).)";

constexpr const char* kHold = R"(hold(self, pages, replica=0)
--

Keep pages from being evicted, or handed out to anybody else, whoever releases them.

Parameters
----------
pages : list of int, or array int32 or int64 [n]
    Ids of pages that sequences hold or that are cached, with groups of any bundle: all pages of the
    same tokens are held then.

Returns
-------
HeldPages
    Holds nest. Costs O(pages), and O(cached pages) to find them.

Raises
------
InvalidHandleError
    An id that is no page's, or a free page's; nothing has changed.
CapacityError
    The quotas of tenants leave no room for cached pages to be held.
IndexError, TypeError, ValueError)";

constexpr const char* kHeldPages = R"(Pages that CacheManager.hold keeps as they are.

Dropping it lets them go.)";

constexpr const char* kLetGo = R"(let_go(self)
--

Let the pages go; InvalidHandleError when that was done before.)";

constexpr const char* kTakeCopies = R"(take_copies(self)
--

Hand out the page copies owed since the last call, to be done before the next kernels run.

Returns
-------
int32 [n, 4]
    Replica, source page, destination page, tokens.)";

constexpr const char* kTakeStateCopies = R"(take_state_copies(self)
--

Hand out the copies of state slots owed since the last call, to be done before the next kernels run.

Returns
-------
int32 [n, 3]
    Replica, source slot, destination slot: in all groups, in this order.)";

constexpr const char* kStateOf = R"(state_of(self, sequence)
--

Return the slot of a sequence's state; -1 before it is reserved, and without states.)";

constexpr const char* kStateStats = R"(state_stats(self, replica=0)
--

Count the slots of states of a replica; zeros without states.)";

constexpr const char* kResetPrefixCache = R"(reset_prefix_cache(self)
--

Forget every cached page, on every replica; who holds a page keeps it, and no later request hits it.

Returns
-------
bool
    True where no page is left that was cached. False while requests, pins or holds keep some.)";

constexpr const char* kStats = R"(stats(self, replica=0)
--

Count the pages of a replica.

Returns
-------
PoolStats
    ``total_pages``, ``free_pages``, ``cached_pages``, ``evictable_pages``, ``num_sequences``,
    ``available_pages``, those that a reservation could have, and of the host tier ``host_pages``
    and ``host_cached_pages``.)";

constexpr const char* kResetMetrics = R"(reset_metrics(self)
--

Set every counter to zero, the peak to what is in use.)";

constexpr const char* kCheckIntegrity = R"(check_integrity(self)
--

Raise AssertionError naming the conservation law that does not hold. O(everything).)";

}  // namespace kvcore::python::docs
