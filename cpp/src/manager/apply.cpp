// SPDX-License-Identifier: Apache-2.0
// The second half of a reservation: `prepare` gets what it takes beside pages and may run out of
// memory, having changed nothing that anybody sees; `apply` does it and cannot fail.
#include <algorithm>
#include <new>
#include <utility>

#include "kvcore/errors.hpp"
#include "manager/admission.hpp"
#include "manager/batch_rules.hpp"

namespace kvcore {

CacheManager::Reservation CacheManager::prepare(const Admission& admission, Sequence& sequence,
                                                const RequestView& request, Transfers* transfers) {
    Replica& replica = replica_at(sequence.replica);
    const auto length = static_cast<std::size_t>(std::max(admission.hit_pages, admission.needed));
    if (length > sequence.pages.size()) make_room(sequence.pages, length - sequence.pages.size());
    const auto first = static_cast<std::int32_t>(admission.start / config_.page_size);
    TreeNode* place = nullptr;
    if (admission.shares()) {
        place = replica.tree.split(admission.match.at);
    } else if (sequence.node == nullptr) {
        place = replica.tree.open_namespace(request.name_space);
    }
    Reservation made{
        admission, place == nullptr ? TreePin() : TreePin(replica.tree, place), {}, nullptr};
    if (place == nullptr && sequence.frozen > first) {
        made.cut = find_cut(replica, sequence, first);
    }
    // At most one copy: of the page that a hit ends in, or that is written into again.
    if (admission.match.partial_tokens > 0 || sequence.frozen > first) {
        if (transfers == nullptr) {
            make_room(listed_copies_, 1);
        } else {
            make_room(transfers->copies, 1);
            make_room(ledger_->copies, 1);
        }
    }
    if (transfers != nullptr) make_room(transfers->moved, 1);
    if (admission.below.node != nullptr) prepare_load(made, sequence, request, *transfers);
    return made;
}

void CacheManager::take_hit(const Admission& admission, Replica& replica, Sequence& sequence,
                            TreeNode* place) noexcept {
    if (sequence.node != nullptr) replica.tree.unpin(sequence.node, false);
    sequence.node = place;
    const std::int32_t first = sequence.committed;
    if (admission.hit_pages > first) {
        replica.pool.free(sequence.pages.data() + first, admission.returned);
        if (!sequence.pages.empty()) ++sequence.row_version;
        if (sequence.num_pages() < admission.hit_pages) {
            sequence.pages.resize(static_cast<std::size_t>(admission.hit_pages));
        }
        replica.tree.copy_pages({place, admission.hit_pages}, first, sequence.pages.data() + first);
        sequence.committed = sequence.frozen = admission.hit_pages;
    }
}

// The page that a hit copies from is the first behind it; no other page may be needed instead.
EvictionGuard CacheManager::guard_of(const Admission& admission,
                                     const Sequence& sequence) noexcept {
    if (admission.match.partial_tokens == 0) return {};
    const TreePosition& source = admission.match.partial;
    return {PrefixTree::position(source.node, source.depth).node,
            source.depth - PrefixTree::depth_of(sequence.node)};
}

// Free pages first, then evicted ones: those change hands without a detour through the pool. The
// caller has made sure that there are enough.
void CacheManager::take_pages(Replica& replica, std::int64_t n, BlockId* out,
                              EvictionGuard guard) noexcept {
    const std::int64_t free = std::min(n, replica.pool.num_free());
    detail::require_law(replica.pool.allocate(free, out), "reserve: admitted pages are there");
    if (free == n) return;
    const std::int64_t evicted = replica.tree.evict(n - free, out + free, guard);
    detail::require_law(evicted == n - free, "reserve: admitted pages are there");
    replica.metrics.evicted_pages += evicted;
}

void CacheManager::drop_columns(Replica& replica, Sequence& sequence, std::int32_t from) noexcept {
    if (from >= sequence.num_pages()) return;
    free_own_pages(replica, sequence, from);
    sequence.pages.resize(static_cast<std::size_t>(from));
    sequence.kept.erase(std::lower_bound(sequence.kept.begin(), sequence.kept.end(), from),
                        sequence.kept.end());
    ++sequence.row_version;
}

// Where the committed part of a row ends once it has but `columns`, and the stored part.
CacheManager::CutPlaces CacheManager::find_cut(Replica& replica, const Sequence& sequence,
                                               std::int32_t columns) {
    CutPlaces cut;
    if (sequence.committed <= columns) return cut;
    cut.place = TreePin(replica.tree, replica.tree.split({sequence.node, columns}));
    if (sequence.host_node != nullptr && PrefixTree::depth_of(sequence.host_node) > columns) {
        cut.host_place = {*replica.host, replica.host->hold({sequence.host_node, columns})};
    }
    return cut;
}

// The committed columns from `columns` on are the tree's alone from now on.
void CacheManager::move_back(Replica& replica, Sequence& sequence, std::int32_t columns,
                             CutPlaces& places) noexcept {
    if (places.place.node() == nullptr) return;
    sequence.storing = 0;  // pages on their way arrive without it
    if (places.host_place.node() != nullptr) {
        replica.host->let_go(std::exchange(sequence.host_node, places.host_place.release()));
    }
    sequence.committed = columns;
    replica.tree.unpin(std::exchange(sequence.node, places.place.release()), true);
}

// With `transfers` the caller copies at once, and both pages are held until it has; without, the
// copy is on the list that take_copies hands out before the next kernels run.
void CacheManager::owe_cached_copy(const PageCopy& copy, TreePosition source, Replica& replica,
                                   Transfers* transfers) noexcept {
    if (transfers == nullptr) return put_on_list(copy);
    ledger_->add(copy, PageHold::pin(replica.pool, replica.tree, source, copy.source),
                 PageHold::share(replica.pool, copy.destination), *transfers);
}

// The same of a page that forks hold: the reference given up is the one that holds it.
void CacheManager::owe_shared_copy(const PageCopy& copy, Replica& replica,
                                   Transfers* transfers) noexcept {
    if (transfers == nullptr) {
        put_on_list(copy);
        return replica.pool.free(&copy.source, 1);
    }
    ledger_->add(copy, PageHold::adopt(replica.pool, copy.source),
                 PageHold::share(replica.pool, copy.destination), *transfers);
}

// What is written next lies in pages that others may read, in the tree or as forks: the sequence
// gets pages of its own there, the first with what it keeps of the old one. Behind what it needs
// it lets go of them.
void CacheManager::thaw(Reservation& reservation, Replica& replica, SequenceHandle handle,
                        Sequence& sequence, Transfers* transfers) noexcept {
    const Admission& admission = reservation.admission;
    const auto first = static_cast<std::int32_t>(admission.start / config_.page_size);
    const auto kept_tokens = static_cast<std::int32_t>(admission.start % config_.page_size);
    const std::int32_t end = std::min(sequence.frozen, admission.needed);
    if (sequence.frozen > admission.needed) drop_columns(replica, sequence, admission.needed);
    for (std::int32_t column = first; column < end; ++column) {
        if (is_sole_holder(sequence, column, admission.start)) continue;
        BlockId& page = sequence.pages[static_cast<std::size_t>(column)];
        const BlockId source = page;
        take_pages(replica, 1, &page);
        ++sequence.row_version;
        const bool is_copied = column == first && kept_tokens > 0;
        const PageCopy copy{sequence.replica, source, page, kept_tokens, handle};
        if (is_copied && transfers != nullptr) ++sequence.num_pending;
        if (is_own(sequence, column)) {
            if (is_copied) {
                owe_shared_copy(copy, replica, transfers);
            } else {
                replica.pool.free(&source, 1);
            }
        } else if (is_copied) {
            owe_cached_copy(copy, {sequence.node, column + 1}, replica, transfers);
        }
    }
    sequence.kept.erase(std::lower_bound(sequence.kept.begin(), sequence.kept.end(), first),
                        sequence.kept.end());
    sequence.frozen = first;
    move_back(replica, sequence, first, reservation.cut);
}

// Every position of a claim counts once, as input or as cached; a longer hit moves what it covers.
void CacheManager::count_hit(const Admission& admission, Sequence& sequence) noexcept {
    Metrics& metrics = replica_at(sequence.replica).metrics;
    const std::int64_t covered = std::min(sequence.counted_end, admission.hit_tokens) -
                                 std::max(sequence.counted_from, sequence.hit_tokens);
    metrics.input_tokens -= std::max<std::int64_t>(0, covered);
    metrics.cache_tokens += admission.hit_tokens - sequence.hit_tokens;
    metrics.copied_tokens += admission.match.partial_tokens;
    sequence.hit_tokens = admission.hit_tokens;
}

// True when the request now stands elsewhere.
bool CacheManager::apply(Reservation& made, Sequence& sequence, RequestView& request,
                         std::int64_t row, Transfers* transfers) noexcept {
    const Admission& admission = made.admission;
    Replica& replica = replica_at(sequence.replica);
    if (admission.shares()) {
        take_hit(admission, replica, sequence, made.place.release());
    } else if (sequence.node == nullptr) {
        sequence.node = made.place.release();
    }
    if (admission.appended > 0) {
        const std::size_t held = sequence.pages.size();
        sequence.pages.resize(held + static_cast<std::size_t>(admission.appended));
        take_pages(replica, admission.appended, &sequence.pages[held],
                   guard_of(admission, sequence));
    }
    if (sequence.frozen > admission.start / config_.page_size) {
        thaw(made, replica, request.sequence, sequence, transfers);
    }
    note_peak(replica);  // before a copy holds its source for a moment
    if (admission.match.partial_tokens > 0) {
        const TreePosition& source = admission.match.partial;
        BlockId source_page = 0;
        replica.tree.copy_pages(source, source.depth - 1, &source_page);
        if (transfers != nullptr) ++sequence.num_pending;
        owe_cached_copy({sequence.replica, source_page,
                         sequence.pages[static_cast<std::size_t>(admission.hit_pages)],
                         admission.match.partial_tokens, request.sequence},
                        source, replica, transfers);
    }
    if (made.load != nullptr) owe_load(made, sequence, *transfers);
    if (sequence.count_epoch != count_epoch_) {
        sequence.count_epoch = count_epoch_;
        sequence.counted_from = sequence.counted_end;
    }
    sequence.written =
        admission.takes_hit ? admission.start : std::min(sequence.written, admission.start);
    if (admission.takes_hit) count_hit(admission, sequence);
    if (!sequence.is_sealed()) {
        if (admission.takes_hit) sequence.reuse = Reuse::kOpen;
        if (admission.declines_partial) sequence.reuse = Reuse::kDeclined;
    }
    count_input(admission.start, admission.active, sequence);
    const bool has_moved = request.start != admission.start || request.active != admission.active;
    if (has_moved && transfers != nullptr) {
        transfers->moved.push_back({row, request.start, request.active});
    }
    request.start = admission.start;
    request.active = admission.active;
    return has_moved;
}

// The positions of a claim that begins again count when it is reserved again.
void CacheManager::uncount(const Sequence& sequence) noexcept {
    Metrics& metrics = replica_at(sequence.replica).metrics;
    const bool is_known = sequence.count_epoch == count_epoch_;
    const std::int64_t from = is_known ? sequence.counted_from : sequence.counted_end;
    const std::int64_t first = std::max(from, sequence.hit_tokens);
    metrics.input_tokens -= std::max<std::int64_t>(0, sequence.counted_end - first);
    metrics.cache_tokens -= std::max<std::int64_t>(0, sequence.hit_tokens - from);
    if (is_known) metrics.copied_tokens -= sequence.hit_tokens % config_.page_size;
}

void CacheManager::begin_again(Sequence& sequence) noexcept {
    Replica& replica = replica_at(sequence.replica);
    uncount(sequence);
    drop_columns(replica, sequence, 0);
    if (sequence.node != nullptr) replica.tree.unpin(std::exchange(sequence.node, nullptr), true);
    if (sequence.host_node != nullptr) {
        replica.host->let_go(std::exchange(sequence.host_node, nullptr));
    }
    sequence.committed = sequence.frozen = 0;
    sequence.storing = 0;
    sequence.reuse = Reuse::kOpen;
    sequence.hit_tokens = sequence.written = 0;
    sequence.counted_from = sequence.counted_end = 0;
}

void CacheManager::begin_again(SequenceHandle handle) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Sequence& sequence = sequences_.at(handle);
    if (sequence.num_pending > 0) {
        if (is_under_way(handle)) refuse_pending(-1);
        drop_owed(handle);
        sequence.num_pending = 0;
    }
    forget_copies(handle, sequence, 0);
    begin_again(sequence);
}

