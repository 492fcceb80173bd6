// SPDX-License-Identifier: Apache-2.0
// Eviction order with sliding windows. A conversation comes back with its whole history and a few
// new tokens, and must find the pages that it needs.
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

/// Conversations that share one pool.
class Seats {
   public:
    Seats(std::int64_t num_pages, std::int64_t window, std::int64_t chunk, bool dedup = true)
        : scene_(config(num_pages, window, dedup)), chunk_(chunk) {}

    /// Takes a turn and returns the number of history pages that it did not hit.
    std::int64_t turn(Tokens& history, std::int64_t num_new) {
        const std::int64_t known = count(history);
        add(history, random_, num_new);
        return known == 0 ? serve(history, 0) : serve(history, pages_of(known));
    }
    /// Serves a prompt and its answer, stores both in `said`, and returns the number of prompt
    /// pages that were cached.
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
    /// Takes a turn with another token at the end of the last whole page. The turn is not appended
    /// to the history.
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

// Seven conversations take turns: six with 21k tokens and one with 64k. The pool holds all
// full-attention pages and the windows at the ends, but not the windows that the conversations
// passed on the way.
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

// The window before the branch point of several prompts stays cached while it is used, whatever
// other prompts run in between.
TEST(windows_before_branches_stay) {
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
        // The other prompt evicts the windows that were passed in the middle.
        Tokens other;
        seats.turn(other, std::int64_t{20} * kPage);
        CHECK_EQ(seats.edited_turn(prompt), 1);
    }
}

// If a prompt has lost one window page at its end, its other window pages are useless. They are
// evicted before any other prompt loses a window page, and the prompt's full-attention pages are
// evicted after them.
TEST(a_prompt_loses_all_windows_before_the_next_prompt_loses_any) {
    Seats seats(68, 64, 64);
    std::vector<Tokens> prompts(4);
    for (Tokens& prompt : prompts)
        seats.turn(prompt, std::int64_t{10} * kPage);  // 10 full-attention pages, 5 window pages
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

// Prompts come again, each with another answer. The windows at the ends of prompts stay; the
// windows at the ends of answers are evicted first.
TEST(prompts_outlive_answers) {
    constexpr std::int64_t kPrompts = 12;
    const std::int64_t full = kPrompts * 10 + 16;  // all prompts and one answer
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

// If the pool holds both, a prompt that contains the last answer hits the answer.
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

// A request with its own pages next to the tree's pages fills the missing window pages before the
// end of its prompt, even if it goes on for longer than a window.
TEST(a_request_fills_missing_windows_at_its_prompts_end) {
    for (const bool dedup : {true, false}) {
        Seats seats(75, 64, 64, dedup);
        Tokens prompt;
        add(prompt, seats.random(), std::int64_t{10} * kPage + 5);
        Tokens longer = prompt;
        add(longer, seats.random(), std::int64_t{20} * kPage);
        seats.answer(longer, 1);  // passes the end of the prompt
        Tokens other;
        add(other, seats.random(), std::int64_t{20} * kPage);
        seats.answer(other, 1);
        CHECK_EQ(seats.answer(prompt, 90), 0);
        CHECK_EQ(seats.answer(prompt, 90), 10);
    }
}

}  // namespace

}  // namespace tests::layers::group_eviction
