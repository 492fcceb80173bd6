// SPDX-License-Identifier: Apache-2.0
// The record of the runs of pages that left a tree.
#include "observe/lost_runs.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "support/check.hpp"

namespace tests::observe::lost_runs {

using kvcore::LostRuns;
using kvcore::Misses;
using kvcore::TokenId;
using Tokens = std::vector<TokenId>;

namespace {

constexpr std::int32_t kPage = 2;

/// Pages of two tokens; page `p` has the tokens p and 0.
struct Record {
    explicit Record(std::int64_t most_pages) : runs(kPage, most_pages) {}

    static Tokens pages(const std::vector<TokenId>& names) {
        Tokens tokens;
        for (const TokenId name : names) tokens.insert(tokens.end(), {name, 0});
        return tokens;
    }
    static std::int32_t count(const Tokens& tokens) {
        return static_cast<std::int32_t>(tokens.size()) / kPage;
    }
    [[nodiscard]] std::uint64_t path(const std::vector<TokenId>& names) const {
        const Tokens tokens = pages(names);
        return runs.extended(LostRuns::hash_of_name(""), tokens.data(), count(tokens));
    }
    LostRuns::Number add(const std::vector<TokenId>& names, Misses::Reason cause,
                         LostRuns::Number next_part = 0) {
        const Tokens tokens = pages(names);
        const auto tag_at = [&](std::int32_t i) {
            return runs.tag_of(tokens.data() + std::ptrdiff_t{i} * kPage);
        };
        return runs.add(count(tokens), {cause, ++time}, next_part, tag_at);
    }
    void lose(const std::vector<TokenId>& before, const std::vector<TokenId>& names,
              Misses::Reason cause = Misses::kEvicted, LostRuns::Number next_part = 0) {
        runs.index(add(names, cause, next_part), path(before));
    }
    LostRuns::Found take(const std::vector<TokenId>& before, const std::vector<TokenId>& names,
                         LostRuns::Number end = 0) {
        std::uint64_t at = path(before);
        const Tokens tokens = pages(names);
        const LostRuns::Found found =
            runs.take(at, runs.tag_of(tokens.data()), tokens.data(), count(tokens), end, 0);
        std::vector<TokenId> whole = before;
        whole.insert(whole.end(), names.begin(), names.begin() + found.num_pages);
        CHECK_EQ(at, path(whole));
        runs.check_integrity();
        return found;
    }

