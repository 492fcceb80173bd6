// SPDX-License-Identifier: Apache-2.0
// Calls that are invalid or cannot be served: their errors, and that they change nothing.
#include <limits>
#include <stdexcept>

#include "support/manager_fixture.hpp"

namespace tests::cache::errors {

using kvcore::CapacityError;
using kvcore::RequestNotFoundError;
using kvcore::RequestView;

namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

/// A nearly full pool with cached pages, a running request and a waiting request.
struct Scene {
    Scene() : m(scene_config()), running(m.claim(count_up(1, 10))), waiting(m.claim({1, 2, 3, 9})) {
        m.put({1, 2, 3, 4, 5, 6, 7, 8});
        m.run(running, 11);
        CHECK(m.reserve(waiting));
        static_cast<void>(m.manager.take_copies());
    }
    static kvcore::CacheConfig scene_config() {
        kvcore::CacheConfig config = ManagerFixture::config(2, 12);
        config.max_sequences = 3;
        config.max_seq_len = 26;
        config.num_replicas = 2;
        return config;
    }
    Trace trace() { return m.trace({&running, &waiting}); }

    ManagerFixture m;
    Request running;
    Request waiting;
};

/// Checks that the call throws and changes nothing.
template <class Exception, class Call>
void check_refused(Scene& scene, Call&& call, int line) {
    const Trace before = scene.trace();
    const std::string expression = "the call of line " + std::to_string(line);
    check::require_throws<Exception>(call, expression.c_str(), __FILE__, line);
    CHECK(scene.trace() == before);
    CHECK(scene.m.manager.take_copies().empty());
}
#define CHECK_REFUSED(Exception, scene, ...) \
    check_refused<Exception>(scene, [&] { static_cast<void>(__VA_ARGS__); }, __LINE__)

TEST(configurations_are_checked) {
    const kvcore::CacheConfig good = ManagerFixture::config(2, 4);
    CHECK_EQ(kvcore::CacheManager(good).config().num_pages, 4);
    for (int field = 0; field < 5; ++field) {
        for (const int value : {0, -3}) {
            kvcore::CacheConfig bad = good;
            if (field == 0) bad.num_pages = value;
            if (field == 1) bad.page_size = value;
            if (field == 2) bad.max_sequences = value;
            if (field == 3) bad.max_seq_len = value;
            if (field == 4) bad.num_replicas = value;
            CHECK_THROWS(std::invalid_argument, kvcore::CacheManager(bad));
        }
    }
    kvcore::CacheConfig huge = good;
    huge.num_pages = kMost;
    CHECK_THROWS(std::invalid_argument, kvcore::CacheManager(huge));
}

TEST(host_tiers_are_checked) {
    kvcore::CacheConfig config = ManagerFixture::config(2, 4);
    config.host_pages = 3;
    ManagerFixture m(config);
    Request request = m.claim({1, 2, 3});
    // Without Transfers the caller cannot copy pages to the tier.
    CHECK_THROWS(std::invalid_argument, m.reserve(request));
    CHECK_EQ(m.manager.stats(0).host_pages, 3);
    CHECK_EQ(m.manager.stats(0).free_pages, 4);
    for (const std::int64_t pages : {std::int64_t{-1}, std::int64_t{1} << 31}) {
        config.host_pages = pages;
        CHECK_THROWS(std::invalid_argument, kvcore::CacheManager(config));
    }
    config.host_pages = 1;
    config.prefix_caching = false;
    CHECK_THROWS(std::invalid_argument, kvcore::CacheManager(config));
}

TEST(claims_are_checked) {
    Scene s;
    kvcore::CacheManager& manager = s.m.manager;
    CHECK_REFUSED(std::out_of_range, s, manager.claim(2));
    CHECK_REFUSED(std::out_of_range, s, manager.claim(-1));
    CHECK_REFUSED(std::out_of_range, s, manager.stats(2));
    CHECK_REFUSED(std::out_of_range, s, manager.match(2, "", nullptr, 0));
    CHECK_REFUSED(std::out_of_range, s, manager.pin(-1, "", nullptr, 0));
    const Request third = s.m.claim({5});
    CHECK_REFUSED(CapacityError, s, manager.claim(0));
    manager.release(third.sequence);
    static_cast<void>(manager.claim(1));
}

TEST(stale_handles_are_refused) {
    Scene s;
    kvcore::CacheManager& manager = s.m.manager;
    const Request gone = s.m.claim({1, 2, 3, 4});
    manager.release(gone.sequence);
    const Request next = s.m.claim({1, 2, 3, 4});  // in the same slot
    CHECK_EQ(next.sequence.index, gone.sequence.index);
    CHECK(next.sequence != gone.sequence);
    for (const kvcore::SequenceHandle handle :
         {gone.sequence, kvcore::SequenceHandle{}, kvcore::SequenceHandle{9999, 1},
          kvcore::SequenceHandle{next.sequence.index, 0}}) {
        RequestView view = gone.view();
        view.sequence = handle;
        std::vector<RequestView> batch{s.running.view(), view};
        std::vector<kvcore::FetchTarget> targets(2);
        std::vector<kvcore::PageSwap> swaps;
        CHECK(!manager.contains(handle));
        CHECK_REFUSED(RequestNotFoundError, s, manager.replica_of(handle));
        CHECK_REFUSED(RequestNotFoundError, s, manager.pages_of(handle));
        CHECK_REFUSED(RequestNotFoundError, s, manager.release(handle));
        CHECK_REFUSED(RequestNotFoundError, s, manager.reserve(view));
        CHECK_REFUSED(RequestNotFoundError, s, manager.plan(view));
        CHECK_REFUSED(RequestNotFoundError, s, manager.reserve_batch({batch.data(), 2}));
        CHECK_REFUSED(RequestNotFoundError, s, manager.fetch({batch.data(), 2}, 1, targets.data()));
        CHECK_REFUSED(RequestNotFoundError, s, manager.commit({batch.data(), 2}, swaps));
    }
}

TEST(indices_are_checked) {
    Scene s;
    kvcore::CacheManager& manager = s.m.manager;
    const RequestView good = s.running.view();
    for (int i = 0; i < 4; ++i) {
        RequestView bad = good;
        if (i == 0) bad.start = bad.active;
        if (i == 1) bad.start = -1;
        if (i == 2) bad.active = bad.end + 1;
        if (i == 3) bad.start = bad.active = bad.end = 0;
        std::vector<RequestView> batch{s.waiting.view(), bad};
        std::vector<kvcore::FetchTarget> targets(2);
        std::vector<kvcore::PageSwap> swaps;
        CHECK_REFUSED(std::invalid_argument, s, manager.reserve(bad));
        CHECK_REFUSED(std::invalid_argument, s, manager.plan(bad));
        CHECK_REFUSED(std::invalid_argument, s, manager.reserve_batch({batch.data(), 2}));
        CHECK_REFUSED(std::invalid_argument, s, manager.commit({batch.data(), 2}, swaps));
        CHECK_REFUSED(std::invalid_argument, s,
                      manager.fetch({batch.data(), 2}, 1, targets.data()));
    }
}

TEST(a_request_stands_in_a_batch_once) {
    Scene s;
    std::vector<RequestView> batch{s.waiting.view(), s.running.view(), s.waiting.view()};
    std::vector<kvcore::FetchTarget> targets(2);
    CHECK_REFUSED(std::invalid_argument, s, s.m.manager.reserve_batch({batch.data(), 3}));
    CHECK_REFUSED(std::invalid_argument, s,
                  s.m.manager.fetch({batch.data(), 3}, 1, targets.data()));
}

TEST(steps_are_checked) {
    Scene s;
    kvcore::CacheManager& manager = s.m.manager;
    RequestView view = s.running.view();
    std::vector<kvcore::FetchTarget> targets(2);
    for (const std::int64_t steps : {std::int64_t{0}, std::int64_t{-1}, -kMost}) {
        CHECK_REFUSED(std::invalid_argument, s, manager.reserve(view, steps));
        CHECK_REFUSED(std::invalid_argument, s, manager.plan(view, steps));
        CHECK_REFUSED(std::invalid_argument, s, manager.fetch({&view, 1}, steps, targets.data()));
    }
    // The sequence holds 11 tokens; the pool fits at most 26.
    for (const std::int64_t steps : {std::int64_t{17}, std::int64_t{1} << 40, kMost - 1, kMost}) {
        CHECK_REFUSED(CapacityError, s, manager.reserve(view, steps));
        CHECK_REFUSED(CapacityError, s, manager.fetch({&view, 1}, steps, targets.data()));
        CHECK(!manager.plan(view, steps).fits);
    }
}

TEST(requests_that_never_fit_are_errors) {
    Scene s;
    Request long_one = s.m.claim(count_up(0, 27));
    RequestView view = long_one.view();
    CHECK_REFUSED(CapacityError, s, s.m.manager.reserve(view));
    // 25 tokens are 13 pages, more than the 12 of the pool.
    long_one.rewind(25);
    view = long_one.view();
    CHECK_REFUSED(CapacityError, s, s.m.manager.reserve(view));
    CHECK(!s.m.manager.plan(view).fits);
    std::vector<RequestView> batch{s.waiting.view(), view};
    CHECK_REFUSED(CapacityError, s, s.m.manager.reserve_batch({batch.data(), 2}));
    // A request of 24 tokens fits the pool, but not now: kNoSpace. One more step would need more
    // pages than the pool has; the answer is still kNoSpace.
    long_one.rewind(24);
    view = long_one.view();
    const Trace before = s.trace();
    for (const std::int64_t steps : {1, 2}) {
        CHECK(s.m.manager.reserve(view, steps) == kvcore::ReserveStatus::kNoSpace);
        CHECK(s.trace() == before);
        CHECK_EQ(view.start, long_one.start);
    }
}

TEST(commit_checks_all_requests_before_it_commits) {
    Scene s;
    RequestView written = s.running.view();
    const Tokens tokens = count_up(1, 30);
    written.tokens = tokens.data();
    written.start = 13;  // six pages hold 12
    written.active = written.end = 14;
    RequestView fine = s.waiting.view();
    fine.start = 4;
    fine.active = fine.end = 5;
    fine.tokens = tokens.data();
    std::vector<RequestView> batch{fine, written};
    std::vector<kvcore::PageSwap> swaps;
    CHECK_REFUSED(std::invalid_argument, s, s.m.manager.commit({batch.data(), 2}, swaps));
    CHECK(swaps.empty());
}

}  // namespace

}  // namespace tests::cache::errors
