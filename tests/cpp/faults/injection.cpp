// SPDX-License-Identifier: Apache-2.0
// Tests the fault injection: it counts every kind of allocation, and makes it fail on request.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "support/failing_memory.hpp"

namespace tests::faults::injection {

using failing_memory::Failing;
using failing_memory::Injection;

namespace {

struct alignas(128) Wide {
    char bytes[128] = {};
};

// A volatile pointer, so that the optimiser does not remove unused allocations.
void* volatile seen = nullptr;
template <class T>
T* look_at(T* memory) {
    seen = const_cast<void*>(static_cast<const volatile void*>(memory));
    return memory;
}

template <class Ask>
void fails_when_told(const char* how, Ask&& ask) {
    check::note = how;
    {
        const Injection injection(0);
        CHECK(ask());
        CHECK_EQ(injection.num_seen(), 1);
    }
    bool has_failed = false;
    {
        const Injection injection(1);
        try {
            has_failed = !ask();
        } catch (const std::bad_alloc&) {
            has_failed = true;
        }
    }
    CHECK(has_failed);
    CHECK(ask());
}

template <class T>
bool made(T* memory) {
    return std::unique_ptr<T>(look_at(memory)) != nullptr;
}
[[maybe_unused]] bool is_memory(void* memory) {
    const bool is_there = look_at(memory) != nullptr;
    std::free(memory);
    return is_there;
}

TEST(every_kind_of_memory_fails) {
    fails_when_told("new", [] { return made(new int(1)); });
    fails_when_told("new, nothrow", [] { return made(new (std::nothrow) int(1)); });
    fails_when_told("aligned new", [] { return made(new Wide); });
    fails_when_told("aligned new, nothrow", [] { return made(new (std::nothrow) Wide); });
    fails_when_told("new[]", [] { return std::unique_ptr<int[]>(look_at(new int[7])) != nullptr; });
    fails_when_told("vector", [] { return look_at(std::vector<int>(5).data()) != nullptr; });
    // allocated in the compiled part of the standard library
    fails_when_told("string", [] { return std::string(99, 'x').size() == 99; });
#if defined(KVCORE_WRAPS_MALLOC)
    fails_when_told("malloc", [] { return is_memory(std::malloc(9)); });
    fails_when_told("calloc", [] { return is_memory(std::calloc(9, 9)); });
    fails_when_told("realloc", [] { return is_memory(std::realloc(nullptr, 9)); });
    fails_when_told("aligned_alloc", [] { return is_memory(std::aligned_alloc(64, 128)); });
    fails_when_told("posix_memalign", [] {
        void* memory = nullptr;
        return posix_memalign(&memory, 64, 9) == 0 && is_memory(memory);
    });
#endif
}

int num_made(std::int64_t at, Failing failing) {
    const Injection injection(at, failing);
    int made = 0;
    for (int i = 0; i < 4; ++i) {
        const std::unique_ptr<int> memory(look_at(new (std::nothrow) int(i)));
        made += memory != nullptr ? 1 : 0;
    }
    return made;
}

TEST(one_allocation_fails_or_all_from_it_on) {
    CHECK_EQ(num_made(0, Failing::kOnce), 4);
    CHECK_EQ(num_made(2, Failing::kOnce), 3);
    CHECK_EQ(num_made(2, Failing::kFromThereOn), 1);
    CHECK_EQ(num_made(5, Failing::kFromThereOn), 4);
}

/// Two lists of equal length.
struct Pair {
    std::vector<int> keys{1};
    std::vector<int> values{2};

    void add() {
        keys.reserve(keys.size() + 1);
        values.reserve(values.size() + 1);
        keys.push_back(3);
        values.push_back(4);
    }
    [[nodiscard]] std::string text() const { return check::text(keys) + check::text(values); }
};

TEST(each_allocation_of_a_call_is_tried) {
    const auto make = [] { return Pair(); };
    const auto text = [](const Pair& pair) { return pair.text(); };
    CHECK_EQ(failing_memory::each_site("add", make, [](Pair& pair) { pair.add(); }, text), 2);
    // stable_sort works without the memory that it asks for.
    const auto sort = [](Pair& pair) { std::stable_sort(pair.keys.begin(), pair.keys.end()); };
    failing_memory::any_site("stable_sort", make, sort, text);
    failing_memory::allocates_nothing("clear", make, [](Pair& pair) { pair.keys.clear(); });
}

}  // namespace

}  // namespace tests::faults::injection
