// SPDX-License-Identifier: Apache-2.0
// Layers with a state and a host tier: stored checkpoints, hits on them, and the fate of
// checkpoints whose copies are in flight.
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kvcore/errors.hpp"
#include "support/host_fixture.hpp"

namespace tests::level::state_tier {

using kvcore::StateMove;
using kvcore::Tier;

namespace {

using Moves = std::vector<StateMove>;

kvcore::CacheConfig config(std::int64_t num_slots, std::int64_t host_slots,
                           std::int64_t num_pages = 12) {
    kvcore::CacheConfig config = HostFixture::config(num_pages, 64);
    config.max_sequences = 3;
    config.states = {{0}};
    config.num_state_slots = num_slots;
    config.num_host_state_slots = host_slots;
    return config;
}

struct Scene : HostFixture {
    using HostFixture::HostFixture;

    /// Run a new request up to the position where its checkpoint is due.
    Request begin(const Tokens& tokens) {
        Request request = claim(tokens);
        finish(reserve(request));
        return request;
    }
    /// Commit the next step and return the copies that it requests.
    kvcore::Transfers step(Request& request) {
        request.start = request.active;
        if (request.start == request.end()) request.append(1);
        request.active = request.end();
        return commit_batch({&request});
    }
    /// Leave a prompt in the cache, with its checkpoint.
    void run(const Tokens& tokens, bool done = true) {
        Request request = begin(tokens);
        finish(step(request), done);
        manager.release(request.sequence);
    }
    /// Take all slots of the device for a moment, and all or some of its pages.
    void crowd_out() { crowd_out(manager.config().num_pages / 3 * 2); }
    void crowd_out(std::int64_t num_tokens) {
        std::vector<Request> crowd;
        for (TokenId i = 0; i < 3; ++i) {
            crowd.push_back(claim(count_up(5000 + 100 * i, num_tokens)));
            finish(reserve(crowd.back()));
        }
        for (const Request& request : crowd) manager.release(request.sequence);
    }
    kvcore::StateStats stats() { return manager.state_stats(0); }
};

/// The checkpoint of this prompt is at token 8.
const Tokens& prompt() {
    static const Tokens tokens = count_up(0, 9);
    return tokens;
}

TEST(a_checkpoint_is_stored_where_it_was_computed) {
    Scene scene(config(6, 4));
    Request request = scene.begin(prompt());
    CHECK_EQ(request.active, 8);
    const kvcore::Transfers stores = scene.step(request);
    CHECK((stores.state_copies == Moves{{0, 0, 1}}));
    CHECK((stores.state_moves == Moves{{0, 0, 0, Tier::kDevice, Tier::kHost}}));
    CHECK_EQ(count(stores.tier_moves), 4);
    CHECK_EQ(scene.stats().host_checkpoints, 0);
    // Until the store ends, the request may not write to its slot.
    kvcore::RequestView view = request.view();
    kvcore::Transfers none;
    CHECK_EQ(scene.manager.reserve(view, 1, &none), kvcore::ReserveStatus::kPending);
    CHECK_THROWS(kvcore::PendingTransfersError, scene.manager.begin_again(request.sequence));
    scene.finish(stores);
    CHECK_EQ(scene.stats().host_checkpoints, 1);
    CHECK_EQ(scene.stats().stored_checkpoints, 1);
    CHECK_EQ(scene.manager.reserve(view, 1, &none), kvcore::ReserveStatus::kOk);
}

TEST(pages_and_checkpoint_come_back) {
    Scene scene(config(3, 4));
    scene.run(prompt());
    scene.crowd_out();
    CHECK_EQ(scene.stats().checkpoints, 0);
    CHECK_EQ(scene.manager.match(0, "", prompt().data(), 9), 0);
    Request again = scene.claim(prompt());
    CHECK_EQ(scene.manager.plan(again.view()).hit_tokens, 8);
    const kvcore::Transfers loads = scene.reserve(again);
    CHECK_EQ(again.start, 8);
    CHECK_EQ(count(loads.tier_moves), 4);
    const std::int32_t slot = scene.manager.state_of(again.sequence);
    CHECK((loads.state_moves == Moves{{0, 0, slot, Tier::kHost, Tier::kDevice}}));
    CHECK(loads.state_moves[0].is_load());
    CHECK_EQ(loads.state_moves[0].slot_in(Tier::kDevice), slot);
    scene.finish(loads);
    CHECK_EQ(scene.stats().loaded_checkpoints, 1);
    CHECK_EQ(scene.stats().checkpoint_hits, 1);
}

// The device has evicted only the checkpoint.
TEST(a_checkpoint_comes_back_alone) {
    Scene scene(config(3, 4, 40));
    scene.run(prompt());
    scene.crowd_out(4);
    CHECK_EQ(scene.manager.stats(0).cached_pages, 4);
    Request again = scene.claim(prompt());
    const kvcore::Transfers loads = scene.reserve(again);
    CHECK_EQ(again.start, 8);
    CHECK(loads.tier_moves.empty());
    CHECK_EQ(count(loads.state_moves), 1);
    scene.finish(loads);
    // The request continues from the tier's checkpoint, which other requests still find.
    scene.finish(scene.step(again));
    CHECK_EQ(scene.hit(prompt()), 8);
}

// The tier still has the pages of both requests, but it has evicted their checkpoint.
TEST(requests_that_share_a_prefix_store_one_checkpoint) {
    Scene scene(config(3, 2, 60));
    for (const TokenId start : {0, 200, 300}) scene.run(count_up(start, 9));
    scene.crowd_out(4);
    CHECK_EQ(scene.stats().checkpoints, 0);
    Request first = scene.begin(prompt());
    Request second = scene.begin(prompt());
    CHECK_EQ(first.start + second.start, 0);
    for (Request* each : {&first, &second}) {
        each->start = each->active;
        each->active = each->end();
    }
    const kvcore::Transfers stores = scene.commit_batch({&first, &second});
    CHECK(stores.tier_moves.empty());
    CHECK_EQ(count(stores.state_moves), 1);
    scene.finish(stores);
    CHECK_EQ(scene.stats().host_checkpoints, 2);
    CHECK_EQ(scene.stats().stored_checkpoints, 4);
    CHECK_EQ(scene.hit(prompt()), 8);
}

// Requests hold all slots of the device.
TEST(a_full_device_has_checkpoints_in_the_tier) {
    Scene scene(config(3, 4, 40));
    Request first = scene.begin(count_up(200, 4));
    Request second = scene.begin(count_up(300, 4));
    Request request = scene.begin(prompt());
    const kvcore::Transfers stores = scene.step(request);
    CHECK(stores.state_copies.empty());
    CHECK_EQ(count(stores.state_moves), 1);
    // No request gets the slot before its state is stored.
    scene.manager.release(request.sequence);
    CHECK_EQ(scene.stats().available_slots, 0);
    scene.finish(stores);
    CHECK_EQ(scene.stats().available_slots, 1);
    CHECK_EQ(scene.hit(prompt()), 8);
    CHECK_EQ(scene.manager.match(0, "", prompt().data(), 9), 0);
    CHECK_EQ(scene.manager.recommend_replica("", prompt().data(), 9), 0);
}

TEST(what_fails_is_a_miss) {
    Scene scene(config(3, 4));
    scene.run(prompt(), false);
    CHECK_EQ(scene.stats().host_checkpoints, 0);
    CHECK_EQ(scene.stored(), 0);
    CHECK_EQ(scene.hit(prompt()), 0);
    scene.run(prompt());
    scene.crowd_out();
    Request again = scene.claim(prompt());
    const kvcore::Transfers loads = scene.reserve(again);
    CHECK_EQ(loads.moved[0].start, 0);
    scene.finish(loads, false);
    CHECK_EQ(scene.manager.state_of(again.sequence), -1);
    CHECK_EQ(scene.stats().available_slots, 3);
    CHECK_EQ(scene.stats().loaded_checkpoints, 0);
    again.start = 0;
    again.active = again.end();
    scene.finish(scene.reserve(again));
    CHECK_EQ(again.start, 8);
}

// A slot keeps its content until its copy ends, even if its request is released.
TEST(releases_in_the_middle) {
    Scene scene(config(3, 4));
    Request request = scene.begin(prompt());
    const kvcore::Transfers stores = scene.step(request);
    scene.manager.release(request.sequence);
    scene.manager.check_integrity();
    scene.finish(stores);
    CHECK_EQ(scene.stats().available_slots, 3);
    scene.crowd_out();
    CHECK_EQ(scene.hit(prompt()), 8);
    Request again = scene.claim(prompt());
    const kvcore::Transfers loads = scene.reserve(again);
    scene.manager.release(again.sequence);
    scene.manager.reset_prefix_cache();
    scene.manager.check_integrity();
    CHECK_EQ(scene.stats().host_checkpoints, 0);
    scene.finish(loads);
    CHECK_EQ(scene.stats().available_slots, 3);
    CHECK_EQ(scene.stored(), 0);
}

// A store that is in flight during a reset leaves no record, whether its request continues or has
// ended.
TEST(resets_in_the_middle) {
    for (const bool is_released : {false, true}) {
        Scene scene(config(6, 4));
        Request request = scene.begin(prompt());
        const kvcore::Transfers stores = scene.step(request);
        if (is_released) scene.manager.release(request.sequence);
        scene.manager.reset_prefix_cache();
        scene.finish(stores);
        CHECK_EQ(scene.stats().host_checkpoints, 0);
        CHECK_EQ(scene.stored(), 0);
    }
}

TEST(the_least_recently_used_goes) {
    Scene scene(config(3, 2));
    scene.run(count_up(0, 9));
    scene.run(count_up(100, 9));
    scene.crowd_out();
    scene.manager.reset_metrics();
    Request again = scene.claim(count_up(0, 9));
    scene.finish(scene.reserve(again));
    CHECK_EQ(scene.stats().loaded_checkpoints, 1);
    scene.manager.release(again.sequence);
    scene.run(count_up(200, 9));
    CHECK_EQ(scene.stats().host_checkpoints, 2);
    CHECK_EQ(scene.stats().host_slots, 2);
    CHECK_EQ(scene.stats().stored_checkpoints, 1);
    scene.crowd_out();
    CHECK_EQ(scene.hit(count_up(0, 9)), 8);
    CHECK_EQ(scene.hit(count_up(100, 9)), 0);
    CHECK_EQ(scene.hit(count_up(200, 9)), 8);
}

// A tier without state slots serves its pages only as far as the device has a checkpoint.
TEST(a_tier_of_pages_alone) {
    Scene scene(config(6, 0));
    scene.run(prompt());
    CHECK_EQ(scene.stored(), 4);
    CHECK_EQ(scene.stats().host_slots, 0);
    scene.crowd_out();
    CHECK_EQ(scene.hit(prompt()), 0);
    // The request runs up to the end of the tier's pages and makes a checkpoint at that token.
    Request again = scene.claim(prompt());
    CHECK_EQ(scene.manager.plan(again.view()).active, 8);
}

// Evicting a record frees its pages and its checkpoint.
TEST(a_full_tier) {
    kvcore::CacheConfig given = config(6, 8);
    given.host_pages = 5;
    Scene scene(given);
    scene.run(count_up(0, 9));
    scene.run(count_up(100, 9));
    CHECK_EQ(scene.stored(), 5);
    CHECK_EQ(scene.stats().host_checkpoints, 1);
    scene.crowd_out();
    CHECK_EQ(scene.hit(count_up(0, 9)), 0);
    CHECK_EQ(scene.hit(count_up(100, 9)), 8);
}

TEST(groups_are_counted) {
    kvcore::CacheConfig given = config(3, 4, 24);
    given.groups = {{}, {kvcore::GroupKind::kSliding, 4, 1, 0}};
    Scene scene(given);
    scene.run(prompt());
    std::vector<kvcore::GroupStats> stats = scene.manager.group_stats(0);
    CHECK_EQ(stats[0].stored_pages, 4);
    CHECK_EQ(stats[1].stored_pages, 4);
    CHECK_EQ(scene.manager.metrics().stored_pages, 8);
    scene.crowd_out(8);
    Request again = scene.claim(prompt());
    scene.finish(scene.reserve(again));
    CHECK_EQ(again.start, 8);
    stats = scene.manager.group_stats(0);
    CHECK_EQ(stats[0].loaded_pages + stats[1].loaded_pages, scene.manager.metrics().loaded_pages);
    CHECK(stats[0].loaded_pages > 0 && stats[1].loaded_pages > 0);
    CHECK_EQ(scene.stats().loaded_checkpoints, 1);
    scene.manager.reset_metrics();
    CHECK_EQ(scene.manager.group_stats(0)[0].loaded_pages, 0);
    CHECK_EQ(scene.stats().loaded_checkpoints, 0);
}

}  // namespace

}  // namespace tests::level::state_tier
