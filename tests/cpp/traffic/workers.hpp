// SPDX-License-Identifier: Apache-2.0
// Threads that start at the same moment, and prompts with common prefixes.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "kvcore/types.hpp"
#include "support/random.hpp"

/// Call work(0) .. work(n - 1), each on a thread of its own, and return after the last one.
template <class Work>
void run_together(int n, const Work& work) {
    std::atomic<bool> has_begun{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < n; ++i) {
        threads.emplace_back([&has_begun, &work, i] {
            while (!has_begun) std::this_thread::yield();
            work(i);
        });
    }
    has_begun = true;
    for (std::thread& thread : threads) thread.join();
}

/// Prompts over three tokens.
inline std::vector<std::vector<kvcore::TokenId>> random_prompts(Random& random, int n, int length) {
    std::vector<std::vector<kvcore::TokenId>> prompts;
    for (int i = 0; i < n; ++i) {
        prompts.emplace_back();
        for (int j = 0; j < length; ++j) {
            prompts.back().push_back(static_cast<kvcore::TokenId>(random.below(3)));
        }
    }
    return prompts;
}

/// Return a prefix of a random prompt, and up to five more tokens.
inline std::vector<kvcore::TokenId> prompt_like(std::vector<std::vector<kvcore::TokenId>>& prompts,
                                                Random& random) {
    std::vector<kvcore::TokenId> tokens = random.pick(prompts);
    const auto length = static_cast<std::int64_t>(tokens.size());
    tokens.resize(static_cast<std::size_t>(random.between(1, length)));
    for (std::int64_t n = random.below(6); n > 0; --n) {
        tokens.push_back(static_cast<kvcore::TokenId>(random.below(3)));
    }
    return tokens;
}
