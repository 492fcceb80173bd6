// SPDX-License-Identifier: Apache-2.0
// Transfers when memory runs out: the manager finishes transfers, owes failed copies again and
// drops copies without memory. Each page is stored or not stored.
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "support/failing_scene.hpp"

namespace tests::faults::transfers {

using failing_scene::allocates_nothing;
using failing_scene::Build;
using failing_scene::each_outcome;
using failing_scene::is_refused;
using failing_scene::leaves_no_trace;
using failing_scene::needs_no_memory;
using failing_scene::State;
using failing_scene::text;

namespace {

constexpr std::array kWithTransfers{kTransfers, kTransfersTwins, kHost, kHostTwins};

// Two sequences, each with a copy in flight: from a fork's page and from the tree.
void begin_copies(ManagerScene& s) {
    const std::size_t a = s.served(count_up(10, 6), 5);
    s.begin_reserve(s.fork(a, {7, 8}));
    Tokens tokens = count_up(10, 2);
    tokens.push_back(99);
    s.begin_reserve(s.claim(tokens));
}

void begin_store(ManagerScene& s, const Tokens& tokens) {
    const std::size_t a = s.claim(tokens);
    CHECK(s.fetch({a}));
    s.sample(a, 5);
    s.choose({a});
    s.call_commit();
    CHECK(s.transfers.ticket != 0);
    s.open_tickets.push_back(s.transfers.ticket);
    s.transfers.clear();
    s.forget_call();
}

// A store that continues another store, and a load. The tickets are in this order.
void begin_host_copies(ManagerScene& s) {
    s.put_in_host({count_up(300, 9)});
    begin_store(s, count_up(10, 9));
    begin_store(s, count_up(10, 22));
    s.begin_reserve(s.claim(count_up(300, 9)));
}

TEST(copies_are_finished_without_memory) {
    for (const Mode& mode : kWithTransfers) {
        for (const bool done : {true, false}) {
            const State state{done ? "done" : "failed", mode, 16, begin_copies};
            const auto finish = [&](ManagerScene& s) {
                for (const std::uint64_t ticket : s.open_tickets) s.manager.finish(ticket, done);
                for (std::uint64_t& ticket : s.open_tickets) ticket = 0;
            };
            allocates_nothing("finish", state, finish);
        }
    }
}

// Four pages have arrived, and a page after them is in flight. Sequences hold all other pages.
void begin_store_into_a_full_tier(ManagerScene& s) {
    Tokens beside = count_up(10, 16);
    for (int k = 0; k < 7; ++k) beside.push_back(k);
    begin_store(s, count_up(10, 20));
    begin_store(s, beside);
    s.manager.finish(s.open_tickets[0]);
    s.open_tickets.erase(s.open_tickets.begin());
    s.served(count_up(500, 24), 5);
    CHECK_EQ(s.manager.stats(0).host_cached_pages, 11);
}

// A stored page needs a place in the tier's tree. Without memory for it, the page is free again,
// and is stored with the next page.
void stores_are_finished(const Build& build, const char* name, std::size_t first, bool done) {
    for (const Mode& mode : {kHost, kHostTwins}) {
        const State state{name, mode, 20, build};
        const auto finish = [&](ManagerScene& s) {
            s.manager.finish(s.open_tickets[first], done);
            s.answer[0] = 0;
        };
        const auto go_on = [&](ManagerScene& s) {
            s.open_tickets.erase(s.open_tickets.begin() + static_cast<std::ptrdiff_t>(first));
            s.manager.check_integrity();
            s.end_open();
            s.manager.check_integrity();
            std::vector<std::size_t> live;
            for (std::size_t i = 0; i < s.requests.size(); ++i) {
                if (s.manager.contains(s.at(i).sequence)) live.push_back(i);
            }
            for (TokenId k = 0; k < ManagerScene::kPageSize; ++k) {
                for (const std::size_t i : live) s.run(i, 60 + k);
            }
            for (const std::size_t i : live) s.manager.release(s.at(i).sequence);
            s.put_in_host({});  // the prompts then hit only the host tier
            return ManagerText(s).of_reach();
        };
        auto undisturbed = state();
        finish(*undisturbed);
        const std::string after = go_on(*undisturbed);
        const auto judge = [&](ManagerScene& s, bool has_thrown) {
            CHECK(!has_thrown);
            CHECK_EQ(go_on(s), after);
        };
        each_outcome("finish", state, finish, judge);
    }
}

TEST(host_copies_are_finished) {
    for (const bool done : {true, false}) {
        for (std::size_t first = 0; first < 2; ++first) {
            const std::string name =
                std::string(done ? "done" : "failed") + " store " + std::to_string(first);
            stores_are_finished(begin_host_copies, name.c_str(), first, done);
        }
        const auto finish_load = [&](ManagerScene& s) {
            s.manager.finish(s.open_tickets.back(), done);
            s.open_tickets.pop_back();
        };
        for (const Mode& mode : {kHost, kHostTwins}) {
            const State state{done ? "done" : "failed", mode, 20, begin_host_copies};
            allocates_nothing("finish a load", state, finish_load);
        }
    }
    stores_are_finished(begin_store_into_a_full_tier, "full tier", 0, true);
    const auto fail_all = [](ManagerScene& s) {
        for (std::uint64_t& ticket : s.open_tickets) {
            s.manager.finish(ticket, false);
        }
        s.open_tickets.clear();
    };
    allocates_nothing("finish all", {"failed", kHost, 20, begin_host_copies}, fail_all);
}

TEST(unknown_tickets_are_refused) {
    for (const Mode& mode : kWithTransfers) {
        const State state{"", mode, 20, begin_copies};
        is_refused<kvcore::InvalidHandleError>("finish", state,
                                               [](ManagerScene& s) { s.manager.finish(77, true); });
        is_refused<kvcore::InvalidHandleError>("finish", state,
                                               [](ManagerScene& s) { s.manager.finish(0, false); });
    }
}

TEST(failed_copies_are_owed) {
    for (const Mode& mode : kWithTransfers) {
        const State state{"", mode, 16, [](ManagerScene& s) {
                              begin_copies(s);
                              s.end_open(false);
                              s.choose({1, 2});
                          }};
        leaves_no_trace("take_owed", state, [](ManagerScene& s) {
            s.answer[0] =
                static_cast<std::int64_t>(s.manager.take_owed(s.views[0].sequence, s.transfers));
        });
        leaves_no_trace("reserve", state, [](ManagerScene& s) { s.call_reserve(); });
        leaves_no_trace("fetch", state, [](ManagerScene& s) { s.call_fetch(); });
        needs_no_memory("release", state,
                        [](ManagerScene& s) { s.manager.release(s.views[1].sequence); });
        needs_no_memory("begin_again", state,
                        [](ManagerScene& s) { s.manager.begin_again(s.views[0].sequence); });
        is_refused<kvcore::PendingTransfersError>("commit", state,
                                                  [](ManagerScene& s) { s.call_commit(); });
        is_refused<kvcore::PendingTransfersError>(
            "truncate", state, [](ManagerScene& s) { s.manager.truncate(s.views[0].sequence, 1); });
        allocates_nothing("take_owed of another", state, [](ManagerScene& s) {
            static_cast<void>(s.manager.take_owed(s.at(0).sequence, s.transfers));
        });
    }
}

TEST(transfers_end_without_their_sequence) {
    const Build both = [](ManagerScene& s) {
        begin_copies(s);
        if (s.mode.host_pages > 0) begin_host_copies(s);
    };
    for (const Mode& mode : kWithTransfers) {
        const State state{"in flight", mode, 24, both};
        needs_no_memory("release", state, [](ManagerScene& s) {
            for (const auto& request : s.requests) {
                if (s.manager.contains(request->sequence)) s.manager.release(request->sequence);
            }
        });
        leaves_no_trace("reset_prefix_cache", state,
                        [](ManagerScene& s) { s.manager.reset_prefix_cache(); });
        is_refused<kvcore::PendingTransfersError>("begin_again", state, [](ManagerScene& s) {
            s.manager.begin_again(s.at(s.requests.size() - 1).sequence);
        });
        is_refused<std::logic_error>("wait", state, [](ManagerScene& s) {
            s.manager.wait(s.at(s.requests.size() - 1).sequence);
        });
        leaves_no_trace("check_integrity", state,
                        [](ManagerScene& s) { s.manager.check_integrity(); });
    }
}

// The owner commits a page while a copy from it is in flight.
TEST(a_page_is_committed_during_a_copy_from_it) {
    for (const Mode& mode : kWithTransfers) {
        const State state{"copied out of", mode, 16, [](ManagerScene& s) {
                              const std::size_t a = s.served(count_up(10, 6), 5);
                              const std::size_t b = s.fork(a, {7, 8});
                              s.begin_reserve(b);
                              CHECK(s.fetch({a}));
                              s.sample(a, 5);
                              s.grow(a, 30, 1);
                              s.choose({a});
                          }};
        auto undisturbed = state();
        undisturbed->call_commit();
        const std::string after = text(undisturbed);
        const auto judge = [&](ManagerScene& s, bool has_thrown) {
            if (!has_thrown) s.end(s.transfers);
            s.manager.check_integrity();
            s.call_commit();
            s.manager.check_integrity();
            if (s.mode.host_pages == 0) CHECK_EQ(ManagerText(s).of_all(), after);
        };
        each_outcome("commit", state, [](ManagerScene& s) { s.call_commit(); }, judge);
    }
}

TEST(listed_copies) {
    for (const Mode& mode : {kList, kListTwins}) {
        const State state{"listed", mode, 16, [](ManagerScene& s) {
                              const std::size_t a = s.served(count_up(10, 6), 5);
                              s.reserve(s.fork(a, {7, 8}));
                              const std::size_t c = s.fork(a, {7, 8});
                              s.reserve(c);
                              s.fork(c, {1});
                          }};
        leaves_no_trace("take_copies", state, [](ManagerScene& s) {
            const auto copies = s.manager.take_copies();
            s.answer[0] = static_cast<std::int64_t>(copies.size());
        });
    }
}

}  // namespace

}  // namespace tests::faults::transfers