    LostRuns runs;
    std::int64_t time = 0;
};

TEST(a_run_is_found_by_its_prefix_and_first_page) {
    Record t(100);
    t.lose({1, 2}, {3, 4, 5}, Misses::kHostFull);
    const LostRuns::Found found = t.take({1, 2}, {3, 4, 6});
    CHECK_EQ(found.num_pages, 2);
    CHECK_EQ(found.loss.cause, Misses::kHostFull);
    CHECK_EQ(found.loss.time, 1);
    CHECK_EQ(t.take({1, 2}, {4}).num_pages, 0);
    CHECK_EQ(t.take({2, 1}, {3}).num_pages, 0);
    CHECK_EQ(t.take({}, {3}).num_pages, 0);
    CHECK_EQ(t.runs.num_pages(), 3);
}

TEST(the_run_that_left_last_decides) {
    Record t(100);
    t.lose({}, {1, 2}, Misses::kReset);
    t.lose({}, {1, 3}, Misses::kForgotten);
    CHECK_EQ(t.take({}, {1, 2}).num_pages, 1);
    // The look-up has cut both runs after page 1.
    CHECK_EQ(t.take({1}, {2}).loss.cause, Misses::kReset);
    CHECK_EQ(t.take({1}, {3}).loss.cause, Misses::kForgotten);
    CHECK_EQ(t.take({}, {1}).loss.cause, Misses::kForgotten);
}

TEST(a_run_is_cut_where_a_prompt_leaves_it) {
    Record t(100);
    t.lose({}, {1, 2, 3, 4});
    CHECK_EQ(t.take({1, 2}, {3, 4}).num_pages, 0);  // no request took pages 1 and 2
    CHECK_EQ(t.take({}, {1, 2, 5}).num_pages, 2);
    CHECK_EQ(t.take({1, 2}, {3, 4}).num_pages, 2);
    CHECK_EQ(t.take({}, {1, 2, 3, 4}).num_pages, 2);
    CHECK_EQ(t.runs.num_pages(), 4);
}

TEST(the_end_of_a_run_is_found_by_its_number_and_after_its_start_by_hash) {
    Record t(100);
    const LostRuns::Number last = t.add({4}, Misses::kEvicted);
    const LostRuns::Number end = t.add({2, 3}, Misses::kForgotten, last);
    CHECK_EQ(t.take({1}, {2, 3, 4}).num_pages, 0);
    CHECK_EQ(t.take({1}, {2, 3, 4}, end).num_pages, 2);
    CHECK_EQ(t.take({1, 2, 3}, {4}).loss.cause, Misses::kEvicted);
    CHECK_EQ(t.take({1}, {5}, end).num_pages, 0);

    const LostRuns::Number other = t.add({8}, Misses::kReset);
    t.lose({}, {7}, Misses::kHostFull, other);
    CHECK_EQ(t.take({7}, {8}).num_pages, 0);
    CHECK_EQ(t.take({}, {7, 9}).num_pages, 1);
    CHECK_EQ(t.take({7}, {8}).loss.cause, Misses::kReset);
}

TEST(a_run_longer_than_the_record_keeps_its_start) {
    Record t(2);
    t.lose({}, {1, 2, 3});
    CHECK_EQ(t.take({}, {1, 2, 3}).num_pages, 2);
    t.lose({}, {4});
    CHECK_EQ(t.take({}, {1, 2}).num_pages, 0);
    CHECK_EQ(t.take({}, {4}).num_pages, 1);
    CHECK_EQ(t.runs.num_pages(), 2);
}

TEST(a_run_that_leaves_again_and_again_is_found) {
    Record t(1000);
    for (int i = 0; i < 500; ++i) {
        t.lose({}, {1, i + 10});
        if (i % 7 == 0) CHECK_EQ(t.take({}, {1, 5}).num_pages, 1);
    }
    for (int i = 490; i < 500; ++i) {
        CHECK_EQ(t.take({}, {1, i + 10}).num_pages, 1);  // the first call cuts all runs
        CHECK_EQ(t.take({1}, {i + 10}).num_pages, 1);
    }
}

TEST(the_last_pages_are_remembered_exactly) {
    std::mt19937_64 random(check::seed_or(29));
    const std::int64_t count = check::count_or(5000);
    constexpr std::int64_t kMost = 700;
    struct Lost {
        std::vector<TokenId> before, pages;
        std::int64_t begin;
    };
    Record t(kMost);
    std::vector<Lost> all;
    std::int64_t added = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        Lost lost{{static_cast<TokenId>(random() % 3)}, {}, added};
        for (std::uint64_t n = 1 + random() % 4; n > 0; --n) {
            lost.pages.push_back(static_cast<TokenId>(100 + added++));
        }
        t.lose(lost.before, lost.pages);
        all.push_back(lost);
        const std::size_t back = random() % std::min<std::size_t>(all.size(), 500);
        const Lost& asked = all[all.size() - 1 - back];
        const bool is_remembered = added - asked.begin <= kMost;
        CHECK_EQ(t.take(asked.before, asked.pages).num_pages,
                 is_remembered ? static_cast<std::int32_t>(asked.pages.size()) : 0);
        CHECK_EQ(t.runs.num_pages(), std::min(added, kMost));
    }
}

TEST(every_token_and_its_place_changes_a_hash) {
    for (const int n : {1, 2, 3, 4, 5, 15, 16, 17, 20, 33}) {
        Tokens tokens(static_cast<std::size_t>(n), 7);
        const std::uint64_t same = kvcore::hash_tokens(1, tokens.data(), n);
        CHECK(kvcore::hash_tokens(2, tokens.data(), n) != same);
        CHECK(kvcore::hash_tokens(1, tokens.data(), n - 1) != same);
        std::vector<std::uint64_t> found{same};
        for (TokenId& token : tokens) {
            for (const TokenId other : {0, 8, -1, 1 << 30}) {
                token = other;
                found.push_back(kvcore::hash_tokens(1, tokens.data(), n));
            }
            token = 7;
        }
        std::sort(found.begin(), found.end());
        CHECK(std::adjacent_find(found.begin(), found.end()) == found.end());
    }
}

}  // namespace
}  // namespace tests::observe::lost_runs