ReserveStatus CacheManager::reserve(RequestView& request, std::int64_t num_steps,
                                    Transfers* transfers) {
    return reserve_batch({&request, 1}, num_steps, transfers).status;
}

BatchReserve CacheManager::reserve_batch(const RequestBatch& batch, std::int64_t num_steps,
                                         Transfers* transfers) {
    const std::int64_t n = batch.size();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (transfers != nullptr || config_.host_pages > 0) require_transfers(transfers);
    check_batch(batch, num_steps);
    const CallScope scope(*ledger_);
    for (std::int64_t i = 0; i < n; ++i) {
        Sequence& sequence = *batch_[static_cast<std::size_t>(i)];
        if (sequence.num_pending > 0) return {i, ReserveStatus::kPending};
        if (!ledger_->copies.empty()) freeze_read_pages(sequence, batch[i].start);
        if (sequence.is_sealed() && is_reserved(sequence, batch[i], num_steps)) {
            sequence.written = std::min(sequence.written, batch[i].start);
            count_input(batch[i].start, batch[i].active, sequence);
            continue;
        }
        const Admission admission = admit(sequence, batch[i], num_steps, true);
        // What the rows before copy from is held: it may be what this one has to evict.
        const bool waits = admission.evicted > 0 && transfers != nullptr && !transfers->empty();
        if (waits) return {i, ReserveStatus::kPending};
        if (!admission.fits) return {i, ReserveStatus::kNoSpace};
        try {
            Reservation made = prepare(admission, sequence, batch[i], transfers);
            apply(made, sequence, batch[i], i, transfers);
        } catch (const std::bad_alloc&) {
            if (i == 0) throw;
            return {i, ReserveStatus::kPending};  // a call that begins with this row will say it
        }
    }
    return {n, ReserveStatus::kOk};
}

}  // namespace kvcore
