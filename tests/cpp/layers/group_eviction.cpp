// SPDX-License-Identifier: Apache-2.0
// What goes first where layers have windows: so that conversations, which come back with all they
// said and a little more, find what they need.
#include <cstdint>
#include <string>
#include <vector>

#include "support/check.hpp"
#include "support/group_scene.hpp"
#include "support/layer_groups.hpp"
#include "support/random.hpp"

namespace tests::layers::group_eviction {

namespace {

constexpr std::int32_t kPage = 16;

void add(Tokens& tokens, Random& random, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) tokens.push_back(static_cast<TokenId>(random.below(9000)));
}
std::int64_t pages_of(std::int64_t tokens) { return tokens / kPage; }

/// Conversations in one pool.
class Seats {
   public:
    Seats(std::int64_t num_pages, std::int64_t window, std::int64_t chunk, bool dedup = true)
        : scene_(config(num_pages, window, dedup)), chunk_(chunk) {}

    /// Takes a turn: returns how many pages of its history it did not hit.
    std::int64_t turn(Tokens& history, std::int64_t num_new) {
        const std::int64_t known = count(history);
        add(history, random_, num_new);
        return known == 0 ? serve(history, 0) : serve(history, pages_of(known));
    }
    /// Serves a prompt and its answer; returns how many pages of the prompt were cached. `said`:
    /// becomes both of them.
    std::int64_t answer(const Tokens& prompt, std::int64_t num_tokens, Tokens* said = nullptr) {
        Request request = scene_.claim(prompt);
        request.active = std::min(chunk_, request.end());
        CHECK_EQ(scene_.reserve(request), kvcore::ReserveStatus::kOk);
        const std::int64_t hit = pages_of(request.start);
        request.active = std::min(request.end(), request.start + chunk_);
        scene_.complete(request, chunk_);
        for (std::int64_t i = 1; i < num_tokens; ++i) {
            CHECK_EQ(scene_.reserve(request), kvcore::ReserveStatus::kOk);
            CHECK(scene_.run({&request}));
            scene_.step({&request}, static_cast<TokenId>(20000 + random_.below(9000)));
        }
        scene_.manager.release(request.sequence);
        if (said != nullptr) *said = request.tokens();
        return hit;
    }
    /// The same with another token where the last whole page ends, and nothing to follow.
    std::int64_t edited_turn(const Tokens& history) {
        Tokens edited = history;
        item(edited, pages_of(count(history)) * kPage - 2) += 10000;
        add(edited, random_, 80);
        return serve(edited, pages_of(count(history)));
    }
    GroupScene& scene() { return scene_; }
    Random& random() { return random_; }

   private:
    static kvcore::CacheConfig config(std::int64_t num_pages, std::int64_t window, bool dedup) {
        kvcore::CacheConfig config =
            GroupScene::config(kPage, num_pages, {full(), sliding(window)});
        config.dedup = dedup;
        config.max_seq_len = 70000;
        return config;
    }
    std::int64_t serve(const Tokens& prompt, std::int64_t known) {
        Request request = scene_.claim(prompt);
        request.active = std::min(chunk_, request.end());
        CHECK_EQ(scene_.reserve(request), kvcore::ReserveStatus::kOk);
        const std::int64_t missed = known - pages_of(request.start);
        request.active = std::min(request.end(), request.start + chunk_);
        scene_.complete(request, chunk_);
        scene_.manager.release(request.sequence);
        return missed;
    }

