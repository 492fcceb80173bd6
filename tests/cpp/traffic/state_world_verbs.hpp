// SPDX-License-Identifier: Apache-2.0
// Part of state_world.hpp: its verbs.
#pragma once

#include "traffic/state_world.hpp"

inline void StateWorld::check_reserved(Row& row, const kvcore::RequestView& view,
                                       const Expected& expected) {
    CHECK_EQ(view.start, expected.start);
    CHECK_EQ(view.active, expected.active);
    if (view.start != row.request.start || sequence(row).hit_tokens == view.start) {
        row.stands = view.start;
    }
    row.request.start = view.start;
    row.request.active = view.active;
    row.is_rejected = false;
}

inline bool StateWorld::reserve(Row& row) {
    const std::int64_t steps = random_.chance(80) ? 1 : random_.between(2, 5);
    const std::int64_t hit_before = sequence(row).hit_tokens;
    const std::int64_t free = manager_.stats(row.replica).free_pages;
    const kvcore::StateStats states = manager_.state_stats(row.replica);
    const bool is_pending = sequence(row).num_pending > 0;
    Row asked = row;
    const Expected expected = expect(asked, cached(row.replica));
    kvcore::RequestView view = row.request.view();
    kvcore::Transfers transfers;
    try {
        const kvcore::ReservePlan plan = manager_.plan(view, steps);
        CHECK(steps == 1 || !expected.is_cut);
        CHECK_EQ(plan.active, plan.fits ? expected.active : plan.active);
        const kvcore::ReserveStatus status = manager_.reserve(view, steps, later(transfers));
        if (status == kvcore::ReserveStatus::kPending) {
            CHECK(is_pending || config().write_policy == kvcore::WritePolicy::kWriteBack);
            return settle(transfers), false;
        }
        CHECK_EQ(plan.fits, status == kvcore::ReserveStatus::kOk);
        if (!plan.fits) {
            CHECK_EQ(manager_.stats(row.replica).free_pages, free);
            CHECK_EQ(manager_.state_stats(row.replica).available_slots, states.available_slots);
            if (states.available_slots == 0) ++num_refused;
            return false;
        }
    } catch (const std::invalid_argument&) {
        CHECK(steps > 1 && expected.is_cut);
        return false;
    } catch (const kvcore::CapacityError&) {
        drop(row);
        return false;
    }
    row.branch = asked.branch;
    row.prompt_end = asked.prompt_end;
    check_reserved(row, view, expected);
    CHECK(manager_.state_of(row.request.sequence) >= 0);
    if (sequence(row).hit_tokens > hit_before) ++num_hits;
    settle(transfers);
    return true;
}

// Run some rows, with several steps if all of them sample.
inline void StateWorld::step() {
    const bool finishes_all = random_.chance(60);
    while (finishes_all && !open_.empty()) finish(random_.chance(80));
    for (Row& row : live_) take_owed(row);
    std::vector<Row*> batch;
    for (Row& row : live_) {
        if (random_.chance(60)) batch.push_back(&row);
    }
    if (batch.empty()) return;
    const bool all_sample = std::all_of(batch.begin(), batch.end(), [](const Row* row) {
        return row->request.active == row->request.end();
    });
    const std::int64_t steps = all_sample && random_.chance(20) ? random_.between(2, 4) : 1;
    if (!fetch(batch, steps)) return random_.chance(50) ? release() : void();
    for (Row* row : batch) run(*row, steps);
    commit(batch);
}

