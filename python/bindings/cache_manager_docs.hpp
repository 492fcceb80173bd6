// SPDX-License-Identifier: Apache-2.0
// The docstrings of CacheManager, for help() and the API reference. Python shows a first line
// `name(self, arguments)`, followed by `--`, as the signature.
#pragma once

namespace kvcore::python::docs {

constexpr const char* kManager =
    R"(Manage page ids for sequences, one sequence per call.

``kvcore.PagedKVCacheManager`` is built on this class. Use it in engines with their own contexts
and pool.

Parameters
----------
num_blocks : int
    Number of pages of each replica.
page_size : int
    Tokens per page.
max_sequences : int
    Maximum number of claimed sequences at a time, in each replica.
max_seq_len : int
    Tokens of the longest sequence.
num_replicas : int
prefix_caching, dedup : bool
partial_page_reuse : int
    As for PagedKVCacheManager.
host_pages : int
    Pages of each replica's host tier, 0: no tier. Only PagedKVCacheManager moves their bytes:
    with a tier, ``reserve`` and ``commit`` of this class raise ValueError.
eviction : str or kvcore.policies.EvictionPolicy
    The order in which cached pages are evicted when memory is full.
groups : list of (kind, span, bundles, page_size)
    Groups of layers, if some layers do not keep every token. kind: "full", "sliding" or "chunked";
    span: the tokens of the window or chunk; page_size divides the manager's page_size. The default
    is no groups.
reserve_chunks : bool
max_draft_tokens : int
    As for PagedKVCacheManager.
quotas : list of (reserved_pages, max_pages)
    Quotas of tenants; a tenant is the index of its quota. max_pages is None for no limit.
states : list of int
    For each group of layers with a state, the tokens between its checkpoints. 0: checkpoints only
    at ends of prompts and at branches.
num_states : int
    State slots of each replica, at least max_sequences if there are such groups.
num_host_states : int
    Slots for checkpoints of states in the host tier of each replica.
write_policy : {"write_through", "write_through_selective", "write_back"}
    The time at which a cached page is copied to the host tier.
write_threshold : int
    With "write_through_selective": the uses after which a page is copied, 1 .. 255.
host_eviction : str or kvcore.policies.EvictionPolicy
    The order in which pages of the host tier are evicted when it is full.
host_min_priority : int
    With ``eviction="priority"``: the first page of a prefix with a lower priority, and all later
    pages, are not copied to the host tier.
has_stores : bool
    Pages that enter the host tier get keys and wait to be written to lower stores.
key_seed : bytes
    The seed of these keys, one item of canonical CBOR; empty: no seed.
stand_ins : capsule, optional
    The names of tokens with extra keys.
event_pages : int
    Maximum number of pages with events that wait to be taken; 0: no events.
first_page : int
    Number of page ids reserved for the caller, from 0.
keep_windows : bool
    ``step`` does not give back pages that a window has passed; ``leave_windows`` gives them back.

Raises
------
ValueError, TypeError
    A size is below 1, or the policy does not exist.

Notes
-----
Thread-safe: any number of threads may call any method. A call that raises or returns "no" has
changed nothing. Tokens are always a list of int or an int32 or int64 array.

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

Register a sequence. Takes no pages.

Returns
-------
SequenceHandle
    The handle of the sequence; invalid after its release.

Raises
------
IndexError
    The replica does not exist.
CapacityError
    The replica already has `max_sequences` sequences.)";

constexpr const char* kContains = R"(contains(self, sequence)
--

Return true if a sequence is claimed.)";

constexpr const char* kReplicaOf = R"(replica_of(self, sequence)
--

Return the index of a sequence's replica; RequestNotFoundError if it is not claimed.)";

constexpr const char* kPagesOf = R"(pages_of(self, sequence, bundle=0, first=0)
--

Return a sequence's page ids in logical order; with groups, the page ids of a bundle.

Parameters
----------
first : int
    Index of the first page to return, for example the first page that a reservation has added.

Returns
-------
int32 [pages - first]
    Empty if the sequence has at most `first` pages. -1: no layer of the bundle reads the page any
    more, or the page is not reserved yet.

Raises
------
ValueError
    `first` is below 0.
RequestNotFoundError, IndexError)";

constexpr const char* kGroupStats = R"(group_stats(self, replica=0)
--

Return the GroupStats of each group of a replica, in order; empty without groups. O(pages).)";

constexpr const char* kSetTenant = R"(set_tenant(self, sequence, tenant)
--

Count pages that a sequence takes after this call for a tenant: an index of ``quotas``, or None.)";

constexpr const char* kTenantStats = R"(tenant_stats(self, replica=0)
--

Return the TenantStats of each quota of a replica, in order; empty without quotas. O(tenants).)";

constexpr const char* kRelease = R"(release(self, sequence)
--

Release a sequence. Its committed pages stay cached. RequestNotFoundError if it is not claimed.)";

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
    ``tokens[start:active]`` run next; the default of `active` is n.
num_steps : int
    Number of steps before the next reservation.
extra_key, cache_salt : str, optional
    Namespace of the prefix cache.
max_hit : int, optional
    Maximum number of tokens that the sequence takes from the cache, 0: no tokens. The sequence
    keeps the tokens that it already has.
keep_free : int
    Pages of the replica that must be free or evictable after the call.
must_fit : int, optional
    Beyond `keep_free`, the replica must have room for the sequence with this number of tokens. The
    sequence gets no pages for it.