    GroupScene scene_;
    Random random_{20261122};
    std::int64_t chunk_;
};

// Six seats of 21k tokens and one of 64k in turn, in a pool that holds all they said in full and
// the windows at its end, but not those passed on the way.
TEST(conversations_hit_their_history) {
    constexpr std::int64_t kChunk = 2048;
    constexpr std::int64_t kWindow = 1024;
    const std::int64_t full = pages_of(6 * 21000 + 64000) + std::int64_t{21} * (200 / kPage + 1);
    const std::int64_t tails = 7 * (kWindow / kPage + 2);
    const std::int64_t running = (kWindow - 1 + kChunk) / kPage + 2;
    Seats seats(full + tails + running, kWindow, kChunk);
    std::vector<Tokens> histories(7);
    for (int round = 0; round < 4; ++round) {
        for (std::size_t i = 0; i < histories.size(); ++i) {
            const bool is_first = round == 0;
            const std::int64_t first = i == 3 ? 64000 : 21000;
            const std::int64_t more = is_first ? first : seats.random().between(60, 200);
            check::note = "round " + std::to_string(round) + ", seat " + std::to_string(i);
            const std::int64_t missed =
                round < 3 ? seats.turn(histories[i], more) : seats.edited_turn(histories[i]);
            if (round == 1 || round == 2) CHECK(missed <= 2);
            if (round == 3) CHECK(missed <= 3);
        }
    }
    check::note.clear();
}

// The window in front of where prompts part stays as long as it is used, whatever comes between.
TEST(windows_in_front_of_branches_stay) {
    Seats seats(220, 64, 32);
    Tokens common;
    add(common, seats.random(), std::int64_t{20} * kPage);
    for (int i = 0; i < 30; ++i) {
        check::note = "prompt " + std::to_string(i);
        Tokens prompt = common;
        const std::int64_t missed = seats.turn(prompt, std::int64_t{9} * kPage);
        if (i > 1) CHECK_EQ(missed, 0);
        Tokens other;
        seats.turn(other, std::int64_t{12} * kPage);
    }
    check::note.clear();
}

// A prompt edited in its last page hits one page earlier.
TEST(an_edit_costs_a_page) {
    Seats seats(400, 64, 48);
    for (const std::int64_t n : {100, 320, 331, 335, 336}) {
        Tokens prompt;
        seats.turn(prompt, n);
        // Windows passed in the middle go.
        Tokens other;
        seats.turn(other, std::int64_t{20} * kPage);
        CHECK_EQ(seats.edited_turn(prompt), 1);
    }
}

// Who lost a page of the window at its end can use none of the others: they go before anybody else
// loses one, and then what is full.
TEST(one_loses_all_before_the_next_loses_any) {
    Seats seats(68, 64, 64);
    std::vector<Tokens> prompts(4);
    for (Tokens& prompt : prompts)
        seats.turn(prompt, std::int64_t{10} * kPage);  // 10 pages and 5 of windows
    const auto hits = [&] {
        std::int64_t hits = 0;
        for (const Tokens& prompt : prompts) hits += seats.scene().match(prompt) > 0 ? 1 : 0;
        return hits;
    };
    CHECK_EQ(hits(), 4);
    for (int i = 0; i < 3; ++i) {  // 6 pages each
        Tokens other;
        seats.turn(other, std::int64_t{3} * kPage);
        CHECK_EQ(hits(), i == 0 ? 4 : 3);
    }
}

// Prompts that come again, each with another answer: the windows at the ends of prompts stay, those
// at the ends of answers go first.
TEST(prompts_outlive_answers) {
    constexpr std::int64_t kPrompts = 12;
    const std::int64_t full = kPrompts * 10 + 16;  // and one answer
    const std::int64_t ends = kPrompts * 5;
    Seats seats(full + ends + 16, 64, 64);
    std::vector<Tokens> prompts(kPrompts);
    for (Tokens& prompt : prompts) add(prompt, seats.random(), std::int64_t{10} * kPage + 5);
    for (int round = 0; round < 4; ++round) {
        for (std::size_t i = 0; i < prompts.size(); ++i) {
            check::note = "round " + std::to_string(round) + ", prompt " + std::to_string(i);
            const std::int64_t hit = seats.answer(prompts[i], 90);
            if (round > 0) CHECK_EQ(hit, 10);
        }
    }
    check::note.clear();
}

// Where there is room for both, a prompt that contains the last answer hits it.
TEST(answers_are_hit_where_there_is_room) {
    Seats seats(400, 64, 64);
    Tokens history;
    add(history, seats.random(), std::int64_t{10} * kPage + 5);
    for (int turn = 0; turn < 4; ++turn) {
        const std::int64_t known = pages_of(count(history) - 21);
        Tokens said;
        const std::int64_t hit = seats.answer(history, 90, &said);
        if (turn > 0) CHECK_EQ(hit, known);
        history = said;
        add(history, seats.random(), 20);
    }
}

// A request that has pages of its own beside those of the tree fills the tree's holes in front of
// its prompt's end, also where it goes on for longer than a window.
TEST(a_prompts_end_is_filled_by_who_passes_it) {
    for (const bool dedup : {true, false}) {
        Seats seats(75, 64, 64, dedup);
        Tokens prompt;
        add(prompt, seats.random(), std::int64_t{10} * kPage + 5);
        Tokens longer = prompt;
        add(longer, seats.random(), std::int64_t{20} * kPage);
        seats.answer(longer, 1);  // which passes the end of the prompt
        Tokens other;
        add(other, seats.random(), std::int64_t{20} * kPage);
        seats.answer(other, 1);
        CHECK_EQ(seats.answer(prompt, 90), 0);
        CHECK_EQ(seats.answer(prompt, 90), 10);
    }
}

}  // namespace

}  // namespace tests::layers::group_eviction
