// SPDX-License-Identifier: Apache-2.0
// The locking side of the manager: each verb locks the mutex and calls the part that does the work.
#include "kvcore/cache_manager.hpp"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "cache/cached_tree.hpp"
#include "cache/impl.hpp"
#include "cache/queries.hpp"
#include "cache/store_searches.hpp"
#include "cache/validate_requests.hpp"
#include "cache/verbs.hpp"
#include "kvcore/errors.hpp"
#include "level/quotas.hpp"
#include "observe/export_import.hpp"

namespace kvcore {
namespace {

using Lock = std::lock_guard<std::mutex>;

}  // namespace

CacheManager::CacheManager(const CacheConfig& config, const PolicyFactory& make_policy)
    : impl_(std::make_unique<Impl>(config, make_policy)) {}

CacheManager::~CacheManager() = default;

const CacheConfig& CacheManager::config() const noexcept { return impl_->cache.config; }

SequenceHandle CacheManager::claim(std::int32_t replica) {
    const Lock lock(impl_->mutex);
    return verbs::claim(impl_->cache, replica);
}

void CacheManager::set_priority(SequenceHandle sequence, const RequestPriority& priority) {
    const Lock lock(impl_->mutex);
    verbs::set_priority(impl_->cache, sequence, priority);
}

void CacheManager::advance(std::int64_t now) {
    const Lock lock(impl_->mutex);
    verbs::advance(impl_->cache, now);
}

bool CacheManager::contains(SequenceHandle sequence) const {
    const Lock lock(impl_->mutex);
    return impl_->cache.sequences.find(sequence) != nullptr;
}

std::int32_t CacheManager::replica_of(SequenceHandle sequence) const {
    const Lock lock(impl_->mutex);
    return impl_->cache.sequences.at(sequence).replica;
}

std::vector<BlockId> CacheManager::pages_of(SequenceHandle sequence, std::int32_t bundle,
                                            std::int64_t first) const {
    const Lock lock(impl_->mutex);
    return queries::pages_of(impl_->cache, sequence, bundle, first);
}

void CacheManager::release(SequenceHandle sequence, RequestHistory* history,
                           std::int64_t returns_in, Misses* misses) {
    const Lock lock(impl_->mutex);
    if (verbs::release(impl_->cache, sequence, history, returns_in, misses)) {
        impl_->finished.notify_all();
    }
}

void CacheManager::recall(SequenceHandle sequence, const RequestHistory& history) {
    const Lock lock(impl_->mutex);
    static_cast<void>(impl_->cache.sequences.at(sequence));
    impl_->cache.counts.recall(sequence, history);
}

void CacheManager::begin_again(SequenceHandle sequence) {
    const Lock lock(impl_->mutex);
    verbs::begin_again(impl_->cache, sequence);
}

ReserveStatus CacheManager::reserve(RequestView& request, std::int64_t num_steps,
                                    Transfers* transfers, const ReserveOptions& options) {
    rules::require_options(options);
    const Lock lock(impl_->mutex);
    return verbs::reserve(impl_->cache, {&request, 1}, num_steps, transfers, options).status;
}

BatchReserve CacheManager::reserve_batch(const RequestBatch& batch, std::int64_t num_steps,
                                         Transfers* transfers) {
    const Lock lock(impl_->mutex);
    return verbs::reserve(impl_->cache, batch, num_steps, transfers);
}

ReservePlan CacheManager::plan(const RequestView& request, std::int64_t num_steps,
                               const ReserveOptions& options) const {
    rules::require_options(options);
    const Lock lock(impl_->mutex);
    return verbs::plan(impl_->cache, request, {num_steps, options});
}

ReservePlan CacheManager::plan(std::int32_t replica, const RequestView& request,
                               std::int64_t num_steps, const ReserveOptions& options,
                               std::int32_t tenant) const {
    rules::require_options(options);
    const Lock lock(impl_->mutex);
    const Owner owner = quotas::owner_of(impl_->cache.config, tenant);
    return verbs::plan(impl_->cache, replica, request, {num_steps, options, owner});
}

ReserveStatus CacheManager::begin_at(RequestView& request, std::int64_t n, Transfers* transfers) {
    const Lock lock(impl_->mutex);
    return verbs::begin_at(impl_->cache, request, n, transfers);
}

SequenceMark CacheManager::mark_of(SequenceHandle sequence) const {
    const Lock lock(impl_->mutex);
    return queries::mark_of(impl_->cache, sequence);
}

PrefixHit CacheManager::match(const RequestView& request) const {
    const Lock lock(impl_->mutex);
    return PrefixHit(
        std::make_unique<PrefixHit::Held>(impl_->mutex, verbs::match(impl_->cache, request)));
}

ReserveStatus CacheManager::allocate(PrefixHit& hit, RequestView& request, std::int64_t n,
                                     Transfers* transfers) {
    if (hit.held_ == nullptr) {
        throw std::invalid_argument("the hit is empty: it was allocated before; match again");
    }
    ReserveStatus status = ReserveStatus::kNoSpace;
    {
        const Lock lock(impl_->mutex);
        status = verbs::allocate(impl_->cache, hit.held_->hit, request, n, transfers);
    }
    if (status == ReserveStatus::kOk) hit = PrefixHit();
    return status;
}

FetchResult CacheManager::fetch(const RequestBatch& batch, std::int64_t num_steps,
                                FetchTarget* targets, Transfers* transfers) {
    const Lock lock(impl_->mutex);
    return verbs::fetch(impl_->cache, batch, num_steps, targets, transfers);
}

void CacheManager::commit(const RequestBatch& batch, std::vector<PageSwap>& swaps,
                          Transfers* transfers) {
    const Lock lock(impl_->mutex);
    if (impl_->cache.events != nullptr) impl_->cache.events->seal();
    verbs::commit(impl_->cache, batch, swaps, transfers);
}

void CacheManager::fork(const RequestView& parent, const RequestBatch& children,
                        Transfers* transfers) {
    const Lock lock(impl_->mutex);
    verbs::fork(impl_->cache, parent, children, transfers);
}

void CacheManager::truncate(SequenceHandle sequence, std::int64_t n, Transfers* transfers) {
    const Lock lock(impl_->mutex);
    verbs::truncate(impl_->cache, sequence, n, transfers);
}

std::vector<SharedPrefix> CacheManager::shared_prefixes(const RequestBatch& batch) const {
    const Lock lock(impl_->mutex);
    return queries::shared_prefixes(impl_->cache, batch);
}

std::int64_t CacheManager::match(std::int32_t replica, std::string_view name_space,
                                 const TokenId* tokens, std::int64_t n, std::vector<BlockId>* pages,
                                 std::int32_t* partial_tokens, std::int32_t bundle) const {
    const Lock lock(impl_->mutex);
    return queries::match(impl_->cache.replica_at(replica), name_space, tokens, n, pages,
                          partial_tokens, bundle);
}

std::int64_t CacheManager::touch(std::int32_t replica, std::string_view name_space,
                                 const TokenId* tokens, std::int64_t n, std::vector<BlockId>* pages,
                                 std::int32_t* partial_tokens, std::int64_t most_pages,
                                 std::int32_t bundle) {
    const Lock lock(impl_->mutex);
    return queries::touch(impl_->cache.replica_at(replica), name_space, tokens, n, pages,
                          partial_tokens, most_pages, bundle);
}

PinHandle CacheManager::pin(std::int32_t replica, std::string_view name_space,
                            const TokenId* tokens, std::int64_t n) {
    const Lock lock(impl_->mutex);
    return impl_->pins.pin(impl_->cache.replica_at(replica), name_space, tokens, n);
}

void CacheManager::unpin(PinHandle pin) {
    const Lock lock(impl_->mutex);
    impl_->pins.unpin(pin);
}

std::int32_t CacheManager::recommend_replica(std::string_view name_space, const TokenId* tokens,
                                             std::int64_t n) const {
    const Lock lock(impl_->mutex);
    return queries::recommend_replica(impl_->cache, name_space, tokens, n);
}

std::int64_t CacheManager::leave_windows(SequenceHandle sequence, std::int64_t n) {
    const Lock lock(impl_->mutex);
    return verbs::leave_windows(impl_->cache, sequence, n);
}

std::int64_t CacheManager::forget(std::int32_t replica, const BlockId* pages, std::int64_t n) {
    const Lock lock(impl_->mutex);
    return verbs::forget(impl_->cache, replica, pages, n);
}

std::vector<BlockId> CacheManager::next_pages(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    return queries::next_pages(impl_->cache.replica_at(replica));
}

bool CacheManager::reset_prefix_cache() {
    const Lock lock(impl_->mutex);
    return verbs::reset_prefix_cache(impl_->cache);
}

void CacheManager::finish(std::uint64_t ticket, bool done) {
    bool is_known = false;
    {
        const Lock lock(impl_->mutex);
        if (impl_->cache.events != nullptr) impl_->cache.events->seal();
        is_known = verbs::finish(impl_->cache, ticket, done);
    }
    if (!is_known) {
        throw InvalidHandleError(detail::concat("the transfers of ticket ", ticket,
                                                " are not under way: they were finished before; "
                                                "finish them once"));
    }
    impl_->finished.notify_all();
}

void CacheManager::note_late_reads(const PageMove* stores, std::int64_t n, std::uint64_t mark) {
    const Lock lock(impl_->mutex);
    verbs::note_late_reads(impl_->cache, stores, n, mark);
}

std::uint64_t CacheManager::late_reads(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    const LateReads* reads = impl_->cache.replica_at(replica).late_reads.get();
    return reads == nullptr ? 0 : reads->highest();
}

OwedStatus CacheManager::take_owed(SequenceHandle sequence, Transfers& transfers) {
    const Lock lock(impl_->mutex);
    return impl_->cache.ledger.take_owed(sequence, transfers);
}

void CacheManager::wait(SequenceHandle sequence) const {
    std::unique_lock<std::mutex> lock(impl_->mutex);
    impl_->finished.wait(lock, [&] { return !impl_->cache.ledger.must_wait(sequence); });
}

std::vector<PageMove> CacheManager::take_copies() {
    const Lock lock(impl_->mutex);
    return impl_->cache.ledger.copy_list.take();
}

std::vector<StateMove> CacheManager::take_state_copies() {
    const Lock lock(impl_->mutex);
    return impl_->cache.ledger.state_copies.take_list();
}

std::int32_t CacheManager::state_of(SequenceHandle sequence) const {
    const Lock lock(impl_->mutex);
    static_cast<void>(impl_->cache.sequences.at(sequence));
    return impl_->cache.states.slot_of(sequence);
}

StateStats CacheManager::state_stats(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    return impl_->cache.replica_at(replica).state_stats();
}

std::vector<TokenId> CacheManager::tokens_up_to(TokenId highest) const {
    const Lock lock(impl_->mutex);
    return queries::tokens_up_to(impl_->cache, highest);
}

std::int64_t CacheManager::first_uncached(SequenceHandle sequence) const {
    const Lock lock(impl_->mutex);
    return queries::first_uncached(impl_->cache, sequence);
}

PoolStats CacheManager::stats(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    return queries::stats(impl_->cache, replica);
}

std::vector<GroupStats> CacheManager::group_stats(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    const Replica& asked = impl_->cache.replica_at(replica);
    return asked.group_stats();
}

std::vector<TenantStats> CacheManager::tenant_stats(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    impl_->cache.count_generated();
    return queries::tenant_stats(impl_->cache.replica_at(replica));
}

Metrics CacheManager::metrics() const {
    const Lock lock(impl_->mutex);
    impl_->cache.count_generated();
    return queries::metrics(impl_->cache);
}

Misses CacheManager::misses_of(SequenceHandle sequence) const {
    const Lock lock(impl_->mutex);
    static_cast<void>(impl_->cache.sequences.at(sequence));
    if (impl_->cache.misses != nullptr) return impl_->cache.misses->of(sequence);
    throw std::invalid_argument(
        "explain_pages is 0, must be at least 1 to explain misses; make the manager with it");
}

MissCounts CacheManager::miss_counts() const {
    const Lock lock(impl_->mutex);
    return impl_->cache.misses == nullptr ? MissCounts{} : impl_->cache.misses->counts();
}

Advice CacheManager::advice() const {
    AdviceCopy copy;
    {
        const Lock lock(impl_->mutex);
        if (impl_->cache.advice == nullptr) {
            throw std::invalid_argument(
                "advice_sample is 0, must be at least 1 for advice; make the manager with it");
        }
        copy = impl_->cache.advice->copy();
    }
    return advise(copy);
}

void CacheManager::note_stored(const StoreSearch& search, std::int32_t columns) noexcept {
    const Lock lock(impl_->mutex);
    const CacheData& cache = impl_->cache;
    if (cache.misses == nullptr || cache.sequences.find(search.sequence) == nullptr) return;
    cache.misses->note_stored(search.sequence, columns);
}

void CacheManager::reset_metrics() {
    const Lock lock(impl_->mutex);
    impl_->cache.count_generated();
    verbs::reset_metrics(impl_->cache);
}

void CacheManager::check_integrity() const {
    const Lock lock(impl_->mutex);
    queries::check_integrity(impl_->cache);
}

PrefixHit::PrefixHit() noexcept = default;

PrefixHit::PrefixHit(std::unique_ptr<Held> held) noexcept : held_(std::move(held)) {}

PrefixHit::PrefixHit(PrefixHit&& other) noexcept = default;

PrefixHit& PrefixHit::operator=(PrefixHit&& other) noexcept {
    PrefixHit moved(std::move(other));
    held_.swap(moved.held_);
    return *this;
}

PrefixHit::~PrefixHit() {
    if (held_ == nullptr) return;
    const Lock lock(held_->mutex);
    held_.reset();
}

std::int64_t PrefixHit::num_tokens() const noexcept {
    return held_ == nullptr ? 0 : held_->hit.found().tokens;
}

std::int64_t PrefixHit::num_pages() const noexcept {
    return held_ == nullptr ? 0 : held_->hit.found().match.at.depth;
}

// The locking side of the manager, for stores below its host tier.

namespace {

[[noreturn]] void refuse_ticket(const char* what, std::uint64_t ticket) {
    throw InvalidHandleError(detail::concat("ticket ", ticket, " of the ", what,
                                            " is not under way: it was finished before; finish it "
                                            "once"));
}

void require_stores(const CacheData& cache, std::int32_t replica) {
    if (cache.replica_at(replica).has_stores()) return;
    throw std::invalid_argument(
        "this manager has no stores below its host tier; create it with has_stores");
}

void require_rising(const ColumnParts* columns, std::int64_t n, std::int32_t end) {
    std::int32_t before = -1;
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int32_t column = columns[i].column;
        if (column <= before || column >= end) {
            throw std::invalid_argument(detail::concat("column ", column, " comes after column ",
                                                       before, ", must rise and be less than ", end,
                                                       ", the end of the hit"));
        }
        before = column;
    }
}

}  // namespace

