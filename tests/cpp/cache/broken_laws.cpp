// SPDX-License-Identifier: Apache-2.0
// A broken invariant throws an exception that names the invariant. The tests break an invariant
// from outside with an eviction policy that forgets its runs, so pages that were counted as
// evictable cannot be evicted.
#include <memory>
#include <string>
#include <vector>

#include "kvcore/eviction.hpp"
#include "support/manager_fixture.hpp"

namespace tests::cache::broken_laws {

using kvcore::IntegrityError;
using kvcore::NodeId;

namespace {

/// Returns at most `num_named` victims in total.
class Forgetful final : public kvcore::EvictionPolicy {
   public:
    explicit Forgetful(std::int64_t& num_named) : num_named_(num_named) {}
    void make_room(NodeId last) override { is_candidate_.resize(last + std::size_t{1}); }
    void insert(NodeId, std::int32_t, std::int32_t, std::int32_t) noexcept override {}
    void hit(NodeId) noexcept override {}
    void release(NodeId node, std::uint64_t) noexcept override { is_candidate_[node] = true; }
    void split(NodeId, NodeId) noexcept override {}
    void erase(NodeId node) noexcept override { is_candidate_[node] = false; }
    void offer(NodeId node) noexcept override { is_candidate_[node] = true; }
    void withdraw(NodeId node) noexcept override { is_candidate_[node] = false; }
    [[nodiscard]] NodeId victim() noexcept override {
        if (num_named_ == 0) return kvcore::kNoNode;
        for (std::size_t node = 0; node < is_candidate_.size(); ++node) {
            if (!is_candidate_[node]) continue;
            --num_named_;
            return static_cast<NodeId>(node);
        }
        return kvcore::kNoNode;
    }

   private:
    std::int64_t& num_named_;
    std::vector<bool> is_candidate_;
};

enum class Call { kReserve, kAllocate, kFetch, kFetchTwo, kGrow };

struct Case {
    bool has_windows;
    bool has_states;
    Call call;
};

kvcore::CacheConfig config_of(const Case& given) {
    kvcore::CacheConfig config = ManagerFixture::config(2, given.has_windows ? 24 : 12);
    if (given.has_windows) config.groups = {{}, {kvcore::GroupKind::kSliding, 4, 1, 0}};
    if (given.has_states) {
        config.states = {{2}};
        config.num_state_slots = 24;
    }
    return config;
}

kvcore::FetchResult fetch(kvcore::CacheManager& manager, const std::vector<Request*>& batch) {
    std::vector<kvcore::RequestView> views;
    for (const Request* each : batch) views.push_back(each->view());
    kvcore::FetchTarget target;
    std::vector<std::uint32_t> lengths(16);
    target.cache_lengths = lengths.data();
    return manager.fetch({views.data(), count(views)}, 1, &target);
}

// The call throws an error that names the invariant. Afterwards every page is counted, and the
// manager still serves requests from its free pages.
void a_policy_that_names_nobody_ends_the_call(const Case& given) {
    for (const std::int64_t named : {0, 1}) {
        std::int64_t num_named = 1 << 20;
        kvcore::CacheManager manager(config_of(given),
                                     [&] { return std::make_unique<Forgetful>(num_named); });
        const auto run = [&](Request& request, TokenId next) {
            kvcore::RequestView view = request.view();
            CHECK_EQ(manager.reserve(view), kvcore::ReserveStatus::kOk);
            request.start = request.end();
            request.append(next);
            request.active = request.end();
            view = request.view();
            std::vector<kvcore::PageSwap> swaps;
            manager.commit({&view, 1}, swaps);
            if (given.has_states) static_cast<void>(manager.take_state_copies());
        };
        for (const TokenId first : {0, 100}) {
            Request request("", count_up(first, 8));
            request.sequence = manager.claim();
            run(request, 9);
            manager.release(request.sequence);
        }
        Request growing("", count_up(300, 4));
        growing.sequence = manager.claim();
        run(growing, 9);
        for (TokenId t = 0; t < 10; ++t) growing.append(t);
        growing.active = growing.end();
        Request request("", count_up(200, 14));
        Request small("", count_up(400, 1));
        request.sequence = manager.claim();
        small.sequence = manager.claim();
        manager.check_integrity();
        num_named = named;
        try {
            kvcore::RequestView view = request.view();
            if (given.call == Call::kReserve) static_cast<void>(manager.reserve(view));
            if (given.call == Call::kAllocate) {
                kvcore::PrefixHit hit = manager.match(view);
                static_cast<void>(manager.allocate(hit, view, view.end));
            }
            if (given.call == Call::kFetch) static_cast<void>(fetch(manager, {&request}));
            if (given.call == Call::kFetchTwo)
                static_cast<void>(fetch(manager, {&small, &request}));
            if (given.call == Call::kGrow) static_cast<void>(fetch(manager, {&growing, &small}));
            check::fail(__FILE__, __LINE__, "nothing was thrown");
        } catch (const IntegrityError& error) {
            CHECK_EQ(std::string(error.what()), "reserve: admitted pages are there");
        }
        manager.check_integrity();
        CHECK(manager.pages_of(request.sequence).empty());
        num_named = 1 << 20;
        CHECK_EQ(fetch(manager, {&small}).status, kvcore::FetchStatus::kGrow);
        manager.check_integrity();
        for (const Request* each : {&growing, &request, &small}) manager.release(each->sequence);
        manager.check_integrity();
        CHECK_EQ(manager.stats(0).available_pages(), manager.config().num_pages);
    }
}

TEST(a_policy_that_names_nobody_ends_the_call) {
    for (const bool has_windows : {false, true}) {
        for (const bool has_states : {false, true}) {
            if (has_windows && has_states) continue;  // evicts without the policy
            for (const Call call :
                 {Call::kReserve, Call::kAllocate, Call::kFetch, Call::kFetchTwo, Call::kGrow}) {
                check::note = std::string(has_windows ? "windows, " : "plain, ") +
                              (has_states ? "states, call " : "call ") +
                              std::to_string(static_cast<int>(call));
                a_policy_that_names_nobody_ends_the_call({has_windows, has_states, call});
            }
        }
    }
}

}  // namespace

}  // namespace tests::cache::broken_laws
