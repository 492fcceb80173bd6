// SPDX-License-Identifier: Apache-2.0
// Part of group_world.hpp: the rest of its verbs.
#pragma once

#include "traffic/group_world.hpp"

inline void GroupWorld::end() {
    hit_.reset();
    while (!open_.empty()) finish();
    while (!live_.empty()) release();
    while (!pins_.empty()) unpin();
    if (store_) store_->drain();
    check_state();
    rows_.manager.reset_prefix_cache();
    for (std::int32_t r = 0; r < config().num_replicas; ++r) {
        CHECK_EQ(rows_.manager.stats(r).free_pages, config().num_pages);
        CHECK_EQ(rows_.manager.stats(r).host_cached_pages, 0);
    }
}

inline void GroupWorld::commit(const std::vector<GroupRow*>& batch,
                               const kvcore::SequenceHandle* forked) {
    for (const GroupRow* row : batch) {
        if (forked != nullptr && row->request.sequence == *forked) fork_of(*row);
    }
    std::vector<kvcore::RequestView> views;
    for (std::size_t i = 0; i < batch.size(); ++i) {
        Request& request = batch[i]->request;
        request.start = written_[i];
        if (request.start == request.end()) request.append(static_cast<TokenId>(random_.below(2)));
        request.active = request.end();
        views.push_back(request.view());
    }
    written_.clear();
    std::vector<kvcore::PageSwap> swaps;
    kvcore::Transfers stores;
    rows_.manager.commit({views.data(), count(views)}, swaps,
                         config().host_pages > 0 ? &stores : nullptr);
    if (!stores.empty()) open_.push_back(stores);
    for (GroupRow* row : batch) {
        rows_.advanced(*row, row->request.start);
        rows_.read(*row);  // pages after a swap have the same content
        if (random_.chance(40)) chunk(row->request);
    }
}

// A new prompt that needs the cache's pages.
inline void GroupWorld::crowd_out() {
    if (live_.size() >= 5) return release();
    const std::int64_t most = config().max_seq_len - 8;
    const std::int64_t n = std::min(most, random_.between(8, most));
    std::vector<TokenId> prompt;
    for (std::int64_t i = 0; i < n; ++i) prompt.push_back(static_cast<TokenId>(9 + i));
    live_.push_back(rows_.claimed(Request("", prompt), any_replica()));
    const kvcore::SequenceHandle handle = live_.back().request.sequence;
    reserve(live_.back());
    if (!live_.empty() && live_.back().request.sequence == handle) drop(live_.back());
}

// End copies that were handed out: done or failed.
inline void GroupWorld::finish() {
    if (open_.empty()) return;
    const std::int64_t i = random_.below(count(open_));
    const kvcore::Transfers transfers = item(open_, i);
    const auto is_load = [](const kvcore::PageMove& move) { return move.is_load(); };
    const bool loads =
        std::any_of(transfers.tier_moves.begin(), transfers.tier_moves.end(), is_load);
    for (const auto& flight : kvcore::CacheManagerProbe::flights(rows_.manager).all()) {
        num_patches_ += flight.ticket == transfers.ticket ? count(flight.patches) : 0;
    }
    const bool done = random_.chance(80) || (loads && !loads_fail_);
    rows_.copy(transfers, done);
    rows_.manager.finish(transfers.ticket, done);
    if (!done) note_lost_loads(transfers);
    open_.erase(open_.begin() + i);
}

// A row whose loads failed is in the state of a new claim.
inline void GroupWorld::note_lost_loads(const kvcore::Transfers& transfers) {
    for (GroupRow& row : live_) {
        const bool has_lost =
            std::any_of(transfers.tier_moves.begin(), transfers.tier_moves.end(),
                        [&](const kvcore::PageMove& move) {
                            return move.is_load() && move.sequence == row.request.sequence;
                        });
        if (has_lost) note_begun_again(row);
    }
}

inline void GroupWorld::note_begun_again(GroupRow& row) const {
    row.request.start = 0;
    row.request.active = row.request.end();
    row.first.assign(row.first.size(), 0);
    row.reserved = row.size = 0;
    row.has_declined = false;
}

inline void GroupWorld::take_owed(GroupRow& row) {
    kvcore::Transfers transfers;
    const auto status = rows_.manager.take_owed(row.request.sequence, transfers);
    if (status != kvcore::OwedStatus::kTaken) return;
    rows_.copy(transfers);
    rows_.manager.finish(transfers.ticket);
}

inline void GroupWorld::fork() {
    if (!live_.empty() && live_.size() < 6) fork_of(random_.pick(live_));
}

