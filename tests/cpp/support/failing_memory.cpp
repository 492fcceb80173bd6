// SPDX-License-Identifier: Apache-2.0
// The program of the fault tests: its main function and its allocator.
#include "support/failing_memory.hpp"

#include <cerrno>
#include <cstdio>
#include <cstdlib>

// ---- the program's allocator ----------------------------------------------------------------
// The linker and the language define the names.
// NOLINTBEGIN(bugprone-reserved-*,readability-identifier-*)
#if defined(KVCORE_WRAPS_MALLOC)
extern "C" {
void* __real_malloc(std::size_t bytes);
void* __real_calloc(std::size_t n, std::size_t bytes);
void* __real_realloc(void* memory, std::size_t bytes);
void* __real_aligned_alloc(std::size_t alignment, std::size_t bytes);
int __real_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes);

void* __wrap_malloc(std::size_t bytes) {
    return failing_memory::detail::fails() ? nullptr : __real_malloc(bytes);
}
void* __wrap_calloc(std::size_t n, std::size_t bytes) {
    return failing_memory::detail::fails() ? nullptr : __real_calloc(n, bytes);
}
void* __wrap_realloc(void* memory, std::size_t bytes) {
    return failing_memory::detail::fails() ? nullptr : __real_realloc(memory, bytes);
}
void* __wrap_aligned_alloc(std::size_t alignment, std::size_t bytes) {
    return failing_memory::detail::fails() ? nullptr : __real_aligned_alloc(alignment, bytes);
}
int __wrap_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
    if (failing_memory::detail::fails()) return ENOMEM;
    return __real_posix_memalign(memory, alignment, bytes);
}
}
#endif

namespace {

// Call the real allocator: the wrappers would count the allocation a second time.
void* memory_of(std::size_t bytes) noexcept {
    if (failing_memory::detail::fails()) return nullptr;
    const std::size_t asked = bytes > 0 ? bytes : 1;
#if defined(KVCORE_WRAPS_MALLOC)
    return __real_malloc(asked);
#else
    return std::malloc(asked);
#endif
}

void* memory_of(std::size_t bytes, std::align_val_t alignment) noexcept {
    if (failing_memory::detail::fails()) return nullptr;
    void* memory = nullptr;
    const std::size_t asked = bytes > 0 ? bytes : 1;
#if defined(KVCORE_WRAPS_MALLOC)
    const int error = __real_posix_memalign(&memory, static_cast<std::size_t>(alignment), asked);
#else
    const int error = posix_memalign(&memory, static_cast<std::size_t>(alignment), asked);
#endif
    return error == 0 ? memory : nullptr;
}

void* or_throw(void* memory) {
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

}  // namespace

// Define every form, because a sanitizer's forms do not call each other. Forbid inlining: if the
// compiler inlines one function of a pair, it reports a mismatch.
#if defined(__GNUC__)
#define KVCORE_OWN __attribute__((noinline))
#else
#define KVCORE_OWN
#endif
#define KVCORE_OWN_PAIR(form)                                                                    \
    KVCORE_OWN void* operator new form(std::size_t bytes) { return or_throw(memory_of(bytes)); } \
    KVCORE_OWN void* operator new form(std::size_t bytes, std::align_val_t alignment) {          \
        return or_throw(memory_of(bytes, alignment));                                            \
    }                                                                                            \
    KVCORE_OWN void* operator new form(std::size_t bytes, const std::nothrow_t&) noexcept {      \
        return memory_of(bytes);                                                                 \
    }                                                                                            \
    KVCORE_OWN void* operator new form(std::size_t bytes, std::align_val_t alignment,            \
                                       const std::nothrow_t&) noexcept {                         \
        return memory_of(bytes, alignment);                                                      \
    }                                                                                            \
    KVCORE_OWN void operator delete form(void* memory) noexcept { std::free(memory); }           \
    KVCORE_OWN void operator delete form(void* memory, std::size_t) noexcept {                   \
        std::free(memory);                                                                       \
    }                                                                                            \
    KVCORE_OWN void operator delete form(void* memory, std::align_val_t) noexcept {              \
        std::free(memory);                                                                       \
    }                                                                                            \
    KVCORE_OWN void operator delete form(void* memory, std::size_t, std::align_val_t) noexcept { \
        std::free(memory);                                                                       \
    }                                                                                            \
    KVCORE_OWN void operator delete form(void* memory, const std::nothrow_t&) noexcept {         \
        std::free(memory);                                                                       \
    }
KVCORE_OWN_PAIR()
KVCORE_OWN_PAIR([])
#undef KVCORE_OWN_PAIR
#undef KVCORE_OWN
// NOLINTEND(bugprone-reserved-*,readability-identifier-*)

/// Fail if the cases of a file failed no allocation, as they would without the replacement.
int main(int count, char** words) {
    const int status = check::run_cases(count, words);
    if (!check::has_run_files) return status;
    std::printf("%lld allocations failed\n",
                static_cast<long long>(failing_memory::detail::num_failed));
    return failing_memory::detail::num_failed > 0 ? status : 1;
}
