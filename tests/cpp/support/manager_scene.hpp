// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "kvcore/request.hpp"
#include "support/check.hpp"
#include "support/request.hpp"

/// A way to use a manager.
struct Mode {
    const char* name;
    bool copies_at_once;  // each call gets transfers; else copies go to the list
    bool dedup;
    std::int64_t host_pages;
    bool prefix_caching = true;
    std::int64_t window = 0;  // tokens of a second group of layers; 0: only one group
    bool has_quotas = false;  // of a tenant without limits: all pages are counted
    std::int64_t explain_pages = 0;
    std::int64_t advice_sample = 0;
};

inline constexpr Mode kList{"list", false, true, 0};
inline constexpr Mode kListTwins{"list, no dedup", false, false, 0};
inline constexpr Mode kTransfers{"transfers", true, true, 0};
inline constexpr Mode kTransfersTwins{"transfers, no dedup", true, false, 0};
inline constexpr Mode kHost{"host tier", true, true, 12};
inline constexpr Mode kHostTwins{"host tier, no dedup", true, false, 12};
inline constexpr Mode kExplained{"misses explained", false, true, 0, true, 0, false, 30};
inline constexpr Mode kHostExplained{
    "host tier, misses explained", true, true, 12, true, 0, false, 30};
inline constexpr Mode kAdvised{"advice", false, true, 0, true, 0, false, 0, 1};
inline constexpr Mode kHostAdvised{
    "host tier, advice, no dedup", true, false, 12, true, 0, true, 30, 1};
inline constexpr Mode kNoCache{"no cache", true, true, 0, false};
inline constexpr std::array kGroupModes{
    Mode{"groups, list", false, true, 0, true, 6},
    Mode{"groups, list, no dedup", false, false, 0, true, 6},
    Mode{"groups, transfers", true, true, 0, true, 6},
    Mode{"groups, transfers, no dedup", true, false, 0, true, 6},
    Mode{"groups, no cache", true, true, 0, false, 6}};
inline constexpr std::array kGroupHostModes{
    Mode{"groups, host tier", true, true, 40, true, 6},
    Mode{"groups, host tier, no dedup", true, false, 40, true, 6},
    Mode{"groups, small host tier", true, true, 7, true, 6}};
inline constexpr std::array kModes{kNoCache,        kList, kListTwins, kTransfers,
                                   kTransfersTwins, kHost, kHostTwins};

/// A manager of two replicas and its requests. Steps build a state. The test then chooses views of
/// some requests and makes a call on them that allocates nothing outside the manager. ManagerText
/// prints everything observable of the scene.
class ManagerScene {
   public:
    static constexpr std::int32_t kPageSize = 4;
    static constexpr std::int32_t kReplicas = 2;

    explicit ManagerScene(const Mode& given_mode, std::int64_t num_blocks = 16)
        : mode(given_mode), manager(config_of(given_mode, num_blocks)) {
        for (std::int32_t i = 0; i < kReplicas; ++i) tables.push_back(std::make_unique<Table>());
        swaps.reserve(256);
    }

    struct Table {
        static constexpr std::int64_t kRows = 16;
        static constexpr std::int64_t kColumns = 64;
        std::vector<std::uint32_t> pages = std::vector<std::uint32_t>(kRows * kColumns, 7);
        std::vector<std::uint32_t> lengths = std::vector<std::uint32_t>(kRows);
        kvcore::LookupTable lookup{pages.data(), kRows, kColumns, ~0U};
        std::vector<std::uint32_t> window_pages = pages;
        kvcore::LookupTable windows{window_pages.data(), kRows, kColumns, ~0U};
        kvcore::LookupTable* more = &windows;
    };

    Mode mode;
    kvcore::CacheManager manager;
    std::vector<std::unique_ptr<Request>> requests;
    std::vector<std::unique_ptr<Table>> tables;
    std::vector<std::uint64_t> open_tickets;  // left in flight by the steps
    std::vector<kvcore::PinHandle> pins;
    std::vector<kvcore::HeldPages> holds;

    // The call under test:
    std::vector<std::size_t> rows;
    std::vector<kvcore::RequestView> views;  // of the rows
    kvcore::RequestView parent;
    kvcore::Transfers transfers;
    std::vector<kvcore::PageSwap> swaps;  // of all commits of a repeated call
    std::vector<kvcore::PageSwap> last_swaps;
    std::array<kvcore::FetchTarget, kReplicas> targets;
    std::array<std::int64_t, 6> answer{-1, -1, -1, -1, -1, -1};
    std::vector<BlockId> found;
    std::string text_found;  // other results, written when no allocation fails any more

