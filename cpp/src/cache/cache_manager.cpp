// SPDX-License-Identifier: Apache-2.0
// The threads' side of the manager: each verb takes the mutex and hands on to the part that does
// it.
#include "kvcore/cache_manager.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "cache/impl.hpp"
#include "cache/queries.hpp"
#include "cache/reset.hpp"
#include "kvcore/errors.hpp"
#include "level/quotas.hpp"

namespace kvcore {
namespace {

using Lock = std::lock_guard<std::mutex>;

// True when no transfers into a sequence's pages are under way, and none that make room in its
// replica, or it is gone.
bool is_settled(const ManagerState& state, SequenceHandle handle) {
    if (state.sequences.find(handle) == nullptr) return true;
    const auto is_its = [handle](std::uint64_t ticket, std::thread::id owner,
                                 SequenceHandle sequence) {
        if (ticket == 0 || sequence != handle) return false;
        if (owner != std::this_thread::get_id()) return true;
        throw std::logic_error("a thread waits for transfers of its own; finish them first");
    };
    for (const OwedCopies::Copy& copy : state.copies.all()) {
        if (is_its(copy.ticket, copy.owner, copy.copy.sequence)) return false;
    }
    for (const StateCopies::Copy& copy : state.state_copies.all()) {
        if (is_its(copy.ticket, copy.owner, copy.from)) return false;
        if (is_its(copy.ticket, copy.owner, copy.into)) return false;
    }
    const std::int32_t replica = state.sequences.find(handle)->replica;
    for (const TierFlight& flight : state.flights.all()) {
        const bool makes_room = flight.is_spill() && flight.replica == replica;
        if (!flight.holds_up() && !makes_room) continue;
        if (is_its(flight.ticket, flight.owner, makes_room ? handle : flight.sequence)) {
            return false;
        }
    }
    return true;
}

}  // namespace

CacheManager::CacheManager(const CacheConfig& config, const PolicyFactory& make_policy)
    : impl_(std::make_unique<Impl>(config, make_policy)) {}

CacheManager::~CacheManager() = default;

const CacheConfig& CacheManager::config() const noexcept { return impl_->state.config; }

SequenceHandle CacheManager::claim(std::int32_t replica) {
    const Lock lock(impl_->mutex);
    return impl_->claims.claim(replica);
}

void CacheManager::set_terms(SequenceHandle sequence, const RequestTerms& terms) {
    const Lock lock(impl_->mutex);
    ManagerState& state = impl_->state;
    const Sequence& told = state.sequences.at(sequence);
    const bool has_tenant = terms.tenant != RequestTerms::kSameTenant;
    const Owner owner = has_tenant ? quotas::owner_of(state.config, terms.tenant) : Owner{0};
    if (owner != 0) state.tenants.make_room(sequence);
    state.terms.set(sequence, terms);
    if (has_tenant) state.set_tenant(told, sequence, owner);
}

void CacheManager::advance(std::int64_t now) {
    const Lock lock(impl_->mutex);
    housekeeping::advance(impl_->state, now);
}

bool CacheManager::contains(SequenceHandle sequence) const {
    const Lock lock(impl_->mutex);
    return impl_->state.sequences.find(sequence) != nullptr;
}

std::int32_t CacheManager::replica_of(SequenceHandle sequence) const {
    const Lock lock(impl_->mutex);
    return impl_->state.sequences.at(sequence).replica;
}

std::vector<BlockId> CacheManager::pages_of(SequenceHandle sequence, std::int32_t bundle,
                                            std::int64_t first) const {
    const Lock lock(impl_->mutex);
    return look_up::pages_of(impl_->state, sequence, bundle, first);
}

void CacheManager::release(SequenceHandle sequence, RequestHistory* history) {
    const Lock lock(impl_->mutex);
    if (impl_->claims.release(sequence, history)) impl_->finished.notify_all();
}

void CacheManager::recall(SequenceHandle sequence, const RequestHistory& history) {
    const Lock lock(impl_->mutex);
    static_cast<void>(impl_->state.sequences.at(sequence));
    impl_->state.counts.recall(sequence, history);
}

void CacheManager::begin_again(SequenceHandle sequence) {
    const Lock lock(impl_->mutex);
    impl_->claims.begin_again(sequence);
}

ReserveStatus CacheManager::reserve(RequestView& request, std::int64_t num_steps,
                                    Transfers* transfers, const ReserveOptions& options) {
    rules::require_options(options);
    const Lock lock(impl_->mutex);
    return impl_->ordered.reserve({&request, 1}, num_steps, transfers, options).status;
}

BatchReserve CacheManager::reserve_batch(const RequestBatch& batch, std::int64_t num_steps,
                                         Transfers* transfers) {
    const Lock lock(impl_->mutex);
    return impl_->ordered.reserve(batch, num_steps, transfers);
}

ReservePlan CacheManager::plan(const RequestView& request, std::int64_t num_steps,
                               const ReserveOptions& options) const {
    rules::require_options(options);
    const Lock lock(impl_->mutex);
    return impl_->ordered.plan(request, {num_steps, options});
}

ReservePlan CacheManager::plan(std::int32_t replica, const RequestView& request,
                               std::int64_t num_steps, const ReserveOptions& options,
                               std::int32_t tenant) const {
    rules::require_options(options);
    const Lock lock(impl_->mutex);
    const Owner owner = quotas::owner_of(impl_->state.config, tenant);
    return impl_->ordered.plan(replica, request, {num_steps, options, owner});
}

ReserveStatus CacheManager::begin_at(RequestView& request, std::int64_t n, Transfers* transfers) {
    const Lock lock(impl_->mutex);
    return impl_->ordered.begin_at(request, n, transfers);
}

SequenceMark CacheManager::mark_of(SequenceHandle sequence) const {
    const Lock lock(impl_->mutex);
    return look_up::mark_of(impl_->state, sequence);
}

PrefixHit CacheManager::match(const RequestView& request) const {
    const Lock lock(impl_->mutex);
    return PrefixHit(
        std::make_unique<PrefixHit::Held>(impl_->mutex, impl_->ordered.match(request)));
}

ReserveStatus CacheManager::allocate(PrefixHit& hit, RequestView& request, std::int64_t n,
                                     Transfers* transfers) {
    if (hit.held_ == nullptr) {
        throw std::invalid_argument("the hit holds nothing: it was allocated; match again");
    }
    ReserveStatus status = ReserveStatus::kNoSpace;
    {
        const Lock lock(impl_->mutex);
        status = impl_->ordered.allocate(hit.held_->hit, request, n, transfers);
    }
    if (status == ReserveStatus::kOk) hit = PrefixHit();
    return status;
}

FetchResult CacheManager::fetch(const RequestBatch& batch, std::int64_t num_steps,
                                FetchTarget* targets, Transfers* transfers) {
    const Lock lock(impl_->mutex);
    return impl_->fetcher.fetch(batch, num_steps, targets, transfers);
}

void CacheManager::commit(const RequestBatch& batch, std::vector<PageSwap>& swaps,
                          Transfers* transfers) {
    const Lock lock(impl_->mutex);
    if (impl_->state.events != nullptr) impl_->state.events->seal();
    impl_->committer.commit(batch, swaps, transfers);
}

void CacheManager::fork(const RequestView& parent, const RequestBatch& children,
                        Transfers* transfers) {
    const Lock lock(impl_->mutex);
    impl_->forker.fork(parent, children, transfers);
}

void CacheManager::truncate(SequenceHandle sequence, std::int64_t n, Transfers* transfers) {
    const Lock lock(impl_->mutex);
    impl_->claims.truncate(sequence, n, transfers);
}

std::vector<SharedPrefix> CacheManager::shared_prefixes(const RequestBatch& batch) const {
    const Lock lock(impl_->mutex);
    return look_up::shared_prefixes(impl_->state, batch);
}

std::int64_t CacheManager::match(std::int32_t replica, std::string_view name_space,
                                 const TokenId* tokens, std::int64_t n, std::vector<BlockId>* pages,
                                 std::int32_t* partial_tokens, std::int32_t bundle) const {
    const Lock lock(impl_->mutex);
    return look_up::match(impl_->state.replica_at(replica), name_space, tokens, n, pages,
                          partial_tokens, bundle);
}

std::int64_t CacheManager::touch(std::int32_t replica, std::string_view name_space,
                                 const TokenId* tokens, std::int64_t n, std::vector<BlockId>* pages,
                                 std::int32_t* partial_tokens, std::int64_t most_pages,
                                 std::int32_t bundle) {
    const Lock lock(impl_->mutex);
    return look_up::touch(impl_->state.replica_at(replica), name_space, tokens, n, pages,
                          partial_tokens, most_pages, bundle);
}

PinHandle CacheManager::pin(std::int32_t replica, std::string_view name_space,
                            const TokenId* tokens, std::int64_t n) {
    const Lock lock(impl_->mutex);
    return impl_->pins.pin(impl_->state.replica_at(replica), name_space, tokens, n);
}

void CacheManager::unpin(PinHandle pin) {
    const Lock lock(impl_->mutex);
    impl_->pins.unpin(pin);
}

std::int32_t CacheManager::recommend_replica(std::string_view name_space, const TokenId* tokens,
                                             std::int64_t n) const {
    const Lock lock(impl_->mutex);
    return look_up::recommend_replica(impl_->state, name_space, tokens, n);
}

std::int64_t CacheManager::leave_windows(SequenceHandle sequence, std::int64_t n) {
    const Lock lock(impl_->mutex);
    return impl_->claims.leave_windows(sequence, n);
}

std::int64_t CacheManager::forget(std::int32_t replica, const BlockId* pages, std::int64_t n) {
    const Lock lock(impl_->mutex);
    return impl_->forgetter.forget(replica, pages, n);
}

std::vector<BlockId> CacheManager::next_pages(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    return look_up::next_pages(impl_->state.replica_at(replica));
}

bool CacheManager::reset_prefix_cache() {
    const Lock lock(impl_->mutex);
    return impl_->forgetter.reset();
}

void CacheManager::finish(std::uint64_t ticket, bool done) {
    bool is_known = false;
    {
        const Lock lock(impl_->mutex);
        if (impl_->state.events != nullptr) impl_->state.events->seal();
        is_known = housekeeping::finish(impl_->state, impl_->claims, ticket, done);
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
    housekeeping::note_late_reads(impl_->state, stores, n, mark);
}

std::uint64_t CacheManager::late_reads(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    const LateReads* reads = impl_->state.replica_at(replica).late_reads.get();
    return reads == nullptr ? 0 : reads->highest();
}

OwedStatus CacheManager::take_owed(SequenceHandle sequence, Transfers& transfers) {
    const Lock lock(impl_->mutex);
    ManagerState& state = impl_->state;
    state.state_copies.make_room_to_take(sequence, transfers);
    const OwedStatus pages = state.copies.take_owed(sequence, transfers);
    const bool has_states = state.state_copies.take_owed(sequence, transfers);
    if (has_states) return OwedStatus::kTaken;
    const Sequence* waiting = state.sequences.find(sequence);
    const bool waits_for_room = pages == OwedStatus::kNone && waiting != nullptr &&
                                state.flights.holds_back(waiting->replica, 0);
    return waits_for_room ? OwedStatus::kUnderWay : pages;
}

void CacheManager::wait(SequenceHandle sequence) const {
    std::unique_lock<std::mutex> lock(impl_->mutex);
    impl_->finished.wait(lock, [&] { return is_settled(impl_->state, sequence); });
}

std::vector<PageMove> CacheManager::take_copies() {
    const Lock lock(impl_->mutex);
    return impl_->state.copy_list.take();
}

std::vector<StateMove> CacheManager::take_state_copies() {
    const Lock lock(impl_->mutex);
    return impl_->state.state_copies.take_list();
}

std::int32_t CacheManager::state_of(SequenceHandle sequence) const {
    const Lock lock(impl_->mutex);
    static_cast<void>(impl_->state.sequences.at(sequence));
    const StateRows& states = impl_->state.states;
    return states.exist() ? states.of(sequence).slot : ColumnStates::kNone;
}

StateStats CacheManager::state_stats(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    return impl_->state.replica_at(replica).state_stats();
}

std::vector<TokenId> CacheManager::tokens_up_to(TokenId highest) const {
    const Lock lock(impl_->mutex);
    return look_up::tokens_up_to(impl_->state, highest);
}

std::int64_t CacheManager::first_uncached(SequenceHandle sequence) const {
    const Lock lock(impl_->mutex);
    return look_up::first_uncached(impl_->state, sequence);
}

PoolStats CacheManager::stats(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    return look_up::stats(impl_->state, replica);
}

std::vector<GroupStats> CacheManager::group_stats(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    const Replica& asked = impl_->state.replica_at(replica);
    return asked.columns == nullptr ? std::vector<GroupStats>{} : asked.columns->stats();
}

std::vector<TenantStats> CacheManager::tenant_stats(std::int32_t replica) const {
    const Lock lock(impl_->mutex);
    impl_->state.count_generated();
    return look_up::tenant_stats(impl_->state.replica_at(replica));
}

Metrics CacheManager::metrics() const {
    const Lock lock(impl_->mutex);
    impl_->state.count_generated();
    return look_up::metrics(impl_->state);
}

void CacheManager::reset_metrics() {
    const Lock lock(impl_->mutex);
    impl_->state.count_generated();
    housekeeping::reset_metrics(impl_->state);
}

void CacheManager::check_integrity() const {
    const Lock lock(impl_->mutex);
    look_up::check_integrity(impl_->state);
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

}  // namespace kvcore