bool CacheManager::take_writes(std::int64_t most, StoreMoves& out) {
    out.clear();
    const Lock lock(impl_->mutex);
    CacheData& cache = impl_->cache;
    return cache.ledger.store_queue.take(most, cache.ledger.tickets.next(), out);
}

void CacheManager::finish_writes(std::uint64_t ticket) {
    const Lock lock(impl_->mutex);
    if (!impl_->cache.ledger.store_queue.finish(ticket)) refuse_ticket("writes", ticket);
}

std::int64_t CacheManager::num_waiting_writes() const {
    const Lock lock(impl_->mutex);
    return impl_->cache.ledger.store_queue.num_waiting();
}

std::int64_t CacheManager::num_dropped_writes() const {
    const Lock lock(impl_->mutex);
    return impl_->cache.ledger.store_queue.num_dropped();
}

StoreSearch CacheManager::search_below(const RequestView& request, std::int64_t max_hit) {
    const Lock lock(impl_->mutex);
    return store_searches::search(impl_->cache, request, max_hit);
}

StoreSearch CacheManager::search_below(std::int32_t replica, std::string_view name_space,
                                       const TokenId* tokens, std::int64_t n) {
    const Lock lock(impl_->mutex);
    return store_searches::search(impl_->cache, replica, name_space, tokens, n);
}

