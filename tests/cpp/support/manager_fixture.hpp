// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "kvcore/errors.hpp"
#include "support/request.hpp"

using Ids = std::vector<BlockId>;

/// The state that a call without effect must leave unchanged.
struct Trace {
    std::vector<std::int64_t> numbers;
    std::vector<Ids> rows;

    friend bool operator==(const Trace& a, const Trace& b) {
        return a.numbers == b.numbers && a.rows == b.rows;
    }
};

/// A CacheManager and the steps that most tests repeat.
class ManagerFixture {
   public:
    explicit ManagerFixture(const kvcore::CacheConfig& config) : manager(config) {}
    ~ManagerFixture() { manager.check_integrity(); }
    ManagerFixture(const ManagerFixture&) = delete;
    ManagerFixture& operator=(const ManagerFixture&) = delete;

    static kvcore::CacheConfig config(std::int32_t page_size, std::int64_t num_blocks) {
        kvcore::CacheConfig config;
        config.page_size = page_size;
        config.num_pages = num_blocks;
        config.max_sequences = 16;
        config.max_seq_len = 1000;
        return config;
    }

    kvcore::CacheManager manager;
    std::vector<kvcore::PageSwap> swaps;  // of the last commit
    kvcore::Transfers transfers;          // of the last call that got them

    Request claim(const Tokens& tokens, std::int32_t replica = 0, const std::string& name = "") {
        Request request(name, tokens);
        request.sequence = manager.claim(replica);
        return request;
    }
    bool reserve(Request& request, std::int64_t num_steps = 1) {
        return reserve_to(request, num_steps, nullptr) == kvcore::ReserveStatus::kOk;
    }
    /// Reserve with `transfers`; the test finishes them.
    kvcore::ReserveStatus try_reserve(Request& request) {
        transfers.clear();
        return reserve_to(request, 1, &transfers);
    }
    bool reserve_copying(Request& request) {
        return try_reserve(request) == kvcore::ReserveStatus::kOk;
    }
    void finish(bool done = true) {
        manager.finish(transfers.ticket, done);
        transfers.clear();
        manager.check_integrity();
    }
    kvcore::FetchResult fetch(const std::vector<Request*>& batch, std::int64_t num_steps = 1) {
        return fetch_to(batch, num_steps, nullptr);
    }
    /// Fetch with `transfers`; the test finishes them.
    kvcore::FetchResult fetch_copying(const std::vector<Request*>& batch) {
        transfers.clear();
        return fetch_to(batch, 1, &transfers);
    }
    /// Run one step of the model over all tokens, and sample `next`.
    void run(Request& request, TokenId next) {
        CHECK_EQ(fetch({&request}).status, kvcore::FetchStatus::kOk);
        sample(request, next);
        commit({&request});
    }
    /// Apply a model step to a request: all tokens have run.
    static void sample(Request& request, TokenId next) {
        request.start = request.end();
        request.append(next);
        request.active = request.end();
    }
    void commit(const std::vector<Request*>& batch) {
        std::vector<kvcore::RequestView> views = views_of(batch);
        swaps.clear();
        manager.commit({views.data(), count(views)}, swaps);
    }
    /// Fork `parent`; the children get their handles and indices.
    void fork(const Request& parent, const std::vector<Request*>& children) {
        std::vector<kvcore::RequestView> views = views_of(children);
        manager.fork(parent.view(), {views.data(), count(views)});
        for (std::size_t i = 0; i < children.size(); ++i) {
            children[i]->sequence = views[i].sequence;
            children[i]->start = views[i].start;
            children[i]->active = views[i].active;
        }
    }
    /// Claim a sequence that continues `parent` with `tail`.
    Request fork_of(const Request& parent, const Tokens& tail) {
        Tokens tokens(parent.tokens().begin(), parent.tokens().begin() + parent.start);
        tokens.insert(tokens.end(), tail.begin(), tail.end());
        Request child(parent.name_space(), tokens);
        fork(parent, {&child});
        return child;
    }
    std::vector<kvcore::SharedPrefix> shared(const std::vector<Request*>& batch) {
        std::vector<kvcore::RequestView> views = views_of(batch);
        return manager.shared_prefixes({views.data(), count(views)});
    }
    /// Leave the pages of a prompt cached and unused.
    void put(const Tokens& tokens, std::int32_t replica = 0, const std::string& name = "") {
        Request request = claim(tokens, replica, name);
        run(request, 0);
        manager.release(request.sequence);
    }

    Ids pages(const Request& request) { return manager.pages_of(request.sequence); }
    std::int64_t free(std::int32_t replica = 0) { return manager.stats(replica).free_pages; }
    std::int64_t available(std::int32_t replica = 0) {
        return manager.stats(replica).available_pages();
    }
    std::int64_t match(const Tokens& tokens, std::int32_t replica = 0, const std::string& name = "",
                       Ids* ids = nullptr) {
        return manager.match(replica, name, tokens.data(), count(tokens), ids);
    }