inline bool StateWorld::fetch(const std::vector<Row*>& batch, std::int64_t steps) {
    std::vector<kvcore::RequestView> views;
    std::vector<std::int64_t> hits;
    for (const Row* row : batch) {
        views.push_back(row->request.view());
        hits.push_back(sequence(*row).hit_tokens);
    }
    std::vector<kvcore::FetchTarget> targets;
    for (Tables& tables : tables_) targets.push_back(tables.target());
    kvcore::FetchResult result;
    try {
        do {
            // A row's expectation depends on the cache before its reservation.
            kvcore::Transfers transfers;
            result = manager_.fetch({views.data(), count(views)}, steps, targets.data(),
                                    later(transfers));
            settle(transfers);
            const bool waits = result.status == kvcore::FetchStatus::kPending;
            while (waits && !open_.empty()) finish(random_.chance(90));
            for (std::size_t i = 0; i < batch.size(); ++i) {
                take_owed(*batch[i]);
                // The load has failed: the row is in the state of a new claim.
                const bool is_lost = batch[i]->request.start == 0 && views[i].start > 0 &&
                                     sequence(*batch[i]).pages.empty();
                if (!is_lost) continue;
                ++num_lost;
                note_begun_again(*batch[i]);
                views[i] = batch[i]->request.view();
            }
        } while (result.status == kvcore::FetchStatus::kPending);
    } catch (const kvcore::CapacityError&) {
        return false;
    } catch (const std::invalid_argument&) {
        CHECK(steps > 1);
        return false;
    }
    for (std::size_t i = 0; i < batch.size(); ++i) {
        Row& row = *batch[i];
        if (views[i].start == row.request.start) continue;
        if (reruns_alone(row)) {
            ++num_rerun_alone;
            CHECK(views[i].active <= row.request.start);
        }
        row.is_rejected = false;  // the request continues from the kept state
    }
    if (result.status == kvcore::FetchStatus::kNoSpace) {
        num_refused += result.lacks_slot ? 1 : 0;
        // The call may have reserved some rows before it had to make copies.
        for (std::size_t i = 0; i < batch.size(); ++i) {
            Row& row = *batch[i];
            row.request.start = views[i].start;
            row.request.active = views[i].active;
        }
        return false;
    }
    CHECK_EQ(result.status, kvcore::FetchStatus::kOk);
    std::vector<std::int64_t> next(tables_.size());
    for (std::size_t i = 0; i < batch.size(); ++i) {
        Row& row = *batch[i];
        row.request.start = views[i].start;
        row.request.active = views[i].active;
        row.branch = Probe::state(manager_, row.request.sequence).branch;
        row.prompt_end = Probe::state(manager_, row.request.sequence).prompt_end;
        CHECK(next_due(row, row.request.start) >= row.request.active);
        const std::int64_t at = item(next, row.replica)++;
        CHECK_EQ(item(item(tables_, row.replica).states, at),
                 manager_.state_of(row.request.sequence));
        if (sequence(row).hit_tokens > hits[i]) ++num_hits;
    }
    return true;
}

inline void StateWorld::run(Row& row, std::int64_t steps) {
    Request& request = row.request;
    if (request.start > 0) CHECK_EQ(content(row), request.digest(request.start));
    std::int64_t end = request.active;
    for (std::int64_t k = 1; k < steps; ++k, ++end) {
        request.append(static_cast<TokenId>(random_.below(2)));
    }
    content(row) = request.digest(end);
    row.ran = end;
}

inline void StateWorld::commit(const std::vector<Row*>& batch) {
    // In some rows the last tokens are drafts that the test rejects, and the request is cut.
    std::vector<kvcore::RequestView> views;
    const std::int64_t drafts = config().max_draft_tokens;
    for (Row* row : batch) {
        Request& request = row->request;
        const std::int64_t from = request.start;
        const std::int64_t run = row->ran - from;
        request.start = row->stands = row->ran;
        row->is_rejected = drafts > 0 && run > 1 && run <= 3 * drafts + 1 && random_.chance(50);
        if (row->is_rejected) {
            ++num_rejected;
            const std::int64_t n = random_.between(from + 1, row->ran - 1);
            request.rewind(n);
            request.start = n;
            row->stands = from;
        }
        row->ran = -1;
        if (request.start == request.end()) request.append(static_cast<TokenId>(random_.below(2)));
        request.active =
            random_.chance(60) ? request.end() : random_.between(request.start + 1, request.end());
        views.push_back(request.view());
    }
    std::vector<kvcore::PageSwap> swaps;
    kvcore::Transfers transfers;
    const bool is_alone = open_.empty();  // otherwise a load may have the tier's last slot
    manager_.commit({views.data(), count(views)}, swaps, later(transfers));
    settle(transfers);
    if (batch.size() > 1) return;
    const Row& row = *batch[0];
    const std::int64_t n = row.request.start;
    if (row.is_rejected) return;
    if (next_due(row, n - 1) != n) return;
    const kvcore::StateStats stats = manager_.state_stats(row.replica);
    while (!open_.empty()) finish(true);
    const Cached now = cached(row.replica);
    const auto found = now.find(row.request.digest(n));
    CHECK(found != now.end());
    CHECK(found->second.state >= 0 || stats.available_slots == 0);
    if (found->second.state >= 0) ++num_checkpoints;
    if (is_alone) check_stored(row, n);
}