inline void GroupWorld::fork_of(const GroupRow& parent) {
    if (live_.size() >= 7) return;
    const kvcore::Sequence& sequence = rows_.sequence(parent);
    const std::int64_t n = std::min(sequence.written, parent.request.start);
    const auto end = parent.request.tokens().begin() + n;
    std::vector<TokenId> all(parent.request.tokens().begin(), end);
    for (const TokenId token : tokens(random_.between(1, 6))) all.push_back(token);
    GroupRow child{Request(parent.request.name_space(), all), parent.replica};
    kvcore::RequestView view = child.request.view();
    const bool is_legal = rows_.can_read(parent, n);
    try {
        rows_.manager.fork(parent.request.view(), {&view, 1});
        CHECK(is_legal);
    } catch (const std::invalid_argument&) {
        return CHECK(!is_legal);
    } catch (const kvcore::PendingTransfersError&) {
        return;
    }
    child.request.sequence = view.sequence;
    child.request.start = view.start;
    child.request.active = view.active;
    CHECK_EQ(view.start, n);
    child.first.assign(parent.first.size(), 0);
    child.size = rows_.oracle.columns(n);
    if (child.size > 0) {
        child.first = parent.first;
        child.reserved = std::min(parent.reserved, child.size);
    }
    live_.push_back(child);
}

inline void GroupWorld::truncate() {
    if (live_.empty()) return;
    GroupRow& row = random_.pick(live_);
    Request& request = row.request;
    const std::int64_t n =
        random_.chance(50) ? request.start - random_.below(6) : random_.below(request.end());
    const kvcore::Sequence& sequence = rows_.sequence(row);
    const std::int64_t written = sequence.written;
    const std::int64_t most = sequence.is_sealed() ? std::max(sequence.counted_end, written) : 0;
    const bool is_legal =
        n >= 0 && n <= most && n >= written - config().max_draft_tokens && rows_.can_read(row, n);
    try {
        rows_.manager.truncate(request.sequence, n);
        CHECK(is_legal || row.first.empty());
    } catch (const std::invalid_argument&) {
        return CHECK(!is_legal);
    } catch (const kvcore::PendingTransfersError&) {
        return;
    }
    rows_.cut(row, rows_.oracle.columns(n));
    if (n >= request.start) return;
    request.start = n;
    request.rewind(n + 1);
    request.start = n;
}

// Set a request back without a call: as far as its windows allow.
inline void GroupWorld::set_back() {
    if (live_.empty()) return;
    GroupRow& row = random_.pick(live_);
    const std::int64_t n = random_.below(row.request.start + 1);
    kvcore::RequestView view = row.request.view();
    view.start = n;
    if (row.size == 0 || view.end > config().max_seq_len) return;
    if (rows_.can_read(row, n)) {
        row.request.rewind(n + 1);
        row.request.start = n;
        return;
    }
    CHECK_THROWS(std::invalid_argument, rows_.manager.plan(view));
    CHECK_THROWS(std::invalid_argument, rows_.manager.match(view));
    CHECK_THROWS(std::invalid_argument, rows_.manager.reserve(view));
    kvcore::FetchTarget targets[4];
    CHECK_THROWS(std::invalid_argument, rows_.manager.fetch({&view, 1}, 1, targets));
}

inline void GroupWorld::begin_again() {
    if (live_.empty()) return;
    GroupRow& row = random_.pick(live_);
    try {
        rows_.manager.begin_again(row.request.sequence);
    } catch (const kvcore::PendingTransfersError&) {
        return;
    }
    note_begun_again(row);
}

inline void GroupWorld::pin() {
    if (pins_.size() >= 2) return unpin();
    const Request prompt(random_.chance(10) ? "other" : "", this->prompt());
    const std::int32_t replica = any_replica();
    const std::int64_t hit = rows_.oracle.whole_hit(cached(replica), prompt, prompt.end());
    const kvcore::PinHandle handle = rows_.manager.pin(
        replica, prompt.name_space(), prompt.tokens().data(), count(prompt.tokens()));
    CHECK_EQ(handle.num_tokens, hit);
    pins_.push_back({handle, replica, prompt});
}

inline void GroupWorld::unpin() {
    if (pins_.empty()) return;
    rows_.manager.unpin(pins_.back().handle);
    pins_.pop_back();
}

// A hit that is held while other requests run, and is taken or dropped later.
inline void GroupWorld::hold() {
    hit_.reset();
    if (live_.empty()) return;
    GroupRow& row = random_.pick(live_);
    const Cached before = cached(row.replica);
    hit_ = rows_.manager.match(row.request.view());
    hit_of_ = row.request.sequence;
    kvcore::ReservePlan plan;
    plan.hit_tokens = hit_->num_tokens();
    if (plan.hit_tokens > 0) {
        const std::int64_t held = rows_.sequence(row).hit_tokens;
        plan.copied_tokens = plan.hit_tokens % config().page_size;
        plan.hit_tokens -= held;
    }
    plan.fits = true;
    check_plan(row, plan, before);
}

