// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "support/failing_scene.hpp"

/// States whose chosen rows are ready to be reserved, of every kind.
namespace reserve_states {

using failing_scene::Build;
using failing_scene::State;

/// Three pages of four tokens, and two more tokens.
inline Tokens three_pages() { return count_up(10, 14); }

inline void add_single_rows(std::vector<std::pair<std::string, Build>>& builds) {
    builds.emplace_back("first call ever", [](ManagerScene& s) { s.choose({s.claim({1, 2, 3})}); });
    builds.emplace_back("no cache", [](ManagerScene& s) {
        s.put({1, 2, 3});
        s.choose({s.claim(three_pages())});
    });
    builds.emplace_back("first of a namespace", [](ManagerScene& s) {
        s.choose({s.claim(three_pages(), "the namespace of one of many tenants")});
    });
    builds.emplace_back("whole pages", [](ManagerScene& s) {
        s.put(three_pages());
        Tokens tokens = count_up(10, 12);
        s.choose({s.claim((tokens.push_back(99), tokens), "")});
    });
    builds.emplace_back("part of a run", [](ManagerScene& s) {
        s.put(three_pages(), "tenant");
        Tokens tokens = count_up(10, 8);
        s.choose({s.claim((tokens.push_back(99), tokens), "tenant")});
    });
    builds.emplace_back("part of a page", [](ManagerScene& s) {
        s.put(three_pages());
        Tokens tokens = count_up(10, 6);
        s.choose({s.claim((tokens.push_back(99), tokens))});
    });
    builds.emplace_back("a fork writes", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 6), 5);
        s.choose({s.fork(a, {7, 8})});
    });
    builds.emplace_back("a fork runs twice as far", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 6), 5);
        s.choose({s.fork(a, count_up(70, 30))});
        s.manager.release(s.at(a).sequence);
    });
    builds.emplace_back("truncated inside a cached page", [](ManagerScene& s) {
        const std::size_t a = s.served(three_pages(), 5);
        s.truncate(a, 10);
        s.choose({a});
    });
    builds.emplace_back("truncated deep", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 21), 5);
        s.fork(a, {3});
        s.truncate(a, 6);
        s.choose({a});
    });
    builds.emplace_back("set back deep", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 21), 5);
        s.pin(a);
        s.at(a).rewind(7);
        s.choose({a});
    });
    builds.emplace_back("grows", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 8), 5);
        s.choose({a});
    });
    builds.emplace_back("has all it needs", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 9), 5);
        s.choose({a});
    });
    builds.emplace_back("a longer hit", [](ManagerScene& s) {
        const std::size_t a = s.claim(three_pages());
        s.reserve(a);
        s.put(three_pages());
        s.choose({a});
    });
    builds.emplace_back("a longer hit, own pages are held", [](ManagerScene& s) {
        const std::size_t a = s.claim(three_pages());
        s.reserve(a);
        s.hold(a, 1);
        s.put(three_pages());
        s.choose({a});
    });
}

inline void add_tight_rows(std::vector<std::pair<std::string, Build>>& builds) {
    builds.emplace_back("evicts", [](ManagerScene& s) {
        for (TokenId k = 0; k < 5; ++k) s.put(count_up(1000 * k, 13));
        s.choose({s.claim(count_up(7, 30))});
    });
    builds.emplace_back("evicts, whole pages", [](ManagerScene& s) {
        for (TokenId k = 0; k < 5; ++k) s.put(count_up(1000 * k, 13));
        Tokens tokens = count_up(2000, 8);
        for (int k = 0; k < 30; ++k) tokens.push_back(k);
        s.choose({s.claim(tokens)});
    });
    builds.emplace_back("evicts, part of a page", [](ManagerScene& s) {
        for (TokenId k = 0; k < 5; ++k) s.put(count_up(1000 * k, 13));
        Tokens tokens = count_up(2000, 6);
        for (int k = 0; k < 30; ++k) tokens.push_back(k);
        s.choose({s.claim(tokens)});
    });
    builds.emplace_back("evicts for a fork", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 6), 5);
        for (TokenId k = 1; k < 6; ++k) s.put(count_up(1000 * k, 13));
        s.choose({s.fork(a, count_up(70, 20))});
    });
    builds.emplace_back("no space", [](ManagerScene& s) {
        s.served(count_up(10, 40), 5);
        s.put(count_up(200, 4));
        s.choose({s.claim(count_up(500, 30), "tenant")});
    });
    builds.emplace_back("no space after a cut", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 21), 5);
        s.fork(a, {3});
        s.served(count_up(300, 24), 5);
        s.at(a).rewind(7);
        for (int k = 0; k < 40; ++k) s.at(a).append(k);
        s.at(a).active = s.at(a).end();
        s.choose({a});
    });
}

