// SPDX-License-Identifier: Apache-2.0
// Commits when memory runs out: a page that cannot be stored for lack of memory stays with its
// sequence, and a later commit stores it.
#include <string>
#include <utility>
#include <vector>

#include "support/failing_scene.hpp"

namespace tests::faults::commit {

using failing_scene::Build;
using failing_scene::each_outcome;
using failing_scene::State;
using failing_scene::text;

namespace {

using Rows = std::vector<std::size_t>;
using Builds = std::vector<std::pair<std::string, Build>>;

// Runs all tokens of the rows and samples the next token.
void choose_run(ManagerScene& s, const Rows& rows) {
    CHECK(s.fetch(rows));
    for (const std::size_t i : rows) s.sample(i, static_cast<TokenId>(80 + i));
    s.choose(rows);
}

void add(Builds& builds, const std::string& name, Build build) {
    builds.push_back({name, std::move(build)});
}

void add_rows(Builds& builds) {
    add(builds, "first call ever",
        [](ManagerScene& s) { choose_run(s, {s.claim(count_up(10, 13))}); });
    add(builds, "first page of a namespace", [](ManagerScene& s) {
        choose_run(s, {s.claim(count_up(10, 5), "the namespace of one of many tenants")});
    });
    add(builds, "continues a run", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 5), 5);
        s.grow(a, 20, 5);
        s.grow(a, 30, 1);
        choose_run(s, {a});
    });
    add(builds, "cuts a run", [](ManagerScene& s) {
        s.put(count_up(10, 20));
        Tokens tokens = count_up(10, 8);
        for (int k = 0; k < 9; ++k) tokens.push_back(k);
        choose_run(s, {s.claim(tokens)});
    });
    for (const TokenId siblings : {1, 7, 8, 9, 40}) {
        add(builds, "siblings " + std::to_string(siblings), [siblings](ManagerScene& s) {
            for (TokenId k = 0; k < siblings; ++k) s.put(count_up(1000 + 10 * k, 4), "tenant");
            choose_run(s, {s.claim(count_up(1, 5), "tenant")});
        });
    }
    add(builds, "no new page",
        [](ManagerScene& s) { choose_run(s, {s.served(count_up(10, 5), 5)}); });
}

void add_twins(Builds& builds) {
    add(builds, "its pages are cached", [](ManagerScene& s) {
        const std::size_t a = s.claim(count_up(10, 13));
        CHECK(s.fetch({a}));
        s.put(count_up(10, 13));
        choose_run(s, {a});
    });
    add(builds, "some of its pages are cached", [](ManagerScene& s) {
        const std::size_t a = s.claim(count_up(10, 13));
        CHECK(s.fetch({a}));
        s.put(count_up(10, 23));
        Tokens other = count_up(10, 8);
        other.insert(other.end(), {1, 2, 3, 4, 5});
        s.put(other);
        choose_run(s, {a});
    });
    add(builds, "forks hold the page", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 6), 5);
        s.fork(a, {7, 8});
        const std::size_t c = s.fork(a, {9});
        s.fork(c, {1, 2, 3});
        s.grow(a, 40, 1);
        choose_run(s, {a});
    });
    // No request has room of its own to go on.
    add(builds, "forks hold all pages", [](ManagerScene& s) {
        const std::size_t a = s.claim(count_up(10, 14));
        CHECK(s.fetch({a}));
        s.put(count_up(10, 14));
        const std::size_t b = s.claim(count_up(10, 14));
        CHECK(s.fetch({b}));
        s.sample(a, 5);
        s.sample(b, 5);
        s.commit({b});
        s.choose({a, b});
    });
}

// The tree has another page for a page that the forks hold, so the forks keep their own page.
void add_forks_of_own_pages(Builds& builds) {
    add(builds, "forks hold pages without memory", [](ManagerScene& s) {
        s.served({1, 2, 3, 4, 5}, 5, "other");  // allocates the scratch memory of a commit
        const std::size_t a = s.claim(count_up(10, 14));
        choose_run(s, {a});
        {
            const failing_memory::Injection injection(1, failing_memory::Failing::kFromThereOn);
            s.call_commit();
        }
        CHECK_EQ(s.manager.stats(0).cached_pages, s.mode.prefix_caching ? 1 : 0);
        s.forget_call();
        s.fork(a, {7, 8});
        s.fork(a, {9});
        Tokens tokens = count_up(10, 4);
        tokens.push_back(3);
        s.put(tokens);
        s.choose({a});
    });
}

void add_batches(Builds& builds) {
    add(builds, "batch", [](ManagerScene& s) {
        s.put(count_up(10, 20));
        const std::size_t twin = s.claim(count_up(200, 9), "tenant", 1);
        CHECK(s.fetch({twin}));
        s.put(count_up(200, 9), "tenant", 1);
        const std::size_t decodes = s.served(count_up(600, 5), 5);
        Tokens tokens = count_up(10, 9);
        tokens.push_back(99);
        choose_run(s, {s.claim(tokens), twin, decodes, s.claim(count_up(300, 9))});
    });
}

