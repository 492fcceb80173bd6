// SPDX-License-Identifier: Apache-2.0
// What is copied between two calls: given out, finished, owed again, waited for. The bytes are
// moved by the caller, while the mutex is free.
#include <algorithm>
#include <stdexcept>

#include "kvcore/errors.hpp"
#include "manager/transfer_ledger.hpp"

namespace kvcore {

// Not asked without transfers where there is no host tier.
void CacheManager::require_transfers(Transfers* transfers) const {
    if (transfers == nullptr) {
        throw std::invalid_argument(
            detail::concat("transfers are missing, must be given to a manager with ",
                           config_.host_pages, " host pages"));
    }
    if (!transfers->empty()) {
        throw std::invalid_argument(detail::concat("transfers hold those of ticket ",
                                                   transfers->ticket,
                                                   ", must be empty; finish and clear them first"));
    }
    if (!listed_copies_.empty()) {
        throw std::invalid_argument(
            detail::concat("transfers are given, but ", listed_copies_.size(),
                           " copies are on the list; take_copies first, and use one way of both"));
    }
    transfers->clear();  // a call that gave out nothing may have moved requests
}

void CacheManager::refuse_pending(std::int64_t row) {
    throw InRow<PendingTransfersError>(
        row, "copies into its pages are owed or under way; finish them first");
}

void CacheManager::finish(std::uint64_t ticket, bool done) {
    bool is_known = false;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (Ledger::Copy& copy : ledger_->copies) {
            if (copy.ticket != ticket || ticket == 0) continue;
            is_known = true;
            copy.ticket = 0;
            Sequence* sequence = sequences_.find(copy.copy.sequence);
            if (sequence != nullptr && !done) {
                spare_source(copy.copy, *sequence);
                continue;
            }
            if (sequence != nullptr) --sequence->num_pending;
            copy.copy.replica = -1;
        }
        const auto is_over = [](const Ledger::Copy& copy) { return copy.copy.replica < 0; };
        ledger_->copies.erase(
            std::remove_if(ledger_->copies.begin(), ledger_->copies.end(), is_over),
            ledger_->copies.end());
        for (HostFlight& flight : ledger_->flights) {
            if (flight.ticket != ticket || ticket == 0) continue;
            is_known = true;
            if (flight.direction == HostDirection::kStore) {
                finish_store(flight, done);
            } else {
                finish_load(flight, done);
            }
            flight.ticket = 0;
        }
        const auto has_landed = [](const HostFlight& flight) { return flight.ticket == 0; };
        ledger_->flights.erase(
            std::remove_if(ledger_->flights.begin(), ledger_->flights.end(), has_landed),
            ledger_->flights.end());
    }
    if (!is_known) {
        throw InvalidHandleError(detail::concat("the transfers of ticket ", ticket,
                                                " are not under way: they were finished before; "
                                                "finish them once"));
    }
    finished_.notify_all();
}

// Who was to go on in the source, behind the copy, must not while that is owed. O(sequences).
void CacheManager::spare_source(const PageCopy& copy, const Sequence& sequence) noexcept {
    const auto at = std::find(sequence.pages.begin(), sequence.pages.end(), copy.destination);
    const auto column = static_cast<std::int32_t>(at - sequence.pages.begin());
    const SequenceTable::Slots live = sequences_.live();
    for (Sequence* other = live.data; other != live.data + live.size; ++other) {
        const bool holds = other->replica == copy.replica && other->num_pages() > column &&
                           other->pages[static_cast<std::size_t>(column)] == copy.source;
        if (holds) other->frozen = std::max(other->frozen, column + 1);
    }
}