void CacheManager::keys_below(std::string_view name_space, const TokenId* tokens,
                              std::int32_t first, std::int32_t last, const PageKey& parent,
                              PageKey* out) const {
    impl_->cache.ledger.store_queue.paths().keys_of(name_space, tokens, first, last, parent, out);
}

PageKey CacheManager::root_key_below(std::string_view name_space) const {
    return impl_->cache.ledger.store_queue.paths().root(name_space);
}

std::vector<ColumnParts> CacheManager::needed_below(std::int32_t replica,
                                                    std::string_view name_space,
                                                    const TokenId* tokens, std::int32_t end) const {
    const Lock lock(impl_->mutex);
    require_stores(impl_->cache, replica);
    return impl_->cache.ledger.flights.needed_below(replica, name_space, tokens, end);
}

void CacheManager::begin_fill(std::int32_t replica, std::string_view name_space,
                              const TokenId* tokens, std::int32_t end, const ColumnParts* columns,
                              const PageKey* keys, std::int64_t n, StoreMoves& out) {
    out.clear();
    require_rising(columns, n, end);
    const Lock lock(impl_->mutex);
    require_stores(impl_->cache, replica);
    impl_->cache.ledger.flights.begin_fill(replica, name_space, tokens, end, columns, keys,
                                           static_cast<std::size_t>(n), out);
}

