// SPDX-License-Identifier: Apache-2.0
// The host tier between the two halves of a copy: what is found, held and given back when.
#include <stdexcept>

#include "manager_fixture.hpp"

using kvcore::HostCopy;
using kvcore::HostDirection;

namespace {

using Copies = std::vector<HostCopy>;

/// A manager with a host tier, whose copies wait until a test finishes them.
class HostFixture {
   public:
    HostFixture(std::int64_t num_blocks, std::int64_t host_pages)
        : manager(config(num_blocks, host_pages)) {}
    ~HostFixture() { manager.check_integrity(); }
    HostFixture(const HostFixture&) = delete;
    HostFixture& operator=(const HostFixture&) = delete;

    static kvcore::CacheConfig config(std::int64_t num_blocks, std::int64_t host_pages) {
        kvcore::CacheConfig config = ManagerFixture::config(2, num_blocks);
        config.host_pages = host_pages;
        return config;
    }

    kvcore::CacheManager manager;

    Request claim(const Tokens& tokens, const std::string& name = "") {
        Request request(name, tokens);
        request.sequence = manager.claim();
        return request;
    }
    Copies reserve(Request& request) {
        kvcore::RequestView view = request.view();
        std::vector<kvcore::PageCopy> copies;
        Copies loads;
        CHECK_EQ(manager.reserve(view, 1, &copies, &loads), kvcore::ReserveStatus::kOk);
        manager.finish_copies(copies);
        request.start = view.start;
        request.active = view.active;
        return loads;
    }
    /// Copies of a step that ran all tokens there are.
    Copies commit(Request& request, TokenId next) {
        ManagerFixture::sample(request, next);
        kvcore::RequestView view = request.view();
        std::vector<kvcore::PageSwap> swaps;
        Copies stores;
        manager.commit({&view, 1}, swaps, &stores);
        manager.check_integrity();
        return stores;
    }
    void finish(const Copies& copies, bool done = true) {
        manager.finish_host_copies(copies, done);
        manager.check_integrity();
    }
    /// Leaves a prompt in the tier and nothing of it on the device.
    void put(const Tokens& tokens) {
        Request request = claim(tokens);
        finish(reserve(request));
        finish(commit(request, 0));
        manager.release(request.sequence);
        const std::int64_t pages = manager.config().num_blocks;
        Request other = claim(count_up(5000, 2 * pages));
        finish(reserve(other));
        manager.release(other.sequence);
    }
    std::int64_t stored() { return manager.stats(0).host_cached_pages; }
    /// Tokens that a prompt would find, on the device or below.
    std::int64_t hit(Tokens tokens) {
        tokens.push_back(-1);
        Request request = claim(tokens);
        const std::int64_t found = manager.plan(request.view()).hit_tokens;
        manager.release(request.sequence);
        return found;
    }
};

void check_directions(const Copies& copies, HostDirection direction, std::int64_t n) {
    CHECK_EQ(count(copies), n);
    for (const HostCopy& copy : copies) {
        CHECK_EQ(copy.direction, direction);
        CHECK_EQ(copy.ticket, copies[0].ticket);
    }
}

void pages_are_found_when_their_copies_are_finished() {
    HostFixture m(8, 8);
    Request request = m.claim(count_up(0, 7));
    CHECK(m.reserve(request).empty());
    const Copies stores = m.commit(request, 7);
    check_directions(stores, HostDirection::kStore, 3);
    CHECK_EQ(m.stored(), 0);
    CHECK_EQ(m.manager.metrics().stored_pages, 0);
    m.finish(stores);
    CHECK_EQ(m.stored(), 3);
    CHECK_EQ(m.manager.metrics().stored_pages, 3);
    CHECK_THROWS(kvcore::InvalidHandleError, m.manager.finish_host_copies(stores));
    m.manager.release(request.sequence);
}

void copies_that_failed_are_never_found_and_tried_again() {
    HostFixture m(8, 8);
    Request request = m.claim(count_up(0, 6));
    m.finish(m.reserve(request));
    m.finish(m.commit(request, 6), false);
    CHECK_EQ(m.stored(), 0);
    request.append(7);
    request.active = request.end();
    m.finish(m.reserve(request));
    const Copies stores = m.commit(request, 8);
    check_directions(stores, HostDirection::kStore, 4);
    m.finish(stores);
    CHECK_EQ(m.stored(), 4);
    CHECK_EQ(m.manager.metrics().stored_pages, 4);
    m.manager.release(request.sequence);
}

void sources_stay_while_they_are_copied() {
    HostFixture m(3, 8);
    Request request = m.claim(count_up(0, 5));
    m.finish(m.reserve(request));
    const Copies stores = m.commit(request, 5);
    m.manager.release(request.sequence);
    CHECK_EQ(m.manager.stats(0).available_pages(), 1);
    m.finish(stores);
    CHECK_EQ(m.manager.stats(0).available_pages(), 3);
    CHECK_EQ(m.stored(), 2);
    CHECK_EQ(m.manager.stats(0).evictable_pages, 2);
}

void a_sequence_under_way_leaves_its_pages_to_the_commit_after() {
    HostFixture m(8, 8);
    Request request = m.claim(count_up(0, 4));
    m.finish(m.reserve(request));
    const Copies first = m.commit(request, 4);
    request.append(5);
    request.active = request.end();
    m.finish(m.reserve(request));
    CHECK(m.commit(request, 6).empty());
    m.finish(first);
    request.append(7);
    request.active = request.end();
    m.finish(m.reserve(request));
    const Copies rest = m.commit(request, 8);
    check_directions(rest, HostDirection::kStore, 2);
    m.finish(rest);
    CHECK_EQ(m.stored(), 4);
    m.manager.release(request.sequence);
}

// The second sequence stores what follows the pages that the first one is storing.
void pages_under_way_are_not_stored_twice(bool in_order) {
    HostFixture m(16, 16);
    Request first = m.claim(count_up(0, 6));
    Tokens longer = count_up(0, 6);
    longer.insert(longer.end(), {70, 71, 72, 73});
    Request second = m.claim(longer);
    m.finish(m.reserve(first));
    m.finish(m.reserve(second));
    const Copies one = m.commit(first, 9);
    const Copies two = m.commit(second, 9);
    check_directions(one, HostDirection::kStore, 3);
    check_directions(two, HostDirection::kStore, 2);
    m.finish(in_order ? one : two);
    m.finish(in_order ? two : one);
    CHECK_EQ(m.stored(), in_order ? 5 : 3);  // nothing is found behind a hole
    m.manager.release(first.sequence);
    m.manager.release(second.sequence);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.stored(), 0);
}