void add_stores(Builds& builds) {
    add(builds, "continues in the host tier", [](ManagerScene& s) {
        s.put(count_up(10, 12));
        Tokens tokens = count_up(10, 8);
        for (int k = 0; k < 9; ++k) tokens.push_back(k);
        choose_run(s, {s.claim(tokens)});
    });
    add(builds, "a full host tier", [](ManagerScene& s) {
        for (TokenId k = 1; k < 5; ++k) s.put(count_up(1000 * k, 12), k % 2 == 0 ? "" : "tenant");
        choose_run(s, {s.claim(count_up(10, 9))});
    });
    add(builds, "shares most pages of the host tier", [](ManagerScene& s) {
        s.served(count_up(10, 40), 5);
        Tokens tokens = count_up(10, 32);
        for (int k = 0; k < 5; ++k) tokens.push_back(k);
        choose_run(s, {s.claim(tokens)});
    });
    add(builds, "continues a store in flight", [](ManagerScene& s) {
        const std::size_t a = s.claim(count_up(10, 9));
        choose_run(s, {a});
        s.call_commit();
        s.open_tickets.push_back(s.transfers.ticket);
        s.transfers.clear();
        choose_run(s, {s.claim(count_up(10, 21))});
    });
}

std::vector<State> states(bool with_stores) {
    Builds builds;
    add_rows(builds);
    add_twins(builds);
    add_forks_of_own_pages(builds);
    add_batches(builds);
    if (with_stores) add_stores(builds);
    std::vector<State> states;
    for (const Mode& mode : kModes) {
        if ((mode.host_pages > 0) != with_stores) continue;
        for (const auto& [name, build] : builds) states.push_back({name, mode, 16, build});
    }
    return states;
}

std::vector<std::vector<BlockId>> pages_of(ManagerScene& scene) {
    std::vector<std::vector<BlockId>> pages;
    for (const auto& view : scene.views) pages.push_back(scene.manager.pages_of(view.sequence));
    return pages;
}

// Checks that every swapped page was reported exactly once, and that no other page was reported.
void check_swaps(ManagerScene& scene, std::vector<std::vector<BlockId>> before) {
    for (const kvcore::PageSwap& swap : scene.swaps) {
        BlockId& page = item(item(before, swap.row), swap.column);
        CHECK(page != swap.page);
        page = swap.page;
    }
    CHECK(pages_of(scene) == before);
}

// Gives a commit another page to store if the first commit stored no page.
void run_another_page(ManagerScene& scene) {
    const Rows rows = scene.rows;
    scene.end_open();
    scene.forget_call();
    for (TokenId k = 0; k < ManagerScene::kPageSize; ++k) {
        CHECK(scene.fetch(rows));
        for (const std::size_t i : rows) scene.sample(i, 60 + k);
        scene.commit(rows);
    }
}

// The rows of a batch may get pages of the host tier in another order.
std::string end_of(ManagerScene& scene) {
    return ManagerText(scene).of_state(scene.requests.size() == 1);
}

void a_failed_commit_can_be_made_again(const State& state) {
    auto scene = state();
    const std::vector<std::vector<BlockId>> pages = pages_of(*scene);
    const std::string before = text(scene);
    const auto commit = [](ManagerScene& s) { s.call_commit(); };
    scene = state();
    commit(*scene);
    const std::string after = text(scene);
    scene = state();
    commit(*scene);
    run_another_page(*scene);
    const std::string further = end_of(*scene);
    const auto judge = [&](ManagerScene& s, bool has_thrown) {
        if (has_thrown) {
            CHECK_EQ(ManagerText(s).of_all(), before);
            return;
        }
        check_swaps(s, pages);
        if (s.mode.host_pages == 0) {
            commit(s);
            check_swaps(s, pages);
            CHECK_EQ(ManagerText(s).of_all(), after);
            return;
        }
        run_another_page(s);
        CHECK_EQ(end_of(s), further);
    };
    each_outcome("commit", state, commit, judge);
}

// Of equal rows, the tree takes the pages of the row that finds memory first.
TEST(equal_rows_end_with_the_same_pages) {
    for (const Mode& mode : kModes) {
        if (!mode.prefix_caching) continue;
        const State state{"equal rows", mode, 16, [](ManagerScene& s) {
                              const std::size_t a = s.claim(count_up(10, 13));
                              const std::size_t b = s.claim(count_up(10, 14));
                              const std::size_t c = s.claim(count_up(10, 9));
                              choose_run(s, {a, b, c});
                          }};
        auto scene = state();
        const std::vector<std::vector<BlockId>> pages = pages_of(*scene);
        const auto commit = [](ManagerScene& s) { s.call_commit(); };
        const auto judge = [&](ManagerScene& s, bool has_thrown) {
            if (!has_thrown) check_swaps(s, pages);
            s.end(s.transfers);
            commit(s);
            check_swaps(s, pages);
            s.manager.check_integrity();
            std::vector<BlockId> cached;
            CHECK_EQ(s.manager.match(0, "", s.views[1].tokens, 12, &cached), 3);
            CHECK_EQ(s.manager.stats(0).cached_pages, 3);
            if (!mode.dedup) return;
            for (const auto& row : pages_of(s)) {
                CHECK(std::equal(row.begin(), row.begin() + 2, cached.begin()));
            }
            CHECK_EQ(s.manager.stats(0).free_pages, 16 - 3 - 3);
        };
        each_outcome("commit", state, commit, judge);
    }
}

TEST(a_failed_commit_can_be_made_again) {
    for (const bool with_stores : {false, true}) {
        for (const State& state : states(with_stores)) a_failed_commit_can_be_made_again(state);
    }
}

}  // namespace

}  // namespace tests::faults::commit
