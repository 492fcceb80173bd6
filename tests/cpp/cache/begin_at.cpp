// SPDX-License-Identifier: Apache-2.0
// Requests that begin with tokens from the caller (begin_at): held pages, refusals, cached pages.
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kvcore/errors.hpp"
#include "support/check.hpp"
#include "support/manager_fixture.hpp"

namespace tests::cache::begin_at {

using kvcore::CacheGroup;
using kvcore::GroupKind;
using kvcore::ReserveStatus;
using kvcore::SequenceMark;

namespace {

constexpr CacheGroup kFull{GroupKind::kFull, 0, 1, 0};

CacheGroup sliding(std::int64_t window) { return {GroupKind::kSliding, window, 1, 0}; }

ReserveStatus begin_at(ManagerFixture& s, Request& request, std::int64_t n) {
    kvcore::RequestView view = request.view();
    const ReserveStatus status = s.manager.begin_at(view, n);
    request.start = view.start;
    request.active = view.active;
    s.manager.check_integrity();
    return status;
}

std::int64_t live(ManagerFixture& s, const Request& request, std::int32_t bundle) {
    std::int64_t n = 0;
    for (const BlockId page : s.manager.pages_of(request.sequence, bundle)) n += page >= 0 ? 1 : 0;
    return n;
}

TEST(begin_at_behaves_like_a_prefix_hit) {
    ManagerFixture s(ManagerFixture::config(4, 16));
    Request request = s.claim(count_up(0, 12));
    CHECK_EQ(begin_at(s, request, 11), ReserveStatus::kOk);
    CHECK_EQ(request.start, 11);
    CHECK_EQ(request.active, 12);
    CHECK_EQ(s.pages(request).size(), 3U);
    s.check_metrics(1, 11, 0, 0);
    CHECK_EQ(s.match(count_up(0, 12)), 0);  // a page is found only after its commit
    s.commit({&request});
    CHECK_EQ(s.match(count_up(0, 12)), 2);
    CHECK(s.reserve(request));
    CHECK_EQ(request.start, 11);
    ManagerFixture::sample(request, 7);
    s.commit({&request});
    CHECK_EQ(s.match(count_up(0, 12)), 3);
    s.manager.release(request.sequence);
    CHECK_EQ(s.available(), 16);
}

// begin_at does not search the cache. The commit swaps equal pages for the cached pages.
TEST(commit_swaps_the_callers_pages_for_cached_pages) {
    ManagerFixture s(ManagerFixture::config(4, 16));
    s.put(count_up(0, 8));
    Request request = s.claim(count_up(0, 12));
    CHECK_EQ(begin_at(s, request, 11), ReserveStatus::kOk);
    CHECK_EQ(s.free(), 11);
    s.commit({&request});
    CHECK_EQ(s.swaps.size(), 2U);
    CHECK_EQ(s.free(), 13);
}

TEST(begin_at_moves_the_active_end) {
    ManagerFixture s(ManagerFixture::config(4, 16));
    Request request = s.claim(count_up(0, 12));
    request.active = 3;
    CHECK_EQ(begin_at(s, request, 6), ReserveStatus::kOk);
    CHECK_EQ(request.start, 6);
    CHECK_EQ(request.active, 9);
}

TEST(no_space_changes_nothing) {
    ManagerFixture s(ManagerFixture::config(4, 5));
    Request other = s.claim(count_up(50, 12));
    CHECK(s.reserve(other));
    Request request = s.claim(count_up(0, 12));
    const Trace before = s.trace({&request, &other});
    CHECK_EQ(begin_at(s, request, 11), ReserveStatus::kNoSpace);
    CHECK(s.trace({&request, &other}) == before);
    s.manager.release(other.sequence);
    CHECK_EQ(begin_at(s, request, 11), ReserveStatus::kOk);
}

TEST(begin_at_evicts_cached_pages) {
    ManagerFixture s(ManagerFixture::config(4, 5));
    s.put(count_up(50, 16));
    Request request = s.claim(count_up(0, 12));
    CHECK_EQ(begin_at(s, request, 11), ReserveStatus::kOk);
    CHECK_EQ(s.manager.metrics().evicted_pages, 2);
}

TEST(refusals) {
    ManagerFixture s(ManagerFixture::config(4, 8));
    Request request = s.claim(count_up(0, 12));
    for (const std::int64_t n : {-1, 0, 12, 13}) {
        const Trace before = s.trace({&request});
        CHECK_THROWS(std::invalid_argument, begin_at(s, request, n));
        CHECK(s.trace({&request}) == before);
    }
    CHECK(s.reserve(request));
    CHECK_THROWS(std::invalid_argument, begin_at(s, request, 5));
    Request large = s.claim(count_up(0, 40));
    CHECK_THROWS(kvcore::CapacityError, begin_at(s, large, 39));
    s.manager.release(large.sequence);
    CHECK_THROWS(kvcore::RequestNotFoundError, begin_at(s, large, 3));
    CHECK_THROWS(kvcore::RequestNotFoundError, s.manager.mark_of(large.sequence));
}

TEST(windows_hold_only_pages_that_are_still_read) {
    kvcore::CacheConfig config = ManagerFixture::config(4, 40);
    config.groups = {kFull, sliding(4)};
    ManagerFixture s(config);
    Request request = s.claim(count_up(0, 31));
    CHECK_EQ(begin_at(s, request, 30), ReserveStatus::kOk);
    CHECK_EQ(live(s, request, 0), 8);
    CHECK_EQ(live(s, request, 1), 2);  // tokens 27 .. 30
    s.commit({&request});
    CHECK_EQ(s.match(count_up(0, 31)), 7);
    CHECK_EQ(s.match(count_up(0, 24)), 0);  // the window pages of this prefix are not cached
    s.manager.release(request.sequence);
    CHECK_EQ(s.available(), 40);
    Request hit = s.claim(count_up(0, 31));
    CHECK(s.reserve(hit));
    CHECK_EQ(hit.start, 28);
}

TEST(states_begin_at_the_position_without_a_checkpoint) {
    kvcore::CacheConfig config = ManagerFixture::config(4, 40);
    config.groups = {kFull};
    config.states = {{0}};
    config.num_state_slots = 16;
    ManagerFixture s(config);
    Request request = s.claim(count_up(0, 13));
    CHECK_EQ(begin_at(s, request, 12), ReserveStatus::kOk);
    CHECK_EQ(s.manager.state_of(request.sequence), 0);
    CHECK_EQ(s.manager.mark_of(request.sequence).state, 12);
    s.commit({&request});
    CHECK_EQ(s.manager.state_stats(0).checkpoints, 0);
    CHECK_EQ(s.match(count_up(0, 13)), 0);
    CHECK(s.reserve(request));
    CHECK(s.manager.take_state_copies().empty());
}

TEST(marks_change_when_pages_change) {
    ManagerFixture s(ManagerFixture::config(4, 16));
    s.put(count_up(0, 8));
    Request request = s.claim(count_up(0, 12));
    CHECK_EQ(begin_at(s, request, 11), ReserveStatus::kOk);
    const SequenceMark begun = s.manager.mark_of(request.sequence);
    CHECK_EQ(begun.written, 11);
    CHECK(s.reserve(request, 9));  // more pages at the end
    CHECK(s.manager.mark_of(request.sequence) == begun);
    s.commit({&request});  // pages are swapped
    const SequenceMark swapped = s.manager.mark_of(request.sequence);
    CHECK(swapped != begun);
    s.manager.reset_prefix_cache();
    CHECK(s.manager.mark_of(request.sequence) == swapped);
    ManagerFixture::sample(request, 3);
    s.commit({&request});
    const SequenceMark later = s.manager.mark_of(request.sequence);
    CHECK_EQ(later.written, 12);
    s.manager.truncate(request.sequence, 5);
    CHECK(s.manager.mark_of(request.sequence) != later);
}

}  // namespace

}  // namespace tests::cache::begin_at
