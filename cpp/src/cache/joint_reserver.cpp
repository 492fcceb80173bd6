// SPDX-License-Identifier: Apache-2.0
#include "cache/joint_reserver.hpp"

#include <algorithm>
#include <utility>

#include "level/quotas.hpp"
#include "support/make_room.hpp"

namespace kvcore {

namespace {

FetchResult no_space(std::int64_t row, std::int64_t needed, std::int64_t available) {
    FetchResult result;
    result.status = FetchStatus::kNoSpace;
    result.row = row;
    result.needed = needed;
    result.available = available;
    return result;
}

}  // namespace

bool JointReserver::reserve(const BatchRows& rows, const RequestBatch& batch,
                            const std::vector<std::int64_t>& missing, std::int64_t num_steps,
                            Transfers* transfers, FetchResult& result) {
    const Call call{rows, batch, missing, num_steps, transfers};
    sort(call);
    if (try_reserve(call, result)) return true;
    if (result.status != FetchStatus::kNoSpace || result.lacks_slot) return false;
    const std::int64_t lacking = result.is_over_quota ? 0 : result.needed - result.available;
    if (state_.flights.holds_back(rows[result.row].replica, lacking))
        result.status = FetchStatus::kPending;
    return false;
}

bool JointReserver::try_reserve(const Call& call, FetchResult& result) {
    if (joining_.empty()) {
        if (!find_supply(call, result) || !has_columns(call, {}, result)) return false;
        std::vector<Reservation> none;
        if (!state_.config.quotas.empty() && !heed_quotas(call, none, result)) return false;
        prepare_growth(call);
        if (spill(call, none, result)) return false;
        prepare_room(call, none);
        evict_for_growth();
        grow(call);
        return true;
    }
    return call.missing.size() > 1 ? reserve_together(call, result) : reserve_one(call, result);
}

// Pages and columns that a replica needs before the first row is applied. A row makes pages free
// only for later rows, so the need is the largest sum over the first rows. Called after
// `prepare_growth`.
PageNeed JointReserver::need_of(std::int32_t replica, const Call& call,
                                const std::vector<Reservation>& made) const noexcept {
    PageNeed need;
    PageNeed taken;
    const auto add = [&](const PageNeed& more) {
        taken.pages += more.pages;
        taken.columns += more.columns;
        need.pages = std::max(need.pages, taken.pages);
        need.columns = std::max(need.columns, taken.columns);
    };
    for (std::size_t k = 0; k < made.size(); ++k) {
        if (call.rows[joining_[k]].replica == replica) add(made[k].admission.need());
    }
    const std::int64_t wanted = supply_[static_cast<std::size_t>(replica)].wanted;
    add({wanted * state_.grouping.pages_per_column(), wanted});
    return need;
}

// Called after `spill`, before anything else changes: checks that all rows find what they take, and
// gets memory for it. Each row evicts what it takes when its turn comes.
void JointReserver::prepare_room(const Call& call, const std::vector<Reservation>& made) {
    for (std::int32_t r = 0; r < state_.config.num_replicas; ++r) {
        state_.replicas[static_cast<std::size_t>(r)]->prepare_room(need_of(r, call, made));
    }
}

void JointReserver::evict_for_growth() {
    for (std::size_t r = 0; r < state_.replicas.size(); ++r) {
        const std::int64_t wanted = supply_[r].wanted;
        state_.replicas[r]->make_room({wanted * state_.grouping.pages_per_column(), wanted});
    }
}

// What is evicted for rows is stored first where it has to be: see Reserver::spill.
bool JointReserver::spill(const Call& call, const std::vector<Reservation>& made,
                          FetchResult& result) {
    if (call.transfers == nullptr || !state_.flights.rules().writes_back()) return false;
    for (std::int32_t r = 0; r < state_.config.num_replicas; ++r) {
        const PageNeed need = need_of(r, call, made);
        if (!state_.flights.spill(r, need, {}, *call.transfers)) continue;
        result.status = FetchStatus::kPending;
        result.row = call.missing[0];
    }
    return result.status == FetchStatus::kPending;
}

// Rows that can take no hit, do not begin again and replace no page need nothing but more pages, of
// all bundles: what most rows of a decode step need. It stays so while other rows are reserved.
void JointReserver::sort(const Call& call) {
    growing_.clear();
    joining_.clear();
    const std::int64_t page_size = state_.config.page_size;
    for (const std::int64_t row : call.missing) {
        const Sequence& sequence = call.rows[row];
        const bool only_grows = !state_.states.exist() && sequence.is_sealed() &&
                                !sequence.pages.empty() &&
                                call.batch[row].start >= sequence.pages.frozen() * page_size;
        const Growth growth{row, only_grows ? missing_columns(call, row) : 0};
        if (only_grows && (state_.grouping.is_plain() || grows_evenly(call, growth))) {
            growing_.push_back(growth);
        } else {
            joining_.push_back(row);
        }
    }
}

// With groups: which columns get pages of windows is else the Admitter's to say.
bool JointReserver::grows_evenly(const Call& call, Growth growth) const {
    const RequestView& request = call.batch[growth.row];
    const std::int64_t tokens = request.active + call.num_steps - 1;
    const PageRow& pages = call.rows[growth.row].pages;
    const std::int64_t in_front = pages.size() + growth.columns - 1;
    return state_.config.quotas.empty() && tokens > in_front * state_.config.page_size &&
           state_.windows.grows_evenly(request.sequence, pages);
}

// What `reserve` does.
bool JointReserver::reserve_one(const Call& call, FetchResult& result) {
    const std::int64_t row = call.missing[0];
    Sequence& sequence = call.rows[row];
    RequestView& request = call.batch[row];
    Asked asked{call.num_steps};
    asked.runs = true;
    const Admission admission = admitter_.admit(sequence, request, asked);
    rules::require_one_step(request, admission, call.num_steps, row);
    if (!admission.fits) {
        if (admission.is_over_quota) count_refusal(call, row);
        result = no_space(row, admission.new_pages(), admission.available);
        result.is_over_quota = admission.is_over_quota;
        result.lacks_slot = admission.lacks_slot;
        return false;
    }
    Reservation made = reserver_.prepare(admission, sequence, request, call.transfers);
    if (call.transfers != nullptr && reserver_.spill(made, sequence, *call.transfers)) {
        result.status = FetchStatus::kPending;
        result.row = row;
        return false;
    }
    reserver_.evict(made, sequence, request.sequence);
    result.has_moved = reserver_.apply(made, sequence, request, row, call.transfers);
    state_.home_of(sequence).end_room();
    return true;
}

std::int64_t JointReserver::missing_columns(const Call& call, std::int64_t row) const {
    const RequestView& request = call.batch[row];
    const std::int64_t tokens = state_.tokens_to_hold(request, request.active, call.num_steps);
    return ceil_div(tokens, state_.config.page_size) - call.rows[row].pages.size();
}

// Whether each replica has enough for its growing rows, free or evictable; the first row for which
// it has not goes to `result`.
bool JointReserver::find_supply(const Call& call, FetchResult& result) {
    supply_.clear();
    for (const auto& replica : state_.replicas) supply_.push_back({replica->num_free()});
    for (const Growth& growth : growing_) {
        const Sequence& sequence = call.rows[growth.row];
        Supply& supply = supply_[static_cast<std::size_t>(sequence.replica)];
        const std::int64_t pages = pages_of(growth);
        if (pages > supply.left && !supply.has_evictable) {
            supply.has_evictable = true;
            supply.left += state_.home_of(sequence).num_evictable();
        }
        if (pages > supply.left) {
            result = no_space(growth.row, pages, supply.left);
            return false;
        }
        supply.left -= pages;
    }
    return true;
}

// Counts what the growing rows want and gets memory for it, so that `grow` has that.
void JointReserver::prepare_growth(const Call& call) {
    supply_.assign(state_.replicas.size(), {});
    std::int64_t wanted = 0;
    for (const auto& [row, columns] : growing_) {
        Sequence& sequence = call.rows[row];
        sequence.pages.make_room(static_cast<std::size_t>(columns));
        supply_[static_cast<std::size_t>(sequence.replica)].wanted += columns;
        wanted += columns;
    }
    taken_.reserve(static_cast<std::size_t>(wanted));
}

void JointReserver::grow(const Call& call) {
    if (!state_.grouping.is_plain()) return grow_columns(call);
    taken_.clear();
    for (std::size_t r = 0; r < supply_.size(); ++r) {
        Supply& supply = supply_[r];
        Replica& replica = *state_.replicas[r];
        replica.require_pages(supply.wanted);
        supply.given = taken_.size();
        taken_.resize(taken_.size() + static_cast<std::size_t>(supply.wanted));
        replica.take_pages(supply.wanted, taken_.data() + supply.given);
        replica.note_peak();
    }
    for (const auto& [row, pages] : growing_) {
        Sequence& sequence = call.rows[row];
        std::size_t& given = supply_[static_cast<std::size_t>(sequence.replica)].given;
        if (PageOwners* owners = state_.home_of(sequence).owners.get()) {
            owners->give(taken_.data() + given, pages, state_.tenants.of(call.batch[row].sequence));
        }
        sequence.pages.append(taken_.data() + given, pages);
        given += static_cast<std::size_t>(pages);
    }
}

void JointReserver::grow_columns(const Call& call) {
    for (const auto& [row, columns] : growing_) {
        Sequence& sequence = call.rows[row];
        Replica& home = state_.home_of(sequence);
        PageRow& pages = sequence.pages;
        const std::int32_t size = pages.size();
        pages.take(home, columns);
        state_.windows.grow(home, call.batch[row].sequence, pages, size);
    }
    for (const auto& replica : state_.replicas) replica->note_peak();
}

// What each joining row would do by itself, but for the forks among them.
std::vector<Admission> JointReserver::admit_together(const Call& call, bool allow_partial) {
    const Departures::Call scope(departures_);
    std::vector<Admission> admissions;
    admissions.reserve(joining_.size());
    for (const std::int64_t row : joining_) {
        const Sequence& sequence = call.rows[row];
        Asked asked{call.num_steps};
        asked.runs = true;
        admissions.push_back(admitter_.admit(sequence, call.batch[row], asked, allow_partial));
        rules::require_one_step(call.batch[row], admissions.back(), call.num_steps, row);
        if (!allow_partial) admissions.back().declines_partial = true;
        departures_.note(state_.writer(sequence, admissions.back().start),
                         call.transfers != nullptr);
    }
    return admissions;
}

// Whether what each replica has left is enough for all missing rows, in the order of the batch; if
// not, the first row that goes without.
FetchResult JointReserver::share_out(std::vector<std::int64_t> left, const Call& call,
                                     const std::vector<Admission>& admissions) const {
    auto joining = joining_.begin();
    auto growing = growing_.begin();
    auto admission = admissions.begin();
    for (const std::int64_t row : call.missing) {
        std::int64_t needed = 0;
        if (joining != joining_.end() && *joining == row) {
            needed = admission->new_pages() - admission->returned;
            ++joining;
            ++admission;
        } else {
            needed = pages_of(*growing++);
        }
        std::int64_t& available = left[static_cast<std::size_t>(call.rows[row].replica)];
        if (needed > available) {
            return no_space(row, needed, available);
        }
        available -= needed;
    }
    return {};
}

// With groups: columns may be missing where pages are not. Asked when all hits are held.
bool JointReserver::has_columns(const Call& call, const std::vector<Admission>& admissions,
                                FetchResult& result) const {
    if (state_.grouping.is_plain()) return true;
    std::vector<std::int64_t> left;
    for (const auto& replica : state_.replicas) {
        left.push_back(replica->pool.num_free() + replica->tree.num_evictable());
    }
    for (std::size_t k = 0; k < joining_.size(); ++k) {
        std::int64_t& available = left[static_cast<std::size_t>(call.rows[joining_[k]].replica)];
        available -= admissions[k].appended + admissions[k].replaced + admissions[k].patched;
        if (available >= 0) continue;
        const std::int64_t pages = admissions[k].new_pages();
        result = no_space(joining_[k], pages, admissions[k].available);
        return false;
    }
    for (const Growth& growth : growing_) {
        const Sequence& sequence = call.rows[growth.row];
        std::int64_t& available = left[static_cast<std::size_t>(sequence.replica)];
        available -= growth.columns;
        if (available >= 0) continue;
        const std::int64_t could_have = state_.home_of(sequence).num_available();
        result = no_space(growth.row, pages_of(growth), could_have);
        return false;
    }
    return true;
}

// With states: slots for all rows that need some, in their order. A row whose hit nobody else holds
// may take over the checkpoint. Asked when all hits are held.
bool JointReserver::has_slots(const Call& call, const std::vector<Reservation>& made,
                              FetchResult& result) const {
    if (!state_.states.exist()) return true;
    std::vector<std::int64_t> left;
    for (const auto& replica : state_.replicas) left.push_back(replica->states->num_available());
    for (std::size_t k = 0; k < joining_.size(); ++k) {
        const std::int64_t row = joining_[k];
        const Admission& admission = made[k].admission;
        std::int64_t& available = left[static_cast<std::size_t>(call.rows[row].replica)];
        const bool takes_over =
            state_.states.of(call.batch[row].sequence).slot == ColumnStates::kNone &&
            available < admission.slots && made[k].checkpoint.is_sole();
        available -= admission.slots - (takes_over ? 1 : 0);
        if (available >= 0) continue;
        result = no_space(row, admission.new_pages(), admission.available);
        result.lacks_slot = true;
        return false;
    }
    return true;
}

// With groups: columns have to be evicted though there are pages.
bool JointReserver::lacks_columns(const Call& call,
                                  const std::vector<Admission>& admissions) const noexcept {
    if (state_.grouping.is_plain()) return false;
    for (std::size_t r = 0; r < state_.replicas.size(); ++r) {
        std::int64_t left = state_.replicas[r]->pool.num_free();
        for (std::size_t k = 0; k < admissions.size(); ++k) {
            const bool is_here = call.rows[joining_[k]].replica == static_cast<std::int32_t>(r);
            if (is_here) left -= admissions[k].need().columns;
        }
        for (const Growth& growth : growing_) {
            const bool is_here = call.rows[growth.row].replica == static_cast<std::int32_t>(r);
            if (is_here) left -= growth.columns;
        }
        if (left < 0) return true;
    }
    return false;
}

std::vector<Reservation> JointReserver::prepare(const Call& call,
                                                const std::vector<Admission>& admissions) {
    const std::size_t n = joining_.size();
    std::vector<Reservation> made;
    made.reserve(n);
    reserver_.make_room_for_copies(n, call.transfers);
    if (call.transfers != nullptr) make_room(call.transfers->moved, n);
    std::size_t loads = 0;
    std::size_t pages = 0;
    for (std::size_t k = 0; k < n; ++k) {
        const std::int64_t row = joining_[k];
        made.push_back(
            reserver_.prepare(admissions[k], call.rows[row], call.batch[row], call.transfers));
        if (made.back().load == nullptr) continue;
        ++loads;
        pages += static_cast<std::size_t>(made.back().load->num_pages);
    }
    if (loads > 0) state_.flights.make_room_for_loads(loads, pages, *call.transfers);
    return made;
}

// Whether quotas allow what the batch takes, in the order in which it is applied; all hits are held
// by now, pages that are copied from are not yet. If not, the row from which on they do not.
bool JointReserver::heed_quotas(const Call& call, std::vector<Reservation>& made,
                                FetchResult& result) {
    std::vector<QuotaTrial> trials;
    for (const auto& replica : state_.replicas) trials.emplace_back(*replica);
    for (std::size_t k = 0; k < made.size(); ++k) {
        const auto home = static_cast<std::size_t>(call.rows[joining_[k]].replica);
        trials[home].hold_once(made[k].idle);
    }
    FetchResult refusal;  // unless a later row makes room for it
    const auto take = [&](std::int64_t row, std::int64_t pages, const Reservation* reservation) {
        const Sequence& sequence = call.rows[row];
        const Owner owner = state_.tenants.of(call.batch[row].sequence);
        QuotaTrial& trial = trials[static_cast<std::size_t>(sequence.replica)];
        if (reservation != nullptr) {
            quotas::for_each_returned_page(state_.home_of(sequence), sequence.pages,
                                           reservation->admission,
                                           [&](BlockId page) { trial.give_back(page); });
        }
        trial.take(owner, pages);
        if (reservation != nullptr) {
            for (const BlockId page : reservation->idle) trial.share_out(page, owner);
        }
        if (trial.is_lawful() || refusal.is_over_quota) return;
        refusal = no_space(row, pages, trial.room(owner, pages));
        refusal.is_over_quota = true;
    };
    for (std::size_t k = 0; k < made.size(); ++k) {
        take(joining_[k], made[k].admission.new_pages(), &made[k]);
    }
    for (const Growth& growth : growing_) take(growth.row, pages_of(growth), nullptr);
    const bool is_lawful = std::all_of(trials.begin(), trials.end(),
                                       [](const QuotaTrial& trial) { return trial.is_lawful(); });
    if (is_lawful) return true;
    count_refusal(call, refusal.row);
    result = refusal;
    return false;
}

void JointReserver::count_refusal(const Call& call, std::int64_t row) noexcept {
    const Owner owner = state_.tenants.of(call.batch[row].sequence);
    state_.home_of(call.rows[row]).owners->tally(owner).refused += 1;
}

// Several rows against one state, so that the batch gets its pages as a whole or not at all. All
// hits are pinned first: what is evictable then is exactly what the batch may evict. Partial hits
// are dropped where something must be evicted, for one row's victim could be another's source.
// Rows that only grow come last: pages that others give back are there by then.
bool JointReserver::reserve_together(const Call& call, FetchResult& result) {
    std::vector<std::int64_t> left;
    for (const auto& replica : state_.replicas) left.push_back(replica->num_free());
    std::vector<Admission> admissions = admit_together(call, true);
    const bool evicts = share_out(left, call, admissions).status != FetchStatus::kOk ||
                        lacks_columns(call, admissions);
    if (evicts) admissions = admit_together(call, false);
    std::vector<Reservation> made = prepare(call, admissions);
    prepare_growth(call);
    if (evicts) {
        for (std::size_t r = 0; r < left.size(); ++r) left[r] = state_.replicas[r]->num_available();
        const FetchResult shared = share_out(std::move(left), call, admissions);
        if (shared.status != FetchStatus::kOk) {
            result = shared;
            return false;
        }
    }
    if (!has_columns(call, admissions, result) || !has_slots(call, made, result)) return false;
    if (!state_.config.quotas.empty() && !heed_quotas(call, made, result)) return false;
    if (evicts && spill(call, made, result)) return false;
    prepare_room(call, made);
    for (std::size_t k = 0; k < joining_.size(); ++k) {
        const std::int64_t row = joining_[k];
        Sequence& sequence = call.rows[row];
        reserver_.evict(made[k], sequence, call.batch[row].sequence);
        result.has_moved |=
            reserver_.apply(made[k], sequence, call.batch[row], row, call.transfers);
        state_.home_of(sequence).end_room();
    }
    evict_for_growth();
    grow(call);
    return true;
}

}  // namespace kvcore
