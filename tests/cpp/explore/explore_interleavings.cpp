// SPDX-License-Identifier: Apache-2.0
// Run every order in which three requests can call a CacheManager and in which their copies can be
// made, end and fail, up to a depth. Check that each row and each cached page has the content of
// its prefix. One mutex guards every change of a manager, so threads cannot reach any other order.
//
//     explore_interleavings [--depth N] [--scenario NAME] [--host] [--pages N] [--contents]
//
// Without options, the program spends a few seconds on all scenarios. --host skips scenarios
// without a host tier. --contents skips the laws of check_integrity and of the transfers: a broken
// law then shows a few steps later, in the content that a request reads.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "explore/explored_search.hpp"

namespace {

const ExploredSearch* running = nullptr;
const Scenario* scenario_run = nullptr;

[[noreturn]] void report(const char* what) {
    std::size_t length = 0;
    std::string steps;
    if (running != nullptr) {
        for (const Action& action : running->trail()) {
            if (length++ == scenario_run->prologue.size()) steps += " |";
            steps += " " + text_of(action);
        }
        length -= std::min(length, scenario_run->prologue.size());
    }
    std::printf("VIOLATION in %s at depth %zu: %s\n   %s\n",
                scenario_run == nullptr ? "?" : scenario_run->name.c_str(), length, what,
                steps.c_str());
    std::fflush(stdout);
    std::_Exit(1);
}

// A law that breaks in a noexcept function ends the program: print the trail before that.
[[noreturn]] void report_end() {
    try {
        if (std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
    } catch (const std::exception& error) {
        report(error.what());
    } catch (...) {
        report("the program ended with an exception that is no std::exception");
    }
    report("the program ended");
}

void report_signal(int) { report("the program was stopped by a signal"); }

struct Options {
    int depth = 0;  // 0: the depth of each scenario
    std::int64_t pages = 0;
    std::string scenario;
    bool host_only = false;
    bool asks_for_laws = true;
};

Options options_of(int count, char** words) {
    Options options;
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        const char* value = i + 1 < count ? words[i + 1] : nullptr;
        if (word == "--host") {
            options.host_only = true;
            continue;
        }
        if (word == "--contents") {
            options.asks_for_laws = false;
            continue;
        }
        if (value == nullptr) report(("option without a value or unknown: " + word).c_str());
        ++i;
        if (word == "--depth") {
            options.depth = std::atoi(value);
        } else if (word == "--pages") {
            options.pages = std::atoi(value);
        } else if (word == "--scenario") {
            options.scenario = value;
        } else {
            report(("unknown option " + word).c_str());
        }
    }
    return options;
}

}  // namespace

int main(int count, char** words) {
    std::set_terminate(report_end);
    std::signal(SIGSEGV, report_signal);
    const Options options = options_of(count, words);
    bool is_any = false;
    for (Scenario scenario : all_scenarios()) {
        if (!options.scenario.empty() && scenario.name != options.scenario) continue;
        if (options.host_only && scenario.host_pages == 0) continue;
        if (options.pages > 0) scenario.num_pages = options.pages;
        const auto most = static_cast<std::size_t>(scenario.num_pages * scenario.page_size);
        scenario.longest = std::min(scenario.longest, most);
        scenario.asks_for_laws = options.asks_for_laws;
        is_any = true;
        scenario_run = &scenario;
        ExploredSearch search(scenario);
        running = &search;
        try {
            search.begin();
            search.run(options.depth > 0 ? options.depth : scenario.depth);
        } catch (const std::exception& error) {
            report(error.what());
        }
        running = nullptr;
    }
    if (!is_any) report("no such scenario");
    return 0;
}