void CacheManager::finish_fill(std::uint64_t ticket, std::int64_t arrived, bool forward) {
    const Lock lock(impl_->mutex);
    if (!impl_->cache.ledger.flights.finish_fill(ticket, arrived, forward)) {
        refuse_ticket("fill", ticket);
    }
}

// The locking side of the manager, for readers of its events.

// Keys are made while other threads use the manager. One reader at a time: each continues from the
// keys of the previous reader.
std::vector<CacheEvent> CacheManager::take_events() {
    if (impl_->event_keys == nullptr) {
        throw std::invalid_argument(
            "this manager has no events; create it with event_pages, or events=True in Python");
    }
    EventLog& log = *impl_->cache.events;
    const Lock reading(impl_->reading);
    const auto end_read = [&](bool done) {
        const Lock lock(impl_->mutex);
        log.end_read(done);
    };
    const PageNews* news = nullptr;
    {
        const Lock lock(impl_->mutex);
        news = &log.begin_read();
    }
    std::vector<CacheEvent> events;
    try {
        events = impl_->event_keys->read(*news);
    } catch (...) {
        end_read(false);
        throw;
    }
    end_read(true);
    return events;
}

void CacheManager::note_written(std::int32_t replica, const PageKey* keys, std::int64_t n,
                                std::uint64_t num_resets) {
    const Lock lock(impl_->mutex);
    CacheData& cache = impl_->cache;
    static_cast<void>(cache.replica_at(replica));
    if (cache.events == nullptr || n == 0) return;
    if (num_resets == cache.cache_copies.num_resets()) cache.events->written(replica, keys, n);
}