    // ---- steps
    /// Hold pages `first` .. of a request.
    void hold(std::size_t i, std::size_t first) {
        const std::vector<BlockId> pages = manager.pages_of(at(i).sequence);
        const auto n = static_cast<std::int64_t>(pages.size() - first);
        holds.push_back(manager.hold(0, pages.data() + first, n));
    }
    std::size_t add(const Tokens& tokens, const std::string& name_space = "") {
        requests.push_back(std::make_unique<Request>(name_space, tokens));
        return requests.size() - 1;
    }
    std::size_t claim(const Tokens& tokens, const std::string& name_space = "",
                      std::int32_t replica = 0) {
        const std::size_t i = add(tokens, name_space);
        requests[i]->sequence = manager.claim(replica);
        return i;
    }
    [[nodiscard]] Request& at(std::size_t i) { return *requests[i]; }
    /// Reserve; the caller makes the copies.
    kvcore::ReserveStatus try_reserve(std::size_t i, kvcore::Transfers& owed) {
        kvcore::RequestView view = at(i).view();
        const auto status = manager.reserve(view, 1, mode.copies_at_once ? &owed : nullptr);
        at(i).start = view.start;
        at(i).active = view.active;
        return status;
    }
    void reserve(std::size_t i) {
        kvcore::Transfers owed;
        CHECK_EQ(try_reserve(i, owed), kvcore::ReserveStatus::kOk);
        end(owed);
    }
    /// Reserve, and leave the transfers in flight.
    void begin_reserve(std::size_t i) {
        kvcore::Transfers owed;
        CHECK_EQ(try_reserve(i, owed), kvcore::ReserveStatus::kOk);
        CHECK(owed.ticket != 0);
        open_tickets.push_back(owed.ticket);
    }
    bool fetch(const std::vector<std::size_t>& batch) {
        choose(batch);
        for (;;) {
            call_fetch();
            take_over();
            const auto status = static_cast<kvcore::FetchStatus>(answer[0]);
            if (status != kvcore::FetchStatus::kPending) {
                forget_call();
                return status == kvcore::FetchStatus::kOk;
            }
            if (transfers.empty()) return forget_call(), false;
            end(transfers);
            choose(batch);
        }
    }
    /// Apply a model step: all tokens have run, and `next` is sampled.
    void sample(std::size_t i, TokenId next) {
        at(i).start = at(i).end();
        at(i).append(next);
        at(i).active = at(i).end();
    }
    void commit(const std::vector<std::size_t>& batch) {
        choose(batch);
        call_commit();
        end(transfers);
        forget_call();
    }
    void run(std::size_t i, TokenId next) {
        CHECK(fetch({i}));
        sample(i, next);
        commit({i});
    }
    /// Run tokens one by one.
    void grow(std::size_t i, TokenId first, std::int64_t n) {
        for (std::int64_t k = 0; k < n; ++k) run(i, first + static_cast<TokenId>(k));
    }
    std::size_t served(const Tokens& tokens, TokenId next, const std::string& name_space = "",
                       std::int32_t replica = 0) {
        const std::size_t i = claim(tokens, name_space, replica);
        run(i, next);
        return i;
    }
    /// Leave the pages of a prompt cached and unused.
    std::size_t put(const Tokens& tokens, const std::string& name_space = "",
                    std::int32_t replica = 0) {
        const std::size_t i = served(tokens, 0, name_space, replica);
        manager.release(at(i).sequence);
        return i;
    }
    /// Leave the pages of prompts only in the host tier.
    void put_in_host(const std::vector<Tokens>& prompts, const std::string& name_space = "") {
        for (const Tokens& tokens : prompts) put(tokens, name_space);
        const auto page = std::int64_t{kPageSize};
        const std::int64_t rest = manager.stats(0).available_pages();
        const std::size_t all = claim(count_up(9000, rest * page));
        reserve(all);
        manager.release(at(all).sequence);
        for (const Tokens& tokens : prompts) {
            CHECK_EQ(manager.match(0, name_space, tokens.data(), page, nullptr), 0);
        }
    }
    /// Return an unclaimed request that continues the written tokens of its parent.
    std::size_t child_of(std::size_t i, const Tokens& tail) {
        const Request& from = at(i);
        Tokens tokens(from.tokens().begin(), from.tokens().begin() + from.start);
        tokens.insert(tokens.end(), tail.begin(), tail.end());
        return add(tokens, from.name_space());
    }
    std::size_t fork(std::size_t i, const Tokens& tail) {
        const std::size_t child = child_of(i, tail);
        parent = at(i).view();
        choose({child});
        call_fork();
        take_over();
        forget_call();
        return child;
    }
    void truncate(std::size_t i, std::int64_t n) {
        manager.truncate(at(i).sequence, n);
        at(i).rewind(n + 1);
    }
    void pin(std::size_t i, std::int32_t replica = 0) {
        const Request& request = at(i);
        pins.push_back(
            manager.pin(replica, request.name_space(), request.tokens().data(), request.end()));
    }
    void end(kvcore::Transfers& owed, bool done = true) {
        if (owed.ticket != 0) manager.finish(owed.ticket, done);
        owed.clear();
    }
    void end_open(bool done = true) {
        for (const std::uint64_t ticket : open_tickets) manager.finish(ticket, done);
        open_tickets.clear();
    }