inline void GroupWorld::allocate() {
    if (!hit_) return hold();
    const auto at = std::find_if(live_.begin(), live_.end(), [&](const GroupRow& row) {
        return row.request.sequence == hit_of_;
    });
    if (at == live_.end()) return hit_.reset();
    GroupRow& row = *at;
    const std::int64_t hit_before = rows_.sequence(row).hit_tokens;
    kvcore::RequestView view = row.request.view();
    kvcore::Transfers transfers;
    try {
        const auto status =
            rows_.manager.allocate(*hit_, view, view.end, copies_later_ ? &transfers : nullptr);
        if (status != kvcore::ReserveStatus::kOk) return settle_copies(transfers);
    } catch (const std::invalid_argument&) {
        return hit_.reset();  // the request was reserved meanwhile
    } catch (const kvcore::CapacityError&) {
        return hit_.reset();
    }
    row.has_declined = true;
    hit_.reset();
    reserved(row, view, hit_before, 1, transfers);
}

inline std::set<BlockId> GroupWorld::pinned(std::int32_t replica, const Cached& cached) const {
    std::set<BlockId> pages;
    for (const Pin& pin : pins_) {
        if (pin.replica != replica) continue;
        const std::int64_t n = pin.handle.num_tokens;
        const auto path = rows_.oracle.path(cached, pin.prompt, n);
        CHECK_EQ(count(path) * config().page_size, n);
        rows_.add_full(pages, path);
        for (std::size_t w = 0; w < rows_.oracle.windows.size(); ++w) {
            const GroupOracle::Window& window = rows_.oracle.windows[w];
            for (std::int64_t c = rows_.oracle.first_column(w, n); c < count(path); ++c) {
                for (std::int64_t lane = 0; lane < window.lanes; ++lane) {
                    pages.insert(item(item(path, c)->pages, window.first_lane + lane));
                    CHECK(item(item(path, c)->pages, window.first_lane + lane) >= 0);
                }
            }
        }
    }
    return pages;
}

// Check that every page is free, cached or used, and that rows hold only these pages.
inline void GroupWorld::check_pages(std::int32_t replica, const Cached& cached) const {
    const kvcore::PoolStats stats = rows_.manager.stats(replica);
    std::set<BlockId> pages = rows_.used(live_, replica, cached, pinned(replica, cached));
    const auto used = static_cast<std::int64_t>(pages.size());
    const bool has_flights = !kvcore::CacheManagerProbe::flights(rows_.manager).all().empty();
    rows_.add_flights(pages, replica);
    const std::int64_t in_use = stats.total_pages - stats.available_pages();
    // A page that is copied out of a run pins the whole run.
    const auto& copies = kvcore::CacheManagerProbe::copies(rows_.manager);
    const bool is_exact =
        !hit_ && !has_flights && std::none_of(copies.begin(), copies.end(), [](const auto& copy) {
            return copy.source.at().node != nullptr;
        });
    if (is_exact) CHECK_EQ(in_use, used);
    CHECK(in_use >= used);
    // The peak leaves out sources of copies, which are held only for a moment.
    if (copies.empty()) CHECK(rows_.manager.metrics().peak_used_pages >= used);
    CHECK_EQ(stats.cached_pages, count_pages(cached));
    for (const auto& [digest, column] : cached) {
        pages.insert(column.pages.begin(), column.pages.end());
    }
    pages.erase(-1);
    CHECK_EQ(stats.free_pages, stats.total_pages - static_cast<std::int64_t>(pages.size()));
}

inline void GroupWorld::check_state() {
    rows_.manager.check_integrity();
    for (const GroupRow& row : live_) rows_.check_row(row);
    for (std::int32_t r = 0; r < config().num_replicas; ++r) {
        const Cached now = cached(r);
        check_pages(r, now);
        const Cached below = records(r);
        CHECK_EQ(rows_.manager.stats(r).host_cached_pages, count_pages(below));
        if (config().host_pages > 0) {
            rows_.check_cached(r, now);
            rows_.check_cached(r, below, kvcore::Tier::kHost);
        }
        const Request asked(random_.chance(10) ? "other" : "", prompt());
        const std::int64_t hit = rows_.oracle.whole_hit(now, asked, asked.end());
        const std::int64_t columns =
            rows_.manager.match(r, asked.name_space(), asked.tokens().data(), asked.end());
        CHECK_EQ(columns * config().page_size, hit);
    }
}
