// SPDX-License-Identifier: Apache-2.0
// Work is divided among threads although the system cannot start all of them.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "support/check.hpp"
#include "support/parallel.hpp"

namespace tests::data::parallel {

namespace {

/// Starts `left` threads. Every later start throws.
template <class Error>
struct StartSome {
    std::atomic<int>* left;
    Error error;

    template <class Work>
    std::thread operator()(Work&& work) const {
        if (left->fetch_sub(1) <= 0) throw Error(error);
        return std::thread(std::forward<Work>(work));
    }
};

std::system_error no_thread() {
    return std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
}

/// Counts how often each of 0 .. n was processed.
struct Tally {
    explicit Tally(std::int64_t n) : times(static_cast<std::size_t>(n)) {}

    void operator()(std::int64_t begin, std::int64_t end) const {
        const std::lock_guard<std::mutex> lock(mutex);
        ++parts;
        for (std::int64_t i = begin; i < end; ++i) ++times[static_cast<std::size_t>(i)];
    }

    mutable std::mutex mutex;
    mutable std::vector<int> times;
    mutable int parts = 0;
};

template <class Error>
void everything_is_done_once_however_many_threads_start(const Error& error) {
    for (const std::int64_t n : {0, 1, 7, 100}) {
        for (int threads = 1; threads <= 9; ++threads) {
            for (int some = 0; some <= threads; ++some) {
                std::atomic<int> left{some};
                const Tally tally(n);
                kvcore::cpu::parallel_for(n, 1, threads, tally, StartSome<Error>{&left, error});
                CHECK(tally.times == std::vector<int>(static_cast<std::size_t>(n), 1));
                // The number of parts does not depend on the started threads: each part may have
                // its own memory.
                CHECK_EQ(tally.parts,
                         std::max<std::int64_t>(1, std::min<std::int64_t>(threads, n)));
            }
        }
    }
}

TEST(an_exception_of_the_caller_is_thrown_after_all_threads_joined) {
    std::atomic<int> done{0};
    bool is_caught = false;
    const std::thread::id caller = std::this_thread::get_id();
    try {
        kvcore::cpu::parallel_for(4, 1, 4, [&](std::int64_t, std::int64_t) {
            if (std::this_thread::get_id() == caller) throw std::runtime_error("no");
            ++done;
        });
    } catch (const std::runtime_error&) {
        is_caught = true;
    }
    CHECK(is_caught);
    CHECK_EQ(done.load(), 3);
}

TEST(everything_is_done_once_however_many_threads_start) {
    everything_is_done_once_however_many_threads_start(no_thread());
    everything_is_done_once_however_many_threads_start(std::bad_alloc());
}

}  // namespace

}  // namespace tests::data::parallel