// The locking side of pages that leave the caches and are brought back.

namespace {

template <class Held>
void end_locked(std::unique_ptr<Held>& held) noexcept {
    if (held == nullptr) return;
    const Lock lock(held->mutex);
    held.reset();
}

template <class Held, class Get>
auto& part_of(const std::unique_ptr<Held>& held, const Get& get) noexcept {
    static const std::decay_t<decltype(get(held->columns))> none;  // constant, and empty
    return held == nullptr ? none : get(held->columns);
}

}  // namespace

CachedTree CacheManager::cached_tree(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    return cached_tree::list(impl_->cache, replica);
}

std::uint64_t CacheManager::num_resets() const {
    const Lock lock(impl_->mutex);
    return impl_->cache.cache_copies.num_resets();
}

CacheExport CacheManager::export_columns(const ColumnSpan& span) {
    const Lock lock(impl_->mutex);
    CacheData& cache = impl_->cache;
    const TreePosition at = cached_tree::find(cache, span);
    if (at.node == nullptr) return {};
    cache.cache_copies.make_room();
    return CacheExport(std::make_unique<CacheExport::Held>(
        impl_->mutex, cache.cache_copies, cache.replica_at(span.replica), at, span.first));
}

CacheImport CacheManager::import_columns(const ColumnSpan& span, const CachedColumn* columns) {
    const Lock lock(impl_->mutex);
    CacheData& cache = impl_->cache;
    cached_tree::check_span(cache, span);
    cached_tree::check_offer(cache, span, columns);
    if (span.num_resets != cache.cache_copies.num_resets()) {
        return {ImportStatus::kReset, nullptr};
    }
    cache.cache_copies.make_room();
    auto held = std::make_unique<CacheImport::Held>(impl_->mutex, cache.cache_copies,
                                                    cache.replica_at(span.replica), span, columns);
    const ImportStatus status = held->columns.status();
    const bool holds = status == ImportStatus::kTaken || status == ImportStatus::kKnown;
    if (!holds) held.reset();
    return {status, std::move(held)};
}

