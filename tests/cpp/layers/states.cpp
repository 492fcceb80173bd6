// SPDX-License-Identifier: Apache-2.0
// Layers with recurrent states: the places of checkpoints, their hits, and the owners of slots.
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "support/check.hpp"
#include "support/group_scene.hpp"

namespace tests::layers::states {

using kvcore::CacheGroup;
using kvcore::GroupKind;
using kvcore::StateMove;

namespace {

using Copies = std::vector<StateMove>;

constexpr CacheGroup kFull{GroupKind::kFull, 0, 1, 0};

kvcore::CacheConfig config(std::int64_t num_slots, std::vector<kvcore::StateGroup> states = {{0}},
                           std::int64_t max_sequences = 4) {
    kvcore::CacheConfig config = GroupScene::config(16, 64, {kFull});
    config.max_sequences = max_sequences;
    config.states = std::move(states);
    config.num_state_slots = num_slots;
    return config;
}

// Runs a prompt to its end, chunk by chunk, and returns the ends of the chunks.
std::vector<std::int64_t> run_prompt(GroupScene& scene, Request& request) {
    const std::int64_t end = request.end();
    std::vector<std::int64_t> ends;
    while (request.start < end) {
        CHECK(scene.run({&request}));
        ends.push_back(request.active);
        scene.step({&request}, 7);
    }
    return ends;
}
void put(GroupScene& scene, const Tokens& tokens) {
    Request request = scene.claim(tokens);
    run_prompt(scene, request);
    scene.manager.release(request.sequence);
    static_cast<void>(scene.manager.take_state_copies());
}

TEST(a_prompt_is_cut_before_its_last_page) {
    GroupScene scene(config(8));
    Request request = scene.claim(count_up(0, 55));
    const kvcore::ReservePlan plan = scene.manager.plan(request.view());
    CHECK_EQ(plan.active, 48);
    CHECK_EQ(plan.new_pages, 4);
    CHECK_EQ(scene.reserve(request), kvcore::ReserveStatus::kOk);
    CHECK_EQ(request.active, 48);
    CHECK_EQ(run_prompt(scene, request), (std::vector<std::int64_t>{48, 55}));
    CHECK((scene.manager.take_state_copies() == Copies{{0, 0, 1}}));
    CHECK_EQ(scene.match(count_up(0, 55)), 48);
    CHECK_EQ(scene.match(count_up(0, 47)), 0);
    Request again = scene.claim(count_up(0, 48) + count_up(900, 5));
    CHECK_EQ(scene.manager.plan(again.view()).hit_tokens, 48);
    CHECK_EQ(scene.reserve(again), kvcore::ReserveStatus::kOk);
    CHECK_EQ(again.start, 48);
    CHECK_EQ(again.active, 53);
    CHECK((scene.manager.take_state_copies() == Copies{{0, 1, 2}}));
    const kvcore::StateStats stats = scene.manager.state_stats(0);
    CHECK_EQ(stats.used_slots, 2);
    CHECK_EQ(stats.checkpoints, 1);
    CHECK_EQ(stats.checkpoint_hits, 1);
    CHECK_EQ(stats.available_slots, 6);
}

// A prompt of whole pages has its checkpoint one page before its end.
TEST(the_boundary_is_below_the_end) {
    GroupScene scene(config(8));
    Request request = scene.claim(count_up(0, 48));
    CHECK_EQ(run_prompt(scene, request), (std::vector<std::int64_t>{32, 48}));
    CHECK_EQ(scene.match(count_up(0, 48)), 32);
    Request small = scene.claim(count_up(500, 16));
    CHECK_EQ(run_prompt(scene, small), (std::vector<std::int64_t>{16}));
    CHECK_EQ(scene.match(count_up(500, 16)), 0);
}

TEST(a_checkpoint_is_made_where_prompts_branch) {
    GroupScene scene(config(8));
    put(scene, count_up(0, 64));
    CHECK_EQ(scene.match(count_up(0, 64)), 48);
    Request second = scene.claim(count_up(0, 32) + count_up(700, 8));
    CHECK_EQ(scene.reserve(second), kvcore::ReserveStatus::kOk);
    CHECK_EQ(second.start, 0);
    CHECK_EQ(second.active, 32);
    CHECK_EQ(run_prompt(scene, second), (std::vector<std::int64_t>{32, 40}));
    Request third = scene.claim(count_up(0, 32) + count_up(800, 8));
    CHECK_EQ(scene.reserve(third), kvcore::ReserveStatus::kOk);
    CHECK_EQ(third.start, 32);
    // The deepest checkpoint before the branch serves a prompt that continues elsewhere, and a new
    // checkpoint is made at the branch.
    put(scene, count_up(0, 48) + count_up(600, 40));
    Request last = scene.claim(count_up(0, 48) + count_up(600, 20));
    CHECK_EQ(scene.reserve(last), kvcore::ReserveStatus::kOk);
    CHECK_EQ(last.start, 48);
    CHECK_EQ(last.active, 64);
}

// A boundary of one group is a boundary of all groups.
TEST(intervals) {
    GroupScene scene(config(12, {{32}, {48}, {0}}));
    Request request = scene.claim(count_up(0, 130));
    CHECK_EQ(run_prompt(scene, request), (std::vector<std::int64_t>{32, 48, 64, 96, 128, 130}));
    while (request.end() < 165) {
        CHECK(scene.run({&request}));
        scene.step({&request}, 7);
    }
    for (const std::int64_t n : {32, 48, 64, 96, 128, 144, 160}) {
        const Tokens& all = request.tokens();
        CHECK_EQ(scene.match({all.begin(), all.begin() + n}), n);
        CHECK(n == 32 || scene.match({all.begin(), all.begin() + n - 1}) < n);
    }
    CHECK_EQ(scene.manager.state_stats(0).checkpoints, 7);
}

TEST(a_cut_chunk_runs_alone) {
    GroupScene scene(config(8));
    Request request = scene.claim(count_up(0, 55));
    kvcore::RequestView view = request.view();
    CHECK_THROWS(std::invalid_argument, scene.manager.plan(view, 2));
    CHECK_THROWS(std::invalid_argument, scene.manager.reserve(view, 2));
    kvcore::FetchTarget target;
    CHECK_THROWS(std::invalid_argument, scene.manager.fetch({&view, 1}, 3, &target));
    Request small = scene.claim(count_up(900, 4));
    kvcore::RequestView views[] = {small.view(), view};
    CHECK_THROWS(std::invalid_argument, scene.manager.reserve_batch({views, 2}, 2));
    CHECK_EQ(scene.manager.stats(0).free_pages, 64);
    CHECK_EQ(scene.manager.state_stats(0).used_slots, 0);
    CHECK_EQ(view.active, 55);
    CHECK_EQ(scene.manager.reserve(views[0], 2), kvcore::ReserveStatus::kOk);
}

// Several steps run past a boundary, so the state in the slot is no longer the state of the
// boundary.
TEST(a_state_past_the_boundary_makes_no_checkpoint) {
    GroupScene scene(config(8, {{16}}));
    Request request = scene.claim(count_up(0, 15));
    run_prompt(scene, request);
    std::vector<std::uint32_t> cells(64);
    std::uint32_t length = 0;
    kvcore::LookupTable table(cells.data(), 1, 64, ~0U);
    kvcore::FetchTarget target;
    target.table = &table;
    target.cache_lengths = &length;
    kvcore::RequestView view = request.view();
    CHECK_EQ(scene.manager.fetch({&view, 1}, 3, &target).status, kvcore::FetchStatus::kOk);
    scene.step({&request}, 7);
    CHECK_EQ(request.start, 16);
    CHECK_EQ(scene.match(request.tokens()), 0);
    CHECK_EQ(scene.manager.state_stats(0).checkpoints, 0);
}

// Without a free slot there is no checkpoint, but the request continues.
TEST(without_a_free_slot_no_checkpoint_is_made) {
    GroupScene scene(config(1, {{16}}, 1));
    Request request = scene.claim(count_up(0, 55));
    CHECK_EQ(count(run_prompt(scene, request)), 4);
    CHECK_EQ(scene.manager.state_stats(0).checkpoints, 0);
    CHECK_EQ(scene.match(count_up(0, 55)), 0);
}

// The only slot left holds the checkpoint of the hit. The request takes the slot over without a
// copy.
TEST(a_request_takes_the_checkpoint_over) {
    GroupScene scene(config(2, {{0}}, 2));
    put(scene, count_up(0, 40));
    Request other = scene.claim(count_up(500, 3));
    CHECK_EQ(scene.reserve(other), kvcore::ReserveStatus::kOk);
    Request again = scene.claim(count_up(0, 40));
    CHECK(scene.manager.plan(again.view()).fits);
    CHECK_EQ(scene.reserve(again), kvcore::ReserveStatus::kOk);
    CHECK_EQ(again.start, 32);
    CHECK_EQ(scene.manager.state_of(again.sequence), 1);
    CHECK(scene.manager.take_state_copies().empty());
    CHECK_EQ(scene.manager.state_stats(0).checkpoints, 0);
    CHECK_EQ(scene.match(count_up(0, 40)), 0);
}

// The slot of a pinned checkpoint is not available.
TEST(pins_hold_checkpoints) {
    GroupScene scene(config(2, {{0}}, 2));
    put(scene, count_up(0, 40));
    const Tokens tokens = count_up(0, 40);
    const kvcore::PinHandle pin = scene.manager.pin(0, "", tokens.data(), 40);
    CHECK_EQ(pin.num_tokens, 32);
    CHECK_EQ(scene.manager.state_stats(0).available_slots, 1);
    Request first = scene.claim(count_up(500, 3));
    CHECK_EQ(scene.reserve(first), kvcore::ReserveStatus::kOk);
    Request second = scene.claim(tokens);
    CHECK(!scene.manager.plan(second.view()).fits);
    CHECK_EQ(scene.reserve(second), kvcore::ReserveStatus::kNoSpace);
    kvcore::RequestView view = second.view();
    kvcore::FetchTarget target;
    const kvcore::FetchResult result = scene.manager.fetch({&view, 1}, 1, &target);
    CHECK_EQ(result.status, kvcore::FetchStatus::kNoSpace);
    CHECK(result.lacks_slot);
    CHECK_EQ(scene.match(tokens), 32);
    scene.manager.unpin(pin);
    CHECK_EQ(scene.reserve(second), kvcore::ReserveStatus::kOk);
    CHECK_EQ(second.start, 32);
}

// The least recently used checkpoint is evicted first. Slots in use are never evicted.
TEST(order_of_eviction) {
    GroupScene scene(config(4, {{0}}, 2));
    for (const TokenId k : {1000, 2000, 3000}) put(scene, count_up(k, 20));
    CHECK_EQ(scene.manager.state_stats(0).checkpoints, 3);
    Request again = scene.claim(count_up(1000, 20));  // uses the oldest checkpoint
    CHECK_EQ(scene.reserve(again), kvcore::ReserveStatus::kOk);
    CHECK_EQ(again.start, 16);
    Request other = scene.claim(count_up(4000, 4));
    CHECK_EQ(scene.reserve(other), kvcore::ReserveStatus::kOk);
    CHECK_EQ(scene.match(count_up(2000, 20)), 0);
    CHECK_EQ(scene.match(count_up(1000, 20)), 16);
    CHECK_EQ(scene.match(count_up(3000, 20)), 16);
}

TEST(forks_copy_the_state) {
    GroupScene scene(config(4, {{0}}, 4));
    Request parent = scene.claim(count_up(0, 20));
    run_prompt(scene, parent);
    static_cast<void>(scene.manager.take_state_copies());
    Request children[] = {parent, parent};
    kvcore::RequestView views[] = {children[0].view(), children[1].view()};
    scene.manager.fork(parent.view(), {views, 2});
    CHECK((scene.manager.take_state_copies() == Copies{{0, 0, 2}, {0, 0, 3}}));
    CHECK_EQ(views[0].start, 20);
    CHECK_EQ(scene.manager.state_stats(0).available_slots, 1);  // the checkpoint at 16
    // After a fetch, the state may be ahead of the first token of the children.
    CHECK(scene.run({&parent}));
    kvcore::RequestView late = parent.view();
    CHECK_THROWS(std::invalid_argument, scene.manager.fork(parent.view(), {&late, 1}));
    scene.step({&parent}, 9);
    const Tokens cached = count_up(0, 20);
    const kvcore::PinHandle pin = scene.manager.pin(0, "", cached.data(), 20);
    kvcore::RequestView more = parent.view();
    CHECK_THROWS(kvcore::CapacityError, scene.manager.fork(parent.view(), {&more, 1}));
    scene.manager.unpin(pin);
    scene.manager.fork(parent.view(), {&more, 1});
    CHECK((scene.manager.take_state_copies() == Copies{{0, 0, 1}}));
}

TEST(truncation) {
    GroupScene scene(config(8));
    Request request = scene.claim(count_up(0, 40));
    run_prompt(scene, request);
    static_cast<void>(scene.manager.take_state_copies());
    for (const std::int64_t n : {39, 33, 31, 16, 1}) {
        CHECK_THROWS(std::invalid_argument, scene.manager.truncate(request.sequence, n));
    }
    scene.manager.truncate(request.sequence, 40);
    CHECK(scene.manager.take_state_copies().empty());
    scene.manager.truncate(request.sequence, 32);
    CHECK((scene.manager.take_state_copies() == Copies{{0, 1, 0}}));
    request.rewind(33);
    CHECK(scene.run({&request}));
    // The state is ahead of the written tokens until the commit.
    CHECK_THROWS(std::invalid_argument, scene.manager.truncate(request.sequence, 31));
    scene.manager.truncate(request.sequence, 33);
    scene.step({&request}, 3);
    scene.manager.truncate(request.sequence, 0);
    request.rewind(1);
    request.start = 0;
    CHECK(scene.run({&request}));
}

// After a reset, no prefix is found, although a request still uses its pages.
TEST(reset_forgets_checkpoints) {
    GroupScene scene(config(8));
    Request request = scene.claim(count_up(0, 40));
    run_prompt(scene, request);
    CHECK_EQ(scene.match(count_up(0, 40)), 32);
    scene.manager.reset_prefix_cache();
    CHECK_EQ(scene.match(count_up(0, 40)), 0);
    CHECK_EQ(scene.manager.state_stats(0).checkpoints, 0);
}

// A checkpoint is not found while its copy is in flight. A failed copy makes no checkpoint.
TEST(a_checkpoint_is_found_after_its_copy) {
    for (const bool done : {true, false}) {
        GroupScene scene(config(8));
        Request request = scene.claim(count_up(0, 40));
        CHECK(scene.run({&request}, true));
        request.start = 32;
        request.active = 40;
        kvcore::RequestView view = request.view();
        kvcore::Transfers transfers;
        scene.manager.commit({&view, 1}, scene.swaps, &transfers);
        CHECK((transfers.state_copies == Copies{{0, 0, 1}}));
        CHECK_EQ(scene.match(count_up(0, 40)), 0);
        kvcore::FetchTarget target;
        CHECK_EQ(scene.manager.fetch({&view, 1}, 1, &target).status, kvcore::FetchStatus::kPending);
        scene.manager.finish(transfers.ticket, done);
        CHECK_EQ(scene.match(count_up(0, 40)), done ? 32 : 0);
        CHECK_EQ(scene.manager.state_stats(0).checkpoints, done ? 1 : 0);
        CHECK(scene.run({&request}, true));
        scene.manager.release(request.sequence);
    }
}

TEST(refused_configurations) {
    const auto refused = [](const kvcore::CacheConfig& given) {
        CHECK_THROWS(std::invalid_argument, kvcore::CacheManager(given));
    };
    refused(config(3));
    refused(config(8, {{8}}));
    refused(config(8, {{-16}}));
    refused(config(8, {}));
    kvcore::CacheConfig host = config(8);
    host.num_host_state_slots = 8;
    refused(host);  // the host tier has no pages
    host.states.clear();
    host.num_state_slots = 0;
    host.host_pages = 8;
    refused(host);
}

kvcore::CacheConfig config_with_drafts(std::int64_t drafts) {
    kvcore::CacheConfig made = config(12);
    made.max_draft_tokens = drafts;
    return made;
}

// Returns a request whose prompt of 40 tokens has run, with two draft tokens after the sampled
// token.
Request drafted(GroupScene& scene) {
    Request request = scene.claim(count_up(0, 40));
    run_prompt(scene, request);
    static_cast<void>(scene.manager.take_state_copies());
    for (const TokenId draft : {70, 71}) request.append(draft);
    request.active = request.end();
    return request;
}

// Rejects the last `n` of the tokens 40 .. 42 and samples a token after the others.
void reject(Request& request, std::int64_t n) {
    request.rewind(43 - n);
    request.start = request.end();
    request.append(9);
    request.active = request.end();
}

TEST(rejected_drafts_go_back_to_the_kept_state) {
    GroupScene scene(config_with_drafts(2));
    Request request = drafted(scene);
    CHECK(scene.run({&request}));
    CHECK((scene.manager.take_state_copies() == Copies{{0, 0, 2}}));
    reject(request, 1);
    scene.commit({&request});
    CHECK_EQ(scene.manager.plan(request.view()).active, 43);
    CHECK(scene.run({&request}));
    CHECK_EQ(request.start, 40);
    CHECK_EQ(request.active, 43);
    CHECK((scene.manager.take_state_copies() == Copies{{0, 2, 0}}));
    CHECK_EQ(scene.manager.state_stats(0).used_slots, 2);
    scene.step({&request}, 8);
    CHECK(scene.run({&request}));
    CHECK_EQ(request.start, 43);
    CHECK(scene.manager.take_state_copies().empty());
    scene.manager.release(request.sequence);
    CHECK_EQ(scene.manager.state_stats(0).used_slots, 0);
}

// The copy back fails, and the view still has the later position. The request goes back again.
TEST(a_copy_back_that_fails_is_owed) {
    GroupScene scene(config_with_drafts(2));
    Request request = drafted(scene);
    CHECK(scene.run({&request}, true));
    reject(request, 2);
    scene.commit({&request});
    kvcore::RequestView view = request.view();
    kvcore::Transfers transfers;
    CHECK_EQ(scene.manager.reserve(view, 1, &transfers), kvcore::ReserveStatus::kOk);
    CHECK((transfers.state_copies == Copies{{0, 2, 0}}));
    CHECK_EQ(view.start, 40);
    scene.manager.finish(transfers.ticket, false);
    view = request.view();
    CHECK_EQ(view.start, 41);
    transfers.clear();
    kvcore::FetchTarget target;
    CHECK_EQ(scene.manager.fetch({&view, 1}, 1, &target, &transfers).status,
             kvcore::FetchStatus::kPending);
    CHECK_EQ(scene.manager.take_owed(request.sequence, transfers), kvcore::OwedStatus::kTaken);
    CHECK((transfers.state_copies == Copies{{0, 2, 0}}));
    scene.manager.finish(transfers.ticket);
    CHECK(scene.run({&request}, true));
    CHECK_EQ(request.start, 40);
    scene.manager.check_integrity();
}

// A state is not kept either if there are fewer than two slots for each sequence.
void test_without_a_kept_state_rejected_drafts_are_refused(std::int64_t drafts,
                                                           std::int64_t slots) {
    kvcore::CacheConfig given = config(slots);
    given.max_draft_tokens = drafts;
    GroupScene scene(given);
    Request request = drafted(scene);
    CHECK(scene.run({&request}));
    CHECK_THROWS(std::invalid_argument, scene.run({&request}));  // cannot be repeated
    reject(request, 1);
    scene.commit({&request});
    CHECK_THROWS(std::invalid_argument, scene.run({&request}));
    kvcore::RequestView view = request.view();
    CHECK_THROWS(std::invalid_argument, scene.manager.reserve(view));
    CHECK_THROWS(std::invalid_argument, scene.manager.plan(view));
    CHECK(scene.manager.take_state_copies().empty());
    scene.manager.truncate(request.sequence, 32);
    request.rewind(33);
    request.start = 32;
    CHECK(scene.run({&request}));
}

// The list of copies also stays short if drafts run in many rounds and the caller never takes the
// copies.
TEST(the_list_of_drafts_stays_short) {
    GroupScene scene(config_with_drafts(2));
    Request request = scene.claim(count_up(0, 40));
    run_prompt(scene, request);
    for (int i = 0; i < 150; ++i) {
        for (const TokenId draft : {70, 71}) request.append(draft);
        request.active = request.end();
        CHECK(scene.run({&request}));
        const std::int64_t kept = i % 2 == 0 ? request.active : request.active - 1;
        request.rewind(kept);
        request.start = kept;
        request.append(9);
        request.active = request.end();
        scene.commit({&request});
    }
    CHECK(count(scene.manager.take_state_copies()) < 70);
}

// The list of copies stays short even if the caller never takes them.
TEST(the_list_stays_short) {
    GroupScene scene(config(6, {{0}}, 2));
    for (int i = 0; i < 2000; ++i) {
        Request request = scene.claim(count_up(0, 16) + count_up(1000 * (i % 7), 16));
        run_prompt(scene, request);
        scene.manager.release(request.sequence);
    }
    CHECK(count(scene.manager.take_state_copies()) < 200);
}

TEST(without_a_kept_state_rejected_drafts_are_refused) {
    test_without_a_kept_state_rejected_drafts_are_refused(0, 12);
    test_without_a_kept_state_rejected_drafts_are_refused(2, 7);
}

}  // namespace

}  // namespace tests::layers::states
