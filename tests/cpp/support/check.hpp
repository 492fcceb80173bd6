// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

/// Test cases and their checks. `TEST(pages_are_counted) { CHECK_EQ(...); }` in a source file of a
/// test program adds a case to the program; run_cases() finds and runs it. A failed check prints
/// its file and line, both values, the seed, the case and a note, and ends the program with status
/// 1.
namespace check {

/// A case, which TEST creates.
struct Case {
    void (*run)();
    const char* name;
    const char* file;
    int line;

    /// Return the name of its file, without folder and suffix.
    [[nodiscard]] std::string file_name() const;
};

/// All cases of this program.
inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}
struct Registration {
    explicit Registration(const Case& added) { cases().push_back(added); }
};

/// Run the cases that the command line chooses, as `--help` describes. Return the exit status.
int run_cases(int count, char** words);

inline const Case* running = nullptr;
inline bool has_run_files = false;  // true: all cases of the chosen files
inline std::uint64_t seed = 0;      // seed of the random numbers, if the case uses any
inline std::string note;            // position in the case, for example the configuration
inline const char* verb = "";       // name of the last call

inline std::optional<std::uint64_t> given_seed;  // from the command line
inline std::optional<std::int64_t> given_count;

/// Return the seed of a case: --seed, or the case's own seed. Failure texts contain it.
inline std::uint64_t seed_or(std::uint64_t own) { return seed = given_seed.value_or(own); }
/// Return the number of random operations of a case: --count, or the case's own number.
inline std::int64_t count_or(std::int64_t own) { return given_count.value_or(own); }

/// Return the number of rounds of random values. ThreadSanitizer needs ten times as long for each
/// round and finds every race after a few rounds. More values are useful only in other builds.
constexpr int rounds(int all) {
#if defined(__SANITIZE_THREAD__)
    return all / 5;
#else
    return all;
#endif
}

inline std::string text(const std::string& value) { return '"' + value + '"'; }
inline std::string text(const char* value) { return text(std::string(value)); }
inline std::string text(bool value) { return value ? "true" : "false"; }
template <class T>
std::string text(const T& value) {
    if constexpr (std::is_enum_v<T>) {
        return std::to_string(static_cast<long long>(value));
    } else if constexpr (std::is_pointer_v<T>) {
        return std::to_string(reinterpret_cast<std::uintptr_t>(value));
    } else {
        return std::to_string(value);
    }
}
template <class T>
std::string text(const std::vector<T>& values) {
    std::string out = "[";
    for (const T& value : values) out += (out.size() > 1 ? ", " : "") + text(value);
    return out + "]";
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
    std::fprintf(stderr, "%s:%d: %s (seed %llu)\n", file, line, what.c_str(),
                 static_cast<unsigned long long>(seed));
    if (running != nullptr) {
        std::fprintf(stderr, "    in case %s.%s\n", running->file_name().c_str(), running->name);
    }
    if (!note.empty()) std::fprintf(stderr, "    at %s %s\n", note.c_str(), verb);
    std::exit(1);
}

inline void require(bool holds, const char* expression, const char* file, int line) {
    if (!holds) fail(file, line, std::string(expression) + " does not hold");
}

// Integers compare by value, whatever their widths and signs.
template <class T>
decltype(auto) comparable(const T& value) {
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
        return static_cast<long long>(value);
    } else {
        return (value);
    }
}

template <class A, class B>
void require_equal(const A& actual, const B& expected, const char* expression, const char* file,
                   int line) {
    if (comparable(actual) == comparable(expected)) return;
    fail(file, line, std::string(expression) + ": " + text(actual) + " != " + text(expected));
}

template <class Exception, class Call>
void require_throws(Call&& call, const char* expression, const char* file, int line) {
    try {
        call();
    } catch (const Exception&) {
        return;
    } catch (const std::exception& other) {
        fail(file, line, std::string(expression) + " throws another exception: " + other.what());
    }
    fail(file, line, std::string(expression) + " throws nothing");
}

inline std::string Case::file_name() const {
    const std::string path = file;
    const std::size_t begin = path.find_last_of("/\\") + 1;  // 0 without a folder
    return path.substr(begin, path.rfind('.') - begin);
}

}  // namespace check

/// A case with this name: TEST(name) { ... }
#define TEST(name)                                                                     \
    static void name();                                                                \
    static check::Registration name##_is_a_case({&(name), #name, __FILE__, __LINE__}); \
    static void name()

#define CHECK(condition) check::require((condition), #condition, __FILE__, __LINE__)
#define CHECK_EQ(actual, expected) \
    check::require_equal((actual), (expected), #actual " == " #expected, __FILE__, __LINE__)
// The call comes last because its commas separate macro arguments.
#define CHECK_THROWS(Exception, ...)                                                        \
    check::require_throws<Exception>([&] { static_cast<void>(__VA_ARGS__); }, #__VA_ARGS__, \
                                     __FILE__, __LINE__)