void pages_of_a_truncated_sequence_arrive_without_it() {
    HostFixture m(8, 8);
    Request request = m.claim(count_up(0, 6));
    m.finish(m.reserve(request));
    const Copies stores = m.commit(request, 6);
    m.manager.truncate(request.sequence, 3);
    request.rewind(3);
    m.manager.check_integrity();
    m.finish(stores);
    CHECK_EQ(m.stored(), 3);
    request.append(60);
    request.append(61);
    request.active = request.end();
    m.finish(m.reserve(request));
    const Copies rest = m.commit(request, 62);
    check_directions(rest, HostDirection::kStore, 1);
    m.finish(rest);
    CHECK_EQ(m.stored(), 4);
    m.manager.release(request.sequence);
}

void what_is_reset_does_not_come_back() {
    HostFixture m(8, 8);
    Request gone = m.claim(count_up(0, 6));
    m.finish(m.reserve(gone));
    const Copies stores = m.commit(gone, 6);
    m.manager.release(gone.sequence);
    m.manager.reset_prefix_cache();
    m.finish(stores);
    CHECK_EQ(m.stored(), 0);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.manager.stats(0).free_pages, 8);
}

void loads_fill_the_requests_own_pages_and_hold_their_sources() {
    HostFixture m(4, 4);
    m.put(count_up(0, 6));
    CHECK_EQ(m.hit(count_up(0, 6)), 6);
    Request request = m.claim(count_up(0, 8));
    const Copies loads = m.reserve(request);
    check_directions(loads, HostDirection::kLoad, 3);
    CHECK_EQ(request.start, 6);
    const Ids pages = m.manager.pages_of(request.sequence);
    for (std::int64_t i = 0; i < 3; ++i) {
        CHECK_EQ(item(loads, i).device_page, item(pages, i));
    }
    CHECK_EQ(m.manager.stats(0).cached_pages, 0);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.stored(), 3);  // held until they are copied
    m.finish(loads);
    CHECK_EQ(m.manager.metrics().loaded_pages, 3);
    CHECK_EQ(m.manager.metrics().cache_tokens, 6);
    const Copies stores = m.commit(request, 8);
    check_directions(stores, HostDirection::kStore, 1);
    CHECK_EQ(m.manager.stats(0).cached_pages, 4);
    m.finish(stores);
    m.manager.release(request.sequence);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.stored(), 0);
}