Returns
-------
fits : bool
    False if there are too few pages. In this case nothing was changed or evicted.
start, active : int
    The tokens to run now, after the prefix hit.

Raises
------
CapacityError
    The sequence, or `must_fit`, can never fit.
ValueError
    An option is below 0, or another argument is invalid.
RequestNotFoundError)";

constexpr const char* kPlan =
    R"(plan(self, sequence, tokens, start=0, *, active=None, num_steps=1, extra_key=None, cache_salt=None, max_hit=None, keep_free=0, must_fit=None)
--

Return the effect that ``reserve`` would have now. Changes nothing.

Returns
-------
ReservePlan
    It has the fields of ``kvcore.ReservePlan``.)";

constexpr const char* kCommit = R"(commit(self, sequence, tokens, written)
--

Put the pages whose tokens are all written into the prefix cache.

Parameters
----------
sequence : SequenceHandle
tokens : list of int, or array int32 or int64 [n]
written : int
    The number of tokens whose K and V are written, ``0 .. n``.

Returns
-------
int32 [swaps, 2]
    Pages that were replaced by equal cached pages: column, cached page.

Raises
------
ValueError
    `written` exceeds the tokens that the sequence's pages hold, or n.
RequestNotFoundError)";

constexpr const char* kMatch =
    R"(match(self, tokens, replica=0, extra_key=None, cache_salt=None, *, touch=False)
--

Find the cached whole pages of a prefix. Changes nothing without `touch`.

Parameters
----------
touch : bool
    Count the call as a use of these pages, so that they are evicted later.

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
    It has ``num_tokens``, the length of the pinned prefix.)";

constexpr const char* kUnpin = R"(unpin(self, pin)
--

Unpin pages; InvalidHandleError if they are already unpinned.)";

constexpr const char* kForget = R"(forget(self, pages, replica=0)
--

Remove cached pages with wrong contents from the cache, for example after a failed load.

Parameters
----------
pages : list of int, or array int32 or int64 [n]
    Ids of any bundle. Ids of free pages are ignored.

Returns
-------
int
    The number of removed pages: these pages and the cached pages after them. Sequences, pins and
    holds keep their pages; a sequence commits no page from its first removed page on.
    Costs O(cached pages + sequences).

Raises
------
InvalidHandleError
    An id is not a page. The call changed nothing.
IndexError, TypeError, ValueError)";

constexpr const char* kNextPages = R"(next_pages(self, replica=0)
--

List the available pages, in the order in which sequences would get them.

Returns
-------
int32 [n]
    Free pages, followed by cached pages in the order of eviction.

Raises
------
ValueError
    The manager has groups of layers or quotas: the order would depend on the request.
IndexError

Notes
-----
For tests and inspection; changes nothing. Exact with ``"lru"``. With other policies a run that
another run follows now may be evicted later; the list has it directly after that run.
Costs O(pages).)";

constexpr const char* kHold = R"(hold(self, pages, replica=0)
--

Protect pages from eviction and reallocation, also after their sequences are released.

Parameters
----------
pages : list of int, or array int32 or int64 [n]
    Ids of cached pages or of pages of sequences. With groups, ids of any bundle: all pages of the
    same tokens are held.

Returns
-------
HeldPages
    Holds nest. Costs O(pages), and O(cached pages) for the search.

Raises
------
InvalidHandleError
    An id is not a page, or is a free page. The call changed nothing.
CapacityError
    The quotas of tenants leave no room to hold cached pages.
IndexError, TypeError, ValueError)";

constexpr const char* kHeldPages = R"(Pages that CacheManager.hold protects.

The pages are released with the object.)";

constexpr const char* kLetGo = R"(let_go(self)
--

Release the pages; InvalidHandleError if they are already released.)";

constexpr const char* kTakeCopies = R"(take_copies(self)
--

Return the page copies that are due since the last call. Do them before the next kernels run.

Returns
-------
int32 [n, 4]
    Replica, source page, destination page, tokens.)";

constexpr const char* kTakeStateCopies = R"(take_state_copies(self)
--

Return the copies of state slots that are due since the last call.

Do the copies before the next kernels run.

Returns
-------
int32 [n, 3]
    Replica, source slot, destination slot. Copy the slots of all groups, in this order.)";

constexpr const char* kStateOf = R"(state_of(self, sequence)
--

Return the slot of a sequence's state; -1 before the slot is reserved, and without states.)";

constexpr const char* kStateStats = R"(state_stats(self, replica=0)
--

Count the state slots of a replica; zeros without states.)";

constexpr const char* kResetPrefixCache = R"(reset_prefix_cache(self)
--

Remove every cached page from the cache, on every replica.

Holders of a page keep it, but no later request hits it.

Returns
-------
bool
    True if no cached page is left. False while requests, pins or holds keep cached pages.)";

constexpr const char* kStats = R"(stats(self, replica=0)
--

Count the pages of a replica.

Returns
-------
PoolStats
    ``total_pages``, ``free_pages``, ``cached_pages``, ``evictable_pages``, ``num_sequences``,
    ``available_pages`` (the pages that a reservation could take), and for the host tier
    ``host_pages`` and ``host_cached_pages``.)";

constexpr const char* kResetMetrics = R"(reset_metrics(self)
--

Set every counter to zero, and the peak to the pages in use.)";

constexpr const char* kCheckIntegrity = R"(check_integrity(self)
--

Raise AssertionError if a conservation law is violated, with its name. O(everything).)";

}  // namespace kvcore::python::docs