bool CacheManager::publish(CacheImport& filled, bool more) {
    if (filled.held_ == nullptr) {
        throw std::invalid_argument(
            "the import is empty: it was published, or took no column; publish each import once");
    }
    const Lock lock(impl_->mutex);
    const bool is_wanted = filled.held_->columns.publish(more);
    filled.held_.reset();
    return is_wanted;
}

CacheExport::CacheExport() noexcept = default;

CacheExport::CacheExport(std::unique_ptr<Held> held) noexcept : held_(std::move(held)) {}

CacheExport::CacheExport(CacheExport&& other) noexcept = default;

CacheExport& CacheExport::operator=(CacheExport&& other) noexcept {
    CacheExport moved(std::move(other));
    held_.swap(moved.held_);
    return *this;
}

CacheExport::~CacheExport() { end_locked(held_); }

const std::vector<CachedColumn>& CacheExport::columns() const noexcept {
    return part_of(held_, [](const ColumnExport& held) -> auto& { return held.columns(); });
}

const std::vector<BlockId>& CacheExport::pages() const noexcept {
    return part_of(held_, [](const ColumnExport& held) -> auto& { return held.pages(); });
}

CacheImport::CacheImport() noexcept = default;

CacheImport::CacheImport(ImportStatus status, std::unique_ptr<Held> held) noexcept
    : status_(status), held_(std::move(held)) {}

CacheImport::CacheImport(CacheImport&& other) noexcept = default;

CacheImport& CacheImport::operator=(CacheImport&& other) noexcept {
    CacheImport moved(std::move(other));
    held_.swap(moved.held_);
    status_ = moved.status_;
    return *this;
}

CacheImport::~CacheImport() { end_locked(held_); }

const std::vector<CachedColumn>& CacheImport::columns() const noexcept {
    return part_of(held_, [](const ColumnImport& held) -> auto& { return held.columns(); });
}

const std::vector<BlockId>& CacheImport::pages() const noexcept {
    return part_of(held_, [](const ColumnImport& held) -> auto& { return held.pages(); });
}

struct HeldPages::Held {
    Held(std::mutex& guard, Replica& home, const BlockId* given, std::int64_t n)
        : mutex(guard), pages(given, given + n), refs(hold_pages(home, given, n)) {}

    std::mutex& mutex;
    std::vector<BlockId> pages;
    std::vector<PageRef> refs;
};

HeldPages CacheManager::hold(std::int32_t replica, const BlockId* pages, std::int64_t n) {
    const Lock lock(impl_->mutex);
    Replica& home = impl_->cache.replica_at(replica);
    return HeldPages(std::make_unique<HeldPages::Held>(impl_->mutex, home, pages, n));
}

HeldPages::HeldPages() noexcept = default;

HeldPages::HeldPages(std::unique_ptr<Held> held) noexcept : held_(std::move(held)) {}

HeldPages::HeldPages(HeldPages&& other) noexcept = default;

HeldPages& HeldPages::operator=(HeldPages&& other) noexcept {
    HeldPages moved(std::move(other));
    held_.swap(moved.held_);
    return *this;
}

HeldPages::~HeldPages() {
    if (held_ == nullptr) return;
    const Lock lock(held_->mutex);
    held_.reset();
}

const std::vector<BlockId>& HeldPages::pages() const noexcept {
    static const std::vector<BlockId> none;  // constant, and empty
    return held_ == nullptr ? none : held_->pages;
}

void HeldPages::let_go() {
    if (held_ == nullptr) {
        throw InvalidHandleError(
            "these pages are not held: they were released before; release each hold once");
    }
    const Lock lock(held_->mutex);
    held_.reset();
}

}  // namespace kvcore