    /// The state to compare before and after a call that must change nothing.
    Trace trace(const std::vector<const Request*>& requests) {
        Trace trace;
        for (std::int32_t i = 0; i < manager.config().num_replicas; ++i) {
            const kvcore::PoolStats s = manager.stats(i);
            for (const std::int64_t n :
                 {s.free_pages, s.cached_pages, s.evictable_pages, s.num_sequences}) {
                trace.numbers.push_back(n);
            }
        }
        const kvcore::Metrics m = manager.metrics();
        for (const std::int64_t n : {m.input_tokens, m.cache_tokens, m.copied_tokens,
                                     m.evicted_pages, m.peak_used_pages}) {
            trace.numbers.push_back(n);
        }
        for (const Request* request : requests) {
            trace.rows.push_back(pages(*request));
            trace.numbers.push_back(request->start);
            trace.numbers.push_back(request->active);
        }
        manager.check_integrity();
        return trace;
    }
    void check_metrics(std::int64_t input, std::int64_t cache, std::int64_t copied,
                       std::int64_t evicted) {
        const kvcore::Metrics metrics = manager.metrics();
        CHECK_EQ(metrics.input_tokens, input);
        CHECK_EQ(metrics.cache_tokens, cache);
        CHECK_EQ(metrics.copied_tokens, copied);
        CHECK_EQ(metrics.evicted_pages, evicted);
    }

   private:
    static std::vector<kvcore::RequestView> views_of(const std::vector<Request*>& batch) {
        std::vector<kvcore::RequestView> views;
        for (const Request* request : batch) views.push_back(request->view());
        return views;
    }
    kvcore::ReserveStatus reserve_to(Request& request, std::int64_t num_steps,
                                     kvcore::Transfers* to) {
        kvcore::RequestView view = request.view();
        const kvcore::ReserveStatus status = manager.reserve(view, num_steps, to);
        request.start = view.start;
        request.active = view.active;
        return status;
    }
    kvcore::FetchResult fetch_to(const std::vector<Request*>& batch, std::int64_t num_steps,
                                 kvcore::Transfers* to) {
        std::vector<kvcore::RequestView> views = views_of(batch);
        std::vector<kvcore::FetchTarget> targets = make_targets();
        const kvcore::FetchResult result =
            manager.fetch({views.data(), count(views)}, num_steps, targets.data(), to);
        for (std::size_t i = 0; i < batch.size(); ++i) {
            batch[i]->start = views[i].start;
            batch[i]->active = views[i].active;
        }
        return result;
    }

    // Make tables with room for all rows; other tests check their content.
    std::vector<kvcore::FetchTarget> make_targets() {
        constexpr std::int64_t kRows = 16;
        constexpr std::int64_t kColumns = 1000;
        std::vector<kvcore::FetchTarget> targets;
        pointers_.reserve(2 * static_cast<std::size_t>(manager.config().num_replicas));
        for (std::int64_t i = 0; i < manager.config().num_replicas; ++i) {
            while (count(tables_) <= 2 * i + 1) {
                memory_.emplace_back(static_cast<std::size_t>(kRows) * kColumns);
                lengths_.emplace_back(static_cast<std::size_t>(kRows));
                tables_.push_back(std::make_unique<kvcore::LookupTable>(memory_.back().data(),
                                                                        kRows, kColumns, ~0U));
                pointers_.push_back(tables_.back().get());
            }
            kvcore::FetchTarget target;
            target.table = item(pointers_, 2 * i);
            target.more = &item(pointers_, 2 * i + 1);  // for a second bundle
            target.cache_lengths = item(lengths_, i).data();
            targets.push_back(target);
        }
        return targets;
    }

    std::vector<std::vector<std::uint32_t>> memory_;
    std::vector<std::vector<std::uint32_t>> lengths_;
    std::vector<std::unique_ptr<kvcore::LookupTable>> tables_;
    std::vector<kvcore::LookupTable*> pointers_;
};

/// Return a request that has run `tokens` and sampled `next`.
inline Request served(ManagerFixture& m, const Tokens& tokens, TokenId next) {
    Request request = m.claim(tokens);
    m.run(request, next);
    return request;
}

/// Check a copy on replica 0.
inline void check_copy(const kvcore::PageMove& copy, BlockId source, BlockId destination,
                       std::int32_t tokens, const Request& request) {
    CHECK_EQ(copy.replica, 0);
    CHECK_EQ(copy.source, source);
    CHECK_EQ(copy.destination, destination);
    CHECK_EQ(copy.num_tokens, tokens);
    CHECK(copy.sequence == request.sequence);
}