inline void add_batches(std::vector<std::pair<std::string, Build>>& builds) {
    builds.emplace_back("batch: one of each kind", [](ManagerScene& s) {
        s.put(three_pages());
        s.put(three_pages(), "tenant", 1);
        const std::size_t decodes = s.served(count_up(600, 5), 5);
        const std::size_t grows = s.served(count_up(700, 8), 5, "", 1);
        Tokens partial = count_up(10, 6);
        partial.push_back(99);
        s.choose({s.claim({1, 2, 3}), decodes, s.claim(partial),
                  s.claim(three_pages(), "tenant", 1), grows,
                  s.claim({1, 2}, "the namespace of one of many tenants", 1)});
    });
    builds.emplace_back("batch: forks and their parent", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 6), 5);
        const std::size_t b = s.fork(a, {7, 8});
        const std::size_t c = s.fork(a, {9});
        s.choose({a, b, c});
    });
    builds.emplace_back("batch: forks alone", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 6), 5);
        const std::size_t b = s.fork(a, {7, 8});
        const std::size_t c = s.fork(a, {9});
        s.manager.release(s.at(a).sequence);
        s.choose({b, c, s.claim({5, 5, 5})});
    });
    builds.emplace_back("batch: forks of several parents", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 6), 5);
        const std::size_t b = s.served(count_up(50, 7), 5);
        const std::size_t c = s.served(count_up(90, 5), 5, "tenant", 1);
        s.choose({s.fork(a, {7, 8}), s.fork(b, {9}), a, b, s.fork(c, {9}), c});
    });
    builds.emplace_back("batch: all grow", [](ManagerScene& s) {
        std::vector<std::size_t> rows;
        for (TokenId k = 0; k < 5; ++k)
            rows.push_back(s.served(count_up(100 * k, 4), 5, "", k % 2));
        s.choose(rows);
    });
    builds.emplace_back("batch: all grow, some by eviction", [](ManagerScene& s) {
        std::vector<std::size_t> rows;
        for (TokenId k = 0; k < 4; ++k) rows.push_back(s.served(count_up(100 * k, 4), 5));
        for (TokenId k = 1; k < 8; ++k) s.put(count_up(1000 * k, 8));
        s.choose(rows);
    });
    builds.emplace_back("batch: evicts, with hits", [](ManagerScene& s) {
        for (TokenId k = 0; k < 6; ++k) s.put(count_up(1000 * k, 13), k % 2 == 0 ? "" : "tenant");
        Tokens first = count_up(2000, 6);
        Tokens second = count_up(3000, 8);
        for (int k = 0; k < 10; ++k) {
            first.push_back(k);
            second.push_back(k);
        }
        s.choose({s.claim(first), s.claim(second, "tenant"), s.claim(count_up(400, 9))});
    });
    builds.emplace_back("batch: the last does not fit", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 21), 5);
        s.fork(a, {3});
        s.at(a).rewind(7);
        s.put(three_pages());
        s.choose({a, s.claim(three_pages()), s.claim(count_up(500, 60))});
    });
    builds.emplace_back("batch: cut and forked", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 21), 5);
        const std::size_t b = s.fork(a, {3});
        s.at(a).rewind(7);
        s.choose({a, b, s.claim({1, 2, 3})});
    });
}

/// For a manager with a host tier.
inline void add_loads(std::vector<std::pair<std::string, Build>>& builds) {
    builds.emplace_back("load", [](ManagerScene& s) {
        s.put_in_host({three_pages()});
        s.choose({s.claim(three_pages())});
    });
    builds.emplace_back("load part of a run", [](ManagerScene& s) {
        s.put_in_host({three_pages()}, "tenant");
        Tokens tokens = count_up(10, 8);
        tokens.push_back(99);
        s.choose({s.claim(tokens, "tenant")});
    });
    builds.emplace_back("load behind a hit", [](ManagerScene& s) {
        s.put_in_host({count_up(10, 18)});
        s.put(count_up(10, 5));
        s.choose({s.claim(count_up(10, 15))});
    });
    builds.emplace_back("batch: loads", [](ManagerScene& s) {
        s.put_in_host({count_up(10, 9), count_up(50, 13)});
        Tokens other = count_up(50, 8);
        other.push_back(3);
        s.choose(
            {s.claim(count_up(50, 13)), s.claim({7, 7}), s.claim(count_up(10, 9)), s.claim(other)});
    });
    builds.emplace_back("cut below a stored place", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 21), 5);
        s.put({1, 2, 3, 4, 5});
        s.at(a).rewind(7);
        s.choose({a});
    });
    builds.emplace_back("batch: cut below stored places, no space", [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 13), 5);
        const std::size_t b = s.served(count_up(50, 13), 5);
        s.put({1, 2, 3, 4, 5});
        s.put({6, 7, 8, 9, 5});
        s.at(a).rewind(7);
        s.at(b).rewind(3);
        s.choose({a, b, s.claim(count_up(500, 60))});
    });
}