    // ---- the call
    void choose(const std::vector<std::size_t>& batch) {
        rows = batch;
        views.clear();
        for (const std::size_t i : batch) views.push_back(at(i).view());
        for (std::size_t r = 0; r < kReplicas; ++r) {
            targets[r] = {&tables[r]->lookup, tables[r]->lengths.data()};
            targets[r].more = &tables[r]->more;
        }
    }
    [[nodiscard]] kvcore::RequestBatch batch() noexcept {
        return {views.data(), static_cast<std::int64_t>(views.size())};
    }
    [[nodiscard]] kvcore::Transfers* given() noexcept {
        return mode.copies_at_once ? &transfers : nullptr;
    }
    void call_plan() {
        const kvcore::ReservePlan plan = manager.plan(views[0]);
        answer = {plan.hit_tokens,    plan.new_pages,    plan.evicted_pages,
                  plan.copied_tokens, plan.fits ? 1 : 0, -1};
    }
    void call_reserve() {
        answer[0] = static_cast<std::int64_t>(manager.reserve(views[0], 1, given()));
    }
    /// Reserve with a short hit and a margin. Also plan an unclaimed request with the same options.
    void call_with_options() {
        const kvcore::ReserveOptions options{5, 1, views[0].end + 3};
        const kvcore::ReservePlan plan = manager.plan(1, views[0], 1, options);
        answer[0] = static_cast<std::int64_t>(manager.reserve(views[0], 1, given(), options));
        answer[1] = plan.fits ? plan.new_pages : -2;
    }
    /// The same in two calls.
    void call_match_and_allocate() {
        kvcore::PrefixHit hit = manager.match(views[0]);
        const auto status = manager.allocate(hit, views[0], views[0].end, given());
        answer[0] = static_cast<std::int64_t>(status);
    }
    /// Refused if the request already has pages.
    void call_begin_at() {
        try {
            answer[0] = static_cast<std::int64_t>(manager.begin_at(views[0], views[0].end - 1));
        } catch (const std::invalid_argument&) {
            answer[0] = -2;
        }
    }
    void call_reserve_batch() { reserve_first(batch().size()); }
    void reserve_first(std::int64_t n) {
        const auto made = manager.reserve_batch({views.data(), n}, 1, given());
        answer[0] = made.reserved;
        answer[1] = static_cast<std::int64_t>(made.status);
    }
    void call_fetch(std::int64_t num_steps = 1) {
        const auto result = manager.fetch(batch(), num_steps, targets.data(), given());
        answer = {static_cast<std::int64_t>(result.status),
                  result.row,
                  result.needed,
                  result.available,
                  result.has_moved ? 1 : 0,
                  1};
    }
    void call_commit() {
        manager.commit(batch(), last_swaps, given());
        CHECK(swaps.size() + last_swaps.size() <= swaps.capacity());  // no allocation here
        swaps.insert(swaps.end(), last_swaps.begin(), last_swaps.end());
    }
    void call_fork() { manager.fork(parent, batch()); }

    /// Move the requests to the positions that the call wrote into their views.
    void take_over() {
        for (std::size_t k = 0; k < rows.size(); ++k) {
            Request& request = at(rows[k]);
            request.sequence = views[k].sequence;
            request.start = views[k].start;
            request.active = views[k].active;
        }
    }
    void forget_call() {
        rows.clear();
        views.clear();
        swaps.clear();
        found.clear();
        text_found.clear();
        answer.fill(-1);
        end(transfers);
    }

   private:
    static kvcore::CacheConfig config_of(const Mode& mode, std::int64_t num_blocks) {
        kvcore::CacheConfig config;
        config.num_pages = num_blocks;
        config.page_size = kPageSize;
        config.max_sequences = 24;
        config.max_seq_len = 200;
        config.num_replicas = kReplicas;
        config.dedup = mode.dedup;
        config.prefix_caching = mode.prefix_caching;
        config.host_pages = mode.host_pages;
        if (mode.window > 0) {
            config.groups = {{}, {kvcore::GroupKind::kSliding, mode.window, 1, 0}};
        }
        if (mode.has_quotas) config.quotas.emplace_back();
        config.explain_pages = mode.explain_pages;
        config.advice_sample = mode.advice_sample;
        return config;
    }
};
