// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvcore/cache_config.hpp"
#include "kvcore/types.hpp"

/// A broken law: the search looks for these.
class Violation : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

inline void require(bool holds, const std::string& what) {
    if (!holds) throw Violation(what);
}

enum class Verb : std::uint8_t {
    kReserve,      // claims the request first if necessary
    kFetch,        // and runs the model if the call succeeds
    kFetchPair,    // fetches two requests in one batch
    kReservePair,  // reserves two requests in one batch
    kStep,         // appends the next token and commits
    kFork,
    kTruncate,
    kRewind,  // sets a request back without a call
    kRelease,
    kBeginAgain,
    kTakeOwed,
    kMove,    // makes the copies of a ticket
    kFinish,  // ends a ticket after its copies were made
    kFail,    // ends a ticket with half-written destinations
    kReset,
    kPin,
    kUnpin,
};

/// A verb and its arguments: requests, a ticket by its position among the open tickets, or tokens.
struct Action {
    Verb verb = Verb::kReset;
    std::uint8_t first = 0;
    std::uint8_t second = 0;
};

inline std::string text_of(const Action& action) {
    static const char* const names[] = {
        "reserve",  "fetch",  "fetch_pair", "reserve_pair", "step",      "fork",
        "truncate", "rewind", "release",    "begin_again",  "take_owed", "move",
        "finish",   "fail",   "reset",      "pin",          "unpin"};
    std::string text = names[static_cast<std::size_t>(action.verb)];
    if (action.verb >= Verb::kReset) return text;
    text += "(" + std::to_string(action.first);
    const bool has_second = action.verb == Verb::kFetchPair || action.verb == Verb::kReservePair ||
                            action.verb == Verb::kFork || action.verb == Verb::kTruncate ||
                            action.verb == Verb::kRewind;
    if (has_second) text += ", " + std::to_string(action.second);
    return text + ")";
}

/// The start of a search.
struct Scenario {
    struct Prompt {
        std::vector<kvcore::TokenId> tokens;
        std::int64_t chunk;  // tokens per step
    };
    std::string name;
    std::int32_t page_size = 2;
    std::int64_t num_pages = 4;
    std::int64_t host_pages = 0;
    kvcore::WritePolicy write_policy = kvcore::WritePolicy::kWriteThrough;
    bool dedup = true;
    std::vector<Prompt> prompts;    // of the three requests
    std::size_t longest = 7;        // tokens of a request
    std::size_t pinned_tokens = 4;  // of the first prompt
    std::vector<Action> prologue;   // done before the search
    int depth = 4;                  // of the short search
    bool asks_for_laws = true;      // false: check only contents and results
};

inline void append(std::vector<Action>& actions, const std::vector<Action>& more) {
    actions.insert(actions.end(), more.begin(), more.end());
}

/// All scenarios. Prompts share whole pages and parts of a page.
inline std::vector<Scenario> all_scenarios() {
    using kvcore::TokenId;
    constexpr std::int64_t kWhole = 99;
    const std::vector<Scenario::Prompt> prompts = {
        {{1, 2, 3, 4, 5}, kWhole}, {{1, 2, 3, 9}, kWhole}, {{1, 2, 3, 4, 5, 6}, 3}};
    const std::vector<Action> one_has_run = {{Verb::kFetch, 0}, {Verb::kStep, 0}};

    Scenario plain;
    plain.name = "plain";
    plain.prompts = prompts;
    plain.depth = 6;

    Scenario forks;
    forks.name = "forks";
    forks.page_size = 3;
    forks.prompts = {{{1, 2, 3, 4, 5}, kWhole}, {{1, 2, 3, 4, 9}, kWhole}, {{1, 2, 3, 4}, 2}};
    forks.longest = 8;
    forks.prologue = one_has_run;
    forks.prologue.push_back({Verb::kFork, 0, 1});

    Scenario twins = forks;  // pages that equal cached pages stay
    twins.name = "twins";
    twins.page_size = 2;
    twins.num_pages = 5;
    twins.dedup = false;
    twins.prologue = one_has_run;

    Scenario host;
    host.name = "host";
    host.host_pages = 3;
    host.prompts = prompts;
    host.depth = 6;

    // The tier has two pages of the first prompt; the pool has evicted both.
    Scenario loads = host;
    loads.name = "loads";
    loads.depth = 7;
    loads.prompts[1].tokens = {31, 32, 33, 34, 35, 36, 37};
    loads.prologue = one_has_run;
    const std::vector<Action> goes_for_another = {{Verb::kMove, 0},
                                                  {Verb::kFinish, 0},
                                                  {Verb::kRelease, 0},
                                                  {Verb::kFetch, 1},
                                                  {Verb::kRelease, 1}};
    append(loads.prologue, goes_for_another);

    // Forks share loaded pages that no request has committed. A third request brings another copy
    // of the first page.
    Scenario heirs = loads;
    heirs.name = "heirs";
    heirs.depth = 4;
    heirs.num_pages = 6;
    heirs.prompts[1].tokens = {31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41};
    heirs.prompts[2] = {{1, 2, 9}, kWhole};
    append(heirs.prologue, {{Verb::kFetch, 0}, {Verb::kMove, 0}, {Verb::kFinish, 0}});
    append(heirs.prologue, {{Verb::kFork, 0, 1}, {Verb::kFetch, 2}, {Verb::kMove, 0}});
    // Cached pages are stored in the host tier when other requests need their room.
    Scenario back = host;
    back.name = "back";
    back.write_policy = kvcore::WritePolicy::kWriteBack;
    back.depth = 5;
    back.prompts[1].tokens = {31, 32, 33, 34, 35};
    back.prologue = one_has_run;

    Scenario again = host;
    again.name = "again";
    again.write_policy = kvcore::WritePolicy::kSelective;
    again.prologue = one_has_run;
    again.depth = 5;
    return {plain, forks, twins, host, loads, heirs, back, again};
}
