# SPDX-License-Identifier: Apache-2.0
"""The C++ cache of a manager, and its counts as Python values."""


cdef object eviction_counts(const EvictionCounts& counts):
    return EvictionMetrics(
        policy=counts.policy, window=counts.window, unreachable=counts.unreachable,
        reset=counts.reset,
    )


cdef tuple MISS_REASONS = (
    "never_seen", "evicted", "host_full", "forgotten", "reset", "unreachable", "other_namespace",
    "partial_page", "late", "declined",
)


cdef dict missed_tokens(const Misses& found):
    cdef size_t i
    return {reason: found.tokens[i] for i, reason in enumerate(MISS_REASONS)}


cdef object listed_misses(const Misses& found):
    """Return the misses of a claim; None before its first reservation, and for a fork."""
    if found.prompt_tokens == 0:
        return None
    return MissesOfRequest(
        found.prompt_tokens, found.cached_tokens, **missed_tokens(found),
        newest_eviction=None if found.newest_eviction < 0 else found.newest_eviction,
        oldest_eviction=None if found.oldest_eviction < 0 else found.oldest_eviction,
    )


@cython.final
cdef class CacheCore:
    """Own the C++ ``CacheManager`` of an engine. The parts of the engine share this object.

    Parameters
    ----------
    config : kvcore._core.CacheConfig
    """

    def __cinit__(self, object config not None):
        self.manager = new CacheManager(
            (<CacheConfig*>PyCapsule_GetPointer(config._capsule(), "kvcore.CacheConfig"))[0]
        )

    def __dealloc__(self):
        del self.manager

    def stats(self, int32_t replica=0):
        """Return the pages of a replica: a ReplicaMetrics."""
        cdef PoolStats found = self.manager.stats(replica)
        return ReplicaMetrics(
            total_pages=found.total_pages, free_pages=found.free_pages,
            cached_pages=found.cached_pages, evictable_pages=found.evictable_pages,
            num_sequences=found.num_sequences, host_pages=found.host_pages,
            host_cached_pages=found.host_cached_pages,
        )

    def total_pages(self):
        """Return the number of pages of each replica."""
        return self.manager.config().num_pages

    def available_pages(self, int32_t replica):
        """Return the pages of a replica that a request could get: free and evictable pages."""
        return self.manager.stats(replica).available_pages()

    def cached_pages(self, int32_t replica):
        """Return the pages of a replica in the prefix cache."""
        return self.manager.stats(replica).cached_pages

    def group_stats(self, int32_t replica=0):
        """Return a GroupMetrics for each attention group of a replica."""
        cdef vector[GroupStats] found = self.manager.group_stats(replica)
        cdef size_t i
        return [
            GroupMetrics(
                held_pages=found[i].held_pages, cached_pages=found[i].cached_pages,
                holes=found[i].holes, given_back=found[i].given_back, filled=found[i].filled,
                stored_pages=found[i].stored_pages, loaded_pages=found[i].loaded_pages,
            )
            for i in range(found.size())
        ]

    def tenant_stats(self, int32_t replica=0):
        """Return a TenantMetrics for each tenant with a quota in a replica."""
        cdef vector[TenantStats] found = self.manager.tenant_stats(replica)
        cdef size_t i
        return [
            TenantMetrics(
                held_pages=found[i].held_pages, reserved_pages=found[i].reserved_pages,
                max_pages=None if found[i].max_pages == kNoCeiling else found[i].max_pages,
                refused=found[i].refused, input_tokens=found[i].input_tokens,
                cache_tokens=found[i].cache_tokens, generated_tokens=found[i].generated_tokens,
            )
            for i in range(found.size())
        ]

    def state_stats(self, int32_t replica=0):
        """Return the state slots of a replica: a StateMetrics."""
        cdef StateStats found = self.manager.state_stats(replica)
        return StateMetrics(
            total_slots=found.total_slots, used_slots=found.used_slots,
            checkpoints=found.checkpoints, available_slots=found.available_slots,
            checkpoint_hits=found.checkpoint_hits, checkpoints_made=found.checkpoints_made,
            host_slots=found.host_slots, host_checkpoints=found.host_checkpoints,
            stored_checkpoints=found.stored_checkpoints,
            loaded_checkpoints=found.loaded_checkpoints,
            evicted_checkpoints=found.evicted_checkpoints,
        )

    def eviction_counts(self):
        """Return the EvictionMetrics of the device and of the host tier."""
        cdef Metrics found = self.manager.metrics()
        return eviction_counts(found.evicted), eviction_counts(found.host_evicted)

    def tier_counts(self):
        """Return the missed, stored and loaded pages of the host tier, and the loaded tokens."""
        cdef Metrics found = self.manager.metrics()
        return found.missed_pages, found.stored_pages, found.loaded_pages, found.loaded_tokens

    def miss_counts(self):
        """Return the sum of the misses of all admissions: a MissMetrics."""
        cdef MissCounts found = self.manager.miss_counts()
        return MissMetrics(
            found.sum.prompt_tokens, found.sum.cached_tokens, **missed_tokens(found.sum),
            admissions=found.admissions, remembered_pages=found.remembered_pages,
            lost_pages=found.lost_pages,
        )

    def advice(self):
        """Return the tokens of each tenant that other sizes find, and the counts of the sample.

        A tenant is a tuple: prompt tokens, cached tokens, found tokens by factor, tokens that the
        optimum finds. The first are the requests without a tenant.
        """
        cdef Advice found
        cdef size_t i
        with nogil:
            found = self.manager.advice()
        tenants = []
        for each in range(found.tenants.size()):
            tokens = {
                ADVICE_FACTORS[i]: found.tenants[each].found_tokens[i]
                for i in range(ADVICE_FACTORS.size())
            }
            tenants.append((
                found.tenants[each].prompt_tokens, found.tenants[each].cached_tokens, tokens,
                found.tenants[each].optimum_tokens,
            ))
        return tenants, {
            "seconds": found.seconds, "sample": found.sample, "admissions": found.admissions,
            "sampled_uses": found.sampled_uses, "lost_uses": found.lost_uses,
        }

    def reset_metrics(self):
        """Set all counters to 0, and the peak to the pages in use."""
        self.manager.reset_metrics()

    def check_integrity(self):
        """Raise AssertionError, with the name of the law, if a conservation law does not hold."""
        self.manager.check_integrity()

    def late_reads(self, int32_t replica):
        """Return the highest mark of stores that may still read pages reallocated since; else 0."""
        return self.manager.late_reads(replica)