// Run `prompts` prompts of two pages at once; the pages that they do not evict stay cached.
inline void crowd_out(ManagerScene& s, std::int64_t prompts) {
    std::vector<std::size_t> claimed;
    for (std::int64_t i = 0; i < prompts; ++i) {
        claimed.push_back(s.claim(count_up(9000 + static_cast<TokenId>(10 * i), 4)));
        s.reserve(claimed.back());
    }
    for (const std::size_t i : claimed) s.manager.release(s.at(i).sequence);
}

/// The same with groups, of 32 pages.
inline void add_column_loads(std::vector<std::pair<std::string, Build>>& builds) {
    builds.emplace_back("load", [](ManagerScene& s) {
        s.put(three_pages());
        crowd_out(s, 16);
        s.choose({s.claim(three_pages())});
    });
    builds.emplace_back("load, first of a namespace", [](ManagerScene& s) {
        s.put(three_pages(), "tenant");
        crowd_out(s, 16);
        s.choose({s.claim(three_pages(), "tenant")});
    });
    builds.emplace_back("load windows", [](ManagerScene& s) {
        s.put(count_up(10, 18));
        crowd_out(s, 14);
        const Tokens tokens = count_up(10, 18);
        CHECK_EQ(s.manager.match(0, "", tokens.data(), 18), 0);
        s.choose({s.claim(count_up(10, 14)), s.claim(count_up(10, 18))});
    });
    builds.emplace_back("load windows and columns", [](ManagerScene& s) {
        s.put(count_up(10, 26));
        crowd_out(s, 15);
        s.choose({s.claim(count_up(10, 26))});
    });
    builds.emplace_back("load behind a hit", [](ManagerScene& s) {
        s.put(count_up(10, 18));
        crowd_out(s, 16);
        s.put(count_up(10, 5));
        s.choose({s.claim(count_up(10, 15))});
    });
    builds.emplace_back("a longer hit below", [](ManagerScene& s) {
        const std::size_t a = s.claim(count_up(10, 26));
        s.reserve(a);
        s.put(count_up(10, 26));
        crowd_out(s, 9);
        s.choose({a});
    });
    builds.emplace_back("batch: loads", [](ManagerScene& s) {
        s.put(count_up(10, 9));
        s.put(count_up(50, 13));
        crowd_out(s, 16);
        Tokens other = count_up(50, 8);
        other.push_back(3);
        s.choose(
            {s.claim(count_up(50, 13)), s.claim({7, 7}), s.claim(count_up(10, 9)), s.claim(other)});
    });
}

/// States with layers that have a window. A request cannot go back far.
inline std::vector<State> with_groups() {
    std::vector<std::pair<std::string, Build>> builds;
    add_single_rows(builds);
    add_tight_rows(builds);
    add_batches(builds);
    std::vector<State> states;
    const auto add = [&](const Mode& mode, const auto& given) {
        for (const auto& [name, build] : given) {
            const bool goes_back =
                name == "truncated inside a cached page" || name == "truncated deep" ||
                name == "set back deep" || name == "no space after a cut" ||
                name == "batch: the last does not fit" || name == "batch: cut and forked";
            if (!goes_back) states.push_back({name, mode, 32, build});
        }
    };
    for (const Mode& mode : kGroupModes) add(mode, builds);
    std::vector<std::pair<std::string, Build>> with_host = builds;
    add_column_loads(with_host);
    for (const Mode& mode : kGroupHostModes) {
        add(mode, mode.host_pages > 20 ? with_host : builds);
    }
    return states;
}

inline std::vector<State> all() {
    std::vector<std::pair<std::string, Build>> everywhere;
    add_single_rows(everywhere);
    add_tight_rows(everywhere);
    add_batches(everywhere);
    std::vector<std::pair<std::string, Build>> with_host = everywhere;
    add_loads(with_host);
    std::vector<State> states;
    for (const Mode& mode : kModes) {
        for (const auto& [name, build] : mode.host_pages > 0 ? with_host : everywhere) {
            states.push_back({name, mode, 16, build});
        }
    }
    return states;
}

}  // namespace reserve_states