void a_request_whose_pages_did_not_arrive_begins_again() {
    HostFixture m(4, 8);
    m.put(count_up(0, 6));
    Request request = m.claim(count_up(0, 8));
    const Copies loads = m.reserve(request);
    CHECK_EQ(request.start, 6);
    m.finish(loads, false);
    CHECK_EQ(m.manager.metrics().loaded_pages, 0);
    CHECK(m.manager.pages_of(request.sequence).empty());
    CHECK_EQ(m.manager.stats(0).available_pages(), 4);
    const Copies again = m.reserve(request);  // wherever its context stands
    check_directions(again, HostDirection::kLoad, 3);
    CHECK_EQ(request.start, 6);
    m.finish(again);
    m.finish(m.commit(request, 8));
    m.manager.release(request.sequence);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.stored(), 0);
}

void a_request_released_under_way_leaves_nothing() {
    HostFixture m(4, 4);
    m.put(count_up(0, 6));
    Request request = m.claim(count_up(0, 8));
    const Copies loads = m.reserve(request);
    m.manager.release(request.sequence);
    m.finish(loads);
    CHECK_EQ(m.manager.stats(0).available_pages(), 4);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.stored(), 0);
}

void lists_for_host_copies_are_asked_for() {
    HostFixture m(4, 4);
    Request request = m.claim({1, 2, 3});
    kvcore::RequestView view = request.view();
    std::vector<kvcore::PageSwap> swaps;
    kvcore::FetchTarget target;
    CHECK_THROWS(std::invalid_argument, static_cast<void>(m.manager.reserve(view)));
    CHECK_THROWS(std::invalid_argument, m.manager.commit({&view, 1}, swaps));
    CHECK_THROWS(std::invalid_argument, static_cast<void>(m.manager.fetch({&view, 1}, 1, &target)));
    CHECK_THROWS(std::invalid_argument, HostFixture(4, -1));
    kvcore::CacheConfig config = HostFixture::config(4, 4);
    config.prefix_caching = false;
    CHECK_THROWS(std::invalid_argument, ManagerFixture{config});
}

}  // namespace

int main() {
    pages_are_found_when_their_copies_are_finished();
    copies_that_failed_are_never_found_and_tried_again();
    sources_stay_while_they_are_copied();
    a_sequence_under_way_leaves_its_pages_to_the_commit_after();
    pages_under_way_are_not_stored_twice(true);
    pages_under_way_are_not_stored_twice(false);
    pages_of_a_truncated_sequence_arrive_without_it();
    what_is_reset_does_not_come_back();
    loads_fill_the_requests_own_pages_and_hold_their_sources();
    a_request_whose_pages_did_not_arrive_begins_again();
    a_request_released_under_way_leaves_nothing();
    lists_for_host_copies_are_asked_for();
}
