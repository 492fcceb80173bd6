// SPDX-License-Identifier: Apache-2.0
// The threads' side of the manager, for stores below its host tier.
#include <stdexcept>

#include "cache/impl.hpp"
#include "cache/store_searches.hpp"
#include "kvcore/cache_manager.hpp"
#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

using StoreLock = std::lock_guard<std::mutex>;

[[noreturn]] void refuse_ticket(const char* what, std::uint64_t ticket) {
    throw InvalidHandleError(detail::concat("the ", what, " of ticket ", ticket,
                                            " is not under way: it was finished before; finish it "
                                            "once"));
}

void require_stores(const ManagerState& state, std::int32_t replica) {
    if (state.replica_at(replica).record_keys != nullptr) return;
    throw std::invalid_argument(
        "this manager has no stores below its host tier; set has_stores when it is made");
}

void require_rising(const ColumnParts* columns, std::int64_t n, std::int32_t end) {
    std::int32_t before = -1;
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int32_t column = columns[i].column;
        if (column <= before || column >= end) {
            throw std::invalid_argument(detail::concat("column ", column, " comes behind column ",
                                                       before, ", must rise and be less than ", end,
                                                       ", where the hit ends"));
        }
        before = column;
    }
}

}  // namespace

bool CacheManager::take_writes(std::int64_t most, StoreMoves& out) {
    out.clear();
    const StoreLock lock(impl_->mutex);
    ManagerState& state = impl_->state;
    return state.store_queue.take(most, state.tickets.next(), out);
}

void CacheManager::finish_writes(std::uint64_t ticket) {
    const StoreLock lock(impl_->mutex);
    if (!impl_->state.store_queue.finish(ticket)) refuse_ticket("writes", ticket);
}

std::int64_t CacheManager::num_waiting_writes() const {
    const StoreLock lock(impl_->mutex);
    return impl_->state.store_queue.num_waiting();
}

std::int64_t CacheManager::num_dropped_writes() const {
    const StoreLock lock(impl_->mutex);
    return impl_->state.store_queue.num_dropped();
}

StoreSearch CacheManager::search_below(const RequestView& request, std::int64_t max_hit) {
    const StoreLock lock(impl_->mutex);
    return store_searches::search(impl_->state, request, max_hit);
}

StoreSearch CacheManager::search_below(std::int32_t replica, std::string_view name_space,
                                       const TokenId* tokens, std::int64_t n) {
    const StoreLock lock(impl_->mutex);
    return store_searches::search(impl_->state, replica, name_space, tokens, n);
}

void CacheManager::keys_below(std::string_view name_space, const TokenId* tokens,
                              std::int32_t first, std::int32_t last, const PageKey& parent,
                              PageKey* out) const {
    impl_->state.store_queue.paths().keys_of(name_space, tokens, first, last, parent, out);
}

PageKey CacheManager::root_key_below(std::string_view name_space) const {
    return impl_->state.store_queue.paths().root(name_space);
}

std::vector<ColumnParts> CacheManager::needed_below(std::int32_t replica,
                                                    std::string_view name_space,
                                                    const TokenId* tokens, std::int32_t end) const {
    const StoreLock lock(impl_->mutex);
    require_stores(impl_->state, replica);
    return impl_->state.flights.needed_below(replica, name_space, tokens, end);
}

void CacheManager::begin_fill(std::int32_t replica, std::string_view name_space,
                              const TokenId* tokens, std::int32_t end, const ColumnParts* columns,
                              const PageKey* keys, std::int64_t n, StoreMoves& out) {
    out.clear();
    require_rising(columns, n, end);
    const StoreLock lock(impl_->mutex);
    require_stores(impl_->state, replica);
    impl_->state.flights.begin_fill(replica, name_space, tokens, end, columns, keys,
                                    static_cast<std::size_t>(n), out);
}

void CacheManager::finish_fill(std::uint64_t ticket, std::int64_t arrived, bool forward) {
    const StoreLock lock(impl_->mutex);
    if (!impl_->state.flights.finish_fill(ticket, arrived, forward)) {
        refuse_ticket("fill", ticket);
    }
}

}  // namespace kvcore
