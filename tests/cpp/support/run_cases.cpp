// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <tuple>
#include <vector>

#include "support/check.hpp"

namespace check {
namespace {

constexpr const char* kHelp =
    "usage: %s [--list] [--file FILE]... [--seed N] [--count N] [PART]...\n"
    "Runs all cases, or the cases of each FILE and the cases whose FILE.CASE contains a PART.\n"
    "  --list   print the chosen cases without running them\n"
    "  --file   name of a source file, without folder and suffix\n"
    "  --seed   seed of the random numbers, instead of each case's own seed\n"
    "  --count  number of operations of a random case, instead of its own number\n";

[[noreturn]] void refuse(const char* program, const std::string& what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::fprintf(stderr, kHelp, program);
    std::exit(2);
}

/// The choices of a command line.
struct Choice {
    std::vector<std::string> files;
    std::vector<std::string> parts;
    bool is_list = false;

    [[nodiscard]] bool has(const Case& each) const {
        if (files.empty() && parts.empty()) return true;
        const std::string file = each.file_name();
        const std::string name = file + "." + each.name;
        return std::find(files.begin(), files.end(), file) != files.end() ||
               std::any_of(parts.begin(), parts.end(), [&](const std::string& part) {
                   return name.find(part) != std::string::npos;
               });
    }
};

std::uint64_t number(const char* program, const char* option, const char* word) {
    char* end = nullptr;
    const std::uint64_t value = std::strtoull(word, &end, 0);
    if (end == word || *end != '\0') {
        refuse(program, std::string(option) + " takes a number, not " + word);
    }
    return value;
}

Choice choice_of(int count, char** words) {
    Choice choice;
    const char* program = words[0];
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        if (word == "--help") {
            std::printf(kHelp, program);
            std::exit(0);
        }
        if (word == "--list") {
            choice.is_list = true;
        } else if (word == "--file" || word == "--seed" || word == "--count") {
            if (i + 1 == count) refuse(program, word + " needs a value");
            const char* value = words[++i];
            if (word == "--file") {
                choice.files.emplace_back(value);
            } else if (word == "--seed") {
                given_seed = number(program, "--seed", value);
            } else {
                given_count = static_cast<std::int64_t>(number(program, "--count", value));
            }
        } else if (word[0] == '-') {
            refuse(program, "unknown option " + word);
        } else {
            choice.parts.push_back(word);
        }
    }
    return choice;
}

void run(const Case& chosen) {
    std::printf("%s.%s\n", chosen.file_name().c_str(), chosen.name);
    std::fflush(stdout);  // visible even if the case ends the program
    running = &chosen;
    seed = 0;
    note.clear();
    verb = "";
    try {
        chosen.run();
    } catch (const std::exception& error) {
        fail(chosen.file, chosen.line, std::string("the case throws: ") + error.what());
    }
    running = nullptr;
}

}  // namespace

int run_cases(int count, char** words) {
    const Choice choice = choice_of(count, words);
    std::vector<Case> chosen;
    for (const Case& each : cases()) {
        if (choice.has(each)) chosen.push_back(each);
    }
    if (chosen.empty()) refuse(words[0], "no case is chosen; --list prints all of them");
    std::sort(chosen.begin(), chosen.end(), [](const Case& a, const Case& b) {
        return std::make_tuple(a.file_name(), a.line) < std::make_tuple(b.file_name(), b.line);
    });
    for (const Case& each : chosen) {
        if (choice.is_list) {
            std::printf("%s.%s\n", each.file_name().c_str(), each.name);
        } else {
            run(each);
        }
    }
    has_run_files = !choice.is_list && choice.parts.empty();
    return 0;
}

}  // namespace check
