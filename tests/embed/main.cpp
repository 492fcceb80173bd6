// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <kvcore/cache_manager.hpp>
#include <vector>

// Serves one prompt twice: the second time its full pages come from the cache.
int main() {
    kvcore::CacheConfig config;
    config.num_blocks = 64;
    config.page_size = 4;
    config.max_sequences = 8;
    config.max_seq_len = 128;
    kvcore::CacheManager manager(config);
    for (int turn = 0; turn < 2; ++turn) {
        std::vector<kvcore::TokenId> tokens = {11, 12, 13, 14, 15, 16, 17, 18, 19, 20};
        kvcore::RequestView request{manager.claim(), tokens.data(), 0, 10, 10, {}};
        if (manager.reserve(request) != kvcore::ReserveStatus::kOk) return 1;
        std::printf("cached %d, to run %d; ", static_cast<int>(request.start),
                    static_cast<int>(request.active - request.start));
        tokens.push_back(21);  // the model has run the prompt and sampled a token
        request = {request.sequence, tokens.data(), 10, 11, 11, {}};
        std::vector<kvcore::PageSwap> swaps;
        manager.commit({&request, 1}, swaps);
        manager.release(request.sequence);
    }
    std::puts("done");  // prints: cached 0, to run 10; cached 8, to run 2; done
}