// A row that lost its pages or its state in a failed load is in the state of a new claim.
inline void StateWorld::note_lost_loads() {
    for (Row& row : live_) {
        const bool is_lost = row.request.start > 0 && sequence(row).pages.empty();
        if (!is_lost) continue;
        ++num_lost;
        note_begun_again(row);
    }
}

// Prompts without a common prefix take a replica's pages and slots. Cached tokens then have to come
// back from the host tier.
inline void StateWorld::crowd_out() {
    const auto replica = static_cast<std::int32_t>(random_.below(config().num_replicas));
    std::vector<kvcore::SequenceHandle> crowd;
    auto status = kvcore::ReserveStatus::kOk;
    while (status == kvcore::ReserveStatus::kOk && random_.chance(70) &&
           manager_.stats(replica).num_sequences < config().max_sequences) {
        std::vector<TokenId> all(static_cast<std::size_t>(random_.between(8, 60)));
        for (TokenId& token : all) token = static_cast<TokenId>(2 + random_.below(1000));
        Request request("", all);
        request.sequence = manager_.claim(replica);
        crowd.push_back(request.sequence);
        kvcore::RequestView view = request.view();
        kvcore::Transfers transfers;
        status = manager_.reserve(view, 1, later(transfers));
        settle(transfers);
    }
    for (const kvcore::SequenceHandle handle : crowd) manager_.release(handle);
}

inline void StateWorld::fork() {
    if (live_.empty() || live_.size() >= 6) return;
    const Row& parent = random_.pick(live_);
    const std::int64_t n = std::min(sequence(parent).written, parent.request.start);
    const auto end = parent.request.tokens().begin() + n;
    std::vector<TokenId> all(parent.request.tokens().begin(), end);
    for (const TokenId token : tokens(random_.between(1, 6))) all.push_back(token);
    Row child{Request(parent.request.name_space(), all), parent.replica};
    kvcore::RequestView view = child.request.view();
    const kvcore::StateStats before = manager_.state_stats(parent.replica);
    kvcore::Transfers transfers;
    try {
        manager_.fork(parent.request.view(), {&view, 1}, later(transfers));
    } catch (const kvcore::CapacityError&) {
        CHECK_EQ(before.available_slots - manager_.state_stats(parent.replica).available_slots, 0);
        ++num_refused;
        return;
    } catch (const std::invalid_argument&) {
        return CHECK(n > 0 && (n != parent.stands || !config().groups.empty()));
    } catch (const kvcore::PendingTransfersError&) {
        return;
    }
    CHECK_EQ(view.start, n);
    child.request.sequence = view.sequence;
    child.request.start = child.stands = view.start;
    child.request.active = view.active;
    child.prompt_end = n > 0 ? (view.end - 1) / page() * page() : 0;
    live_.push_back(child);
    settle(transfers);
}

inline void StateWorld::truncate() {
    if (live_.empty()) return;
    Row& row = random_.pick(live_);
    Request& request = row.request;
    std::int64_t n = random_.below(request.start + 1);
    if (random_.chance(70)) n = n / page() * page();
    const std::int64_t written = sequence(row).written;
    const std::int64_t most =
        sequence(row).is_sealed() ? std::max(sequence(row).counted_end, written) : 0;
    const Cached now = cached(row.replica);
    const auto found = now.find(request.digest(n));
    const bool has = n > 0 && found != now.end() && found->second.state >= 0 &&
                     n <= sequence(row).pages.committed() * page();
    const bool is_kept = row.is_rejected && n >= row.stands && n > 0;
    const bool is_legal = n <= most && (n == 0 || n == row.stands || has || is_kept);
    const auto free = manager_.stats(row.replica).free_pages;
    kvcore::Transfers transfers;
    try {
        manager_.truncate(request.sequence, n, later(transfers));
        CHECK(is_legal);
    } catch (const std::invalid_argument&) {
        CHECK(!is_legal || !config().groups.empty());
        CHECK_EQ(manager_.stats(row.replica).free_pages, free);
        return;
    } catch (const kvcore::PendingTransfersError&) {
        return;
    }
    if (has && n != row.stands) ++num_truncated;
    settle(transfers);
    if (!is_kept) {
        row.stands = n;
        row.is_rejected = false;
    }
    if (n >= request.start) return;
    request.start = n;
    request.rewind(n + 1);
    request.start = n;
}