OwedStatus CacheManager::take_owed(SequenceHandle handle, Transfers& transfers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Sequence* sequence = sequences_.find(handle);
    if (sequence == nullptr || sequence->num_pending == 0) return OwedStatus::kNone;
    make_room(transfers.copies, sequence->num_pending);
    bool is_taken = false;
    for (Ledger::Copy& copy : ledger_->copies) {
        if (copy.copy.sequence != handle || copy.ticket != 0) continue;
        ledger_->give_out(copy, transfers);
        is_taken = true;
    }
    return is_taken ? OwedStatus::kTaken : OwedStatus::kUnderWay;
}

bool CacheManager::is_under_way(SequenceHandle handle) const noexcept {
    const auto is_copied = [handle](const Ledger::Copy& copy) {
        return copy.ticket != 0 && copy.copy.sequence == handle;
    };
    const auto is_loaded = [handle](const HostFlight& flight) {
        return flight.direction == HostDirection::kLoad && flight.sequence == handle;
    };
    return std::any_of(ledger_->copies.begin(), ledger_->copies.end(), is_copied) ||
           std::any_of(ledger_->flights.begin(), ledger_->flights.end(), is_loaded);
}

void CacheManager::wait(SequenceHandle handle) const {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_under_way = [handle](const auto& each, SequenceHandle sequence) {
        if (each.ticket == 0 || sequence != handle) return false;
        if (each.owner != std::this_thread::get_id()) return true;
        throw std::logic_error("a thread waits for transfers of its own; finish them first");
    };
    finished_.wait(lock, [&] {
        if (sequences_.find(handle) == nullptr) return true;
        for (const Ledger::Copy& copy : ledger_->copies) {
            if (is_under_way(copy, copy.copy.sequence)) return false;
        }
        for (const HostFlight& flight : ledger_->flights) {
            const bool is_load = flight.direction == HostDirection::kLoad;
            if (is_load && is_under_way(flight, flight.sequence)) return false;
        }
        return true;
    });
}

// A sequence goes: what is owed to it is not any more, what is under way ends without it.
void CacheManager::drop_owed(SequenceHandle handle) noexcept {
    const auto is_owed = [handle](const Ledger::Copy& copy) {
        return copy.copy.sequence == handle && copy.ticket == 0;
    };
    ledger_->copies.erase(std::remove_if(ledger_->copies.begin(), ledger_->copies.end(), is_owed),
                          ledger_->copies.end());
}

std::vector<PageCopy> CacheManager::take_copies() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<PageCopy> taken;
    taken.reserve(listed_copies_.size());
    for (const PageCopy& copy : listed_copies_) {
        if (sequences_.find(copy.sequence) == nullptr) continue;
        const bool is_another_forks = !taken.empty() && taken.back() == copy;
        if (!is_another_forks) taken.push_back(copy);
    }
    listed_copies_.clear();
    return taken;
}

void CacheManager::put_on_list(const PageCopy& copy) noexcept {
    prune_copies();
    listed_copies_.push_back(copy);  // there is room
}

// A caller that never takes them must not gather those of sequences long gone.
void CacheManager::prune_copies() noexcept {
    if (listed_copies_.size() < prune_copies_at_) return;
    const auto is_gone = [this](const PageCopy& listed) {
        return sequences_.find(listed.sequence) == nullptr;
    };
    listed_copies_.erase(std::remove_if(listed_copies_.begin(), listed_copies_.end(), is_gone),
                         listed_copies_.end());
    prune_copies_at_ = std::max<std::size_t>(64, 2 * listed_copies_.size());
}

// Copies into pages that are given up; whoever gets those next must not find them written.
void CacheManager::forget_copies(SequenceHandle handle, const Sequence& sequence,
                                 std::int32_t from) noexcept {
    const auto is_dropped = [&](const PageCopy& copy) {
        return copy.sequence == handle &&
               std::find(sequence.pages.begin() + from, sequence.pages.end(), copy.destination) !=
                   sequence.pages.end();
    };
    listed_copies_.erase(std::remove_if(listed_copies_.begin(), listed_copies_.end(), is_dropped),
                         listed_copies_.end());
}

}  // namespace kvcore
