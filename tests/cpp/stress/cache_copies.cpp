// SPDX-License-Identifier: Apache-2.0
// Threads save and restore a cache while other threads run requests in it and reset it: a page
// always has the content of its tokens.
#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "support/cache_mover.hpp"
#include "support/check.hpp"
#include "support/random.hpp"
#include "traffic/workers.hpp"

namespace tests::stress::cache_copies {

namespace {

using cache_mover::Run;

constexpr std::int32_t kPage = 4;
constexpr std::int64_t kPages = 48;
constexpr int kRounds = 400;

/// A manager and the content of its pages: the digest of the tokens up to the page's end.
struct Cache {
    explicit Cache(bool has_windows) : manager(config_of(has_windows)) {}
    static kvcore::CacheConfig config_of(bool has_windows) {
        kvcore::CacheConfig config;
        config.num_pages = kPages;
        config.page_size = kPage;
        config.max_sequences = 8;
        config.max_seq_len = 64;
        if (has_windows) {
            config.groups = {kvcore::CacheGroup{}, {kvcore::GroupKind::kSliding, 6, 1, 0}};
        }
        return config;
    }

    kvcore::CacheManager manager;
    // Only the manager's mutex orders the writers and readers of a page.
    std::vector<Digest> memory = std::vector<Digest>(static_cast<std::size_t>(kPages));
};

Digest digest_of(const Tokens& tokens, std::int64_t n, std::size_t lane) {
    Digest digest = scramble(lane + 1);
    for (std::int64_t i = 0; i < n; ++i) digest = digest_after(digest, item(tokens, i));
    return digest;
}

/// Run a prompt and check the content of its hit.
void serve(Cache& cache, const Tokens& tokens, std::size_t lanes) {
    Tokens grown = tokens;
    grown.push_back(0);
    kvcore::RequestView view;
    view.sequence = cache.manager.claim();
    view.tokens = grown.data();
    view.active = view.end = count(tokens);
    kvcore::Transfers transfers;
    if (cache.manager.reserve(view, 1, &transfers) == kvcore::ReserveStatus::kOk) {
        const std::int64_t hit = view.start / kPage;
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            const auto pages = cache.manager.pages_of(view.sequence, static_cast<int>(lane));
            for (std::int64_t c = 0; c < count(tokens) / kPage; ++c) {
                const BlockId page = item(pages, c);
                if (page < 0) continue;
                const Digest wanted = digest_of(tokens, (c + 1) * kPage, lane);
                if (c < hit) {
                    CHECK_EQ(item(cache.memory, page), wanted);
                } else {
                    item(cache.memory, page) = wanted;
                }
            }
        }
        if (!transfers.empty()) cache.manager.finish(transfers.ticket);
        view.start = view.end;
        view.active = view.end = count(grown);
        std::vector<kvcore::PageSwap> swaps;
        kvcore::Transfers stored;
        cache.manager.commit({&view, 1}, swaps, &stored);
        if (!stored.empty()) cache.manager.finish(stored.ticket);
    }
    cache.manager.release(view.sequence);
}

struct Saved {
    Run run;
    std::vector<Digest> content;  // of the run's pages
};

std::vector<Saved> save(Cache& cache, std::size_t lanes) {
    const std::uint64_t resets = cache.manager.num_resets();
    std::vector<Saved> found;
    for (Run& run : cache_mover::list(cache.manager)) {
        kvcore::ColumnSpan span = cache_mover::span_of(cache.manager, run);
        span.num_resets = resets;
        const kvcore::CacheExport held = cache.manager.export_columns(span);
        Saved saved;
        saved.run = run;
        saved.run.columns = held.columns();
        saved.run.tokens.resize((static_cast<std::size_t>(run.first) + held.columns().size()) *
                                kPage);
        for (std::size_t i = 0; i < held.pages().size(); ++i) {
            const BlockId page = held.pages()[i];
            const std::int64_t depth = run.first + static_cast<std::int64_t>(i / lanes) + 1;
            saved.content.push_back(page < 0 ? 0 : item(cache.memory, page));
            if (page < 0) continue;
            CHECK_EQ(saved.content.back(), digest_of(run.tokens, depth * kPage, i % lanes));
        }
        if (!held.columns().empty()) found.push_back(saved);
    }
    return found;
}

void restore(Cache& cache, const std::vector<Saved>& all, Random& random) {
    for (const Saved& saved : all) {
        kvcore::CacheImport taken = cache.manager.import_columns(
            cache_mover::span_of(cache.manager, saved.run), saved.run.columns.data());
        for (std::size_t i = 0; i < taken.pages().size(); ++i) {
            if (taken.pages()[i] >= 0) item(cache.memory, taken.pages()[i]) = saved.content[i];
        }
        const bool is_left = random.below(8) == 0;
        const bool holds = taken.status() == kvcore::ImportStatus::kTaken ||
                           taken.status() == kvcore::ImportStatus::kKnown;
        if (holds && !is_left)
            static_cast<void>(cache.manager.publish(taken, random.below(2) == 0));
    }
}

void run(bool has_windows) {
    const std::size_t lanes = has_windows ? 2 : 1;
    Cache cache(has_windows);
    Random beginning(7);
    const auto prompts = random_prompts(beginning, 4, 40);
    serve(cache, prompts[0], lanes);  // so that the first save finds pages
    std::atomic<std::int64_t> saved{0};
    run_together(4, [&](int i) {
        Random random(static_cast<std::uint64_t>(11 + i));
        auto own = prompts;
        std::vector<Saved> last;
        for (int round = 0; round < kRounds; ++round) {
            if (i < 2) {
                serve(cache, prompt_like(own, random), lanes);
            } else if (i == 2) {
                last = save(cache, lanes);
                saved += count(last);
                restore(cache, last, random);
            } else {
                last = save(cache, lanes);
                saved += count(last);
                restore(cache, last, random);
                if (random.below(40) == 0) cache.manager.reset_prefix_cache();
                if (random.below(40) == 0) cache.manager.check_integrity();
            }
        }
    });
    cache.manager.check_integrity();
    CHECK(saved > 0);
    CHECK_EQ(cache.manager.stats(0).available_pages(), kPages);
}

TEST(pages_hold_their_tokens) {
    run(false);
    run(true);
}

}  // namespace

}  // namespace tests::stress::cache_copies