// Set a request back without a call, to a token that has no state.
inline void StateWorld::set_back() {
    if (live_.empty()) return;
    Row& row = random_.pick(live_);
    if (config().max_draft_tokens > 0) return;  // drafts keep states for some tokens
    kvcore::RequestView view = row.request.view();
    if (view.start < 2 || view.end > config().max_seq_len || sequence(row).pages.empty()) return;
    view.start = random_.between(1, view.start - 1);
    if (view.start == row.stands) return;
    CHECK_THROWS(std::invalid_argument, manager_.plan(view));
    CHECK_THROWS(std::invalid_argument, manager_.match(view));
    CHECK_THROWS(std::invalid_argument, manager_.reserve(view));
    kvcore::FetchTarget targets[4];
    CHECK_THROWS(std::invalid_argument, manager_.fetch({&view, 1}, 1, targets));
}

inline void StateWorld::begin_again() {
    if (live_.empty()) return;
    Row& row = random_.pick(live_);
    try {
        manager_.begin_again(row.request.sequence);
    } catch (const kvcore::PendingTransfersError&) {
        return;
    }
    note_begun_again(row);
    CHECK_EQ(manager_.state_of(row.request.sequence), -1);
}

inline void StateWorld::pin() {
    if (pins_.size() >= 2) {
        manager_.unpin(pins_.back());
        return pins_.pop_back();
    }
    const Request prompt(random_.chance(10) ? "other" : "", this->prompt());
    const auto replica = static_cast<std::int32_t>(random_.below(config().num_replicas));
    const Cached now = cached(replica);
    const kvcore::StateStats before = manager_.state_stats(replica);
    pins_.push_back(
        manager_.pin(replica, prompt.name_space(), prompt.tokens().data(), prompt.end()));
    CHECK_EQ(pins_.back().num_tokens, hit_of(now, prompt, prompt.end()));
    const std::int64_t taken =
        before.available_slots - manager_.state_stats(replica).available_slots;
    CHECK(taken <= (pins_.back().num_tokens > 0 ? 1 : 0));
}

// A hit that is held while other requests run, and is taken or dropped later.
inline void StateWorld::hold() {
    hit_.reset();
    if (live_.empty()) return;
    Row& row = random_.pick(live_);
    Row asked = row;
    const Expected expected = expect(asked, cached(row.replica));
    hit_ = manager_.match(row.request.view());
    hit_row_ = row.request.sequence;
    const bool is_hit = is_open(row) && expected.start > sequence(row).hit_tokens;
    CHECK_EQ(hit_->num_tokens(), is_hit ? expected.start : 0);
}

inline void StateWorld::allocate() {
    if (!hit_) return hold();
    const auto at = std::find_if(live_.begin(), live_.end(),
                                 [&](const Row& row) { return row.request.sequence == hit_row_; });
    if (at == live_.end()) return hit_.reset();
    Row& row = *at;
    kvcore::RequestView view = row.request.view();
    kvcore::Transfers transfers;
    try {
        const auto status = manager_.allocate(*hit_, view, view.end, later(transfers));
        if (status != kvcore::ReserveStatus::kOk) return;
    } catch (const std::invalid_argument&) {
        return hit_.reset();  // the request was reserved meanwhile
    } catch (const kvcore::CapacityError&) {
        return hit_.reset();
    }
    hit_.reset();
    row.request.start = row.stands = view.start;
    row.request.active = view.active;
    row.is_rejected = false;
    row.branch = Probe::state(manager_, hit_row_).branch;
    row.prompt_end = Probe::state(manager_, hit_row_).prompt_end;
    settle(transfers);
}
