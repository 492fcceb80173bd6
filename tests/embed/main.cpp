// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <kvcore/cache_manager.hpp>
#include <vector>

// A scheduler around a model that counts: after each token it samples the next number.
struct Request {
    std::vector<kvcore::TokenId> tokens;
    kvcore::RequestView view = {};

    void run_from(std::int64_t start) {  // K and V of the tokens before it are written
        view.tokens = tokens.data();
        view.start = start;
        view.active = view.end = static_cast<std::int64_t>(tokens.size());
    }
};

class Scheduler {
   public:
    bool admit(Request& request) {
        request.view.sequence = manager.claim();
        request.run_from(0);
        if (manager.reserve(request.view) == kvcore::ReserveStatus::kOk) return true;
        manager.release(request.view.sequence);  // the pool is full: try again later
        return false;
    }
    bool run(const std::vector<Request*>& batch) {  // one step of the model
        std::vector<kvcore::RequestView*> rows;
        for (Request* request : batch) rows.push_back(&request->view);
        const kvcore::RequestBatch views(rows.data(), static_cast<std::int64_t>(rows.size()));
        kvcore::FetchTarget target{&table, lengths.data()};
        if (manager.fetch(views, 1, &target).status != kvcore::FetchStatus::kOk) return false;
        copies += manager.take_copies().size();  // an engine copies these parts of pages now, and
        for (Request* request : batch) {         // its kernels read `pages` and `lengths`
            const std::int64_t written = request->view.active;
            request->tokens.push_back(request->tokens.back() + 1);
            request->run_from(written);
        }
        std::vector<kvcore::PageSwap> swaps;  // for engines that keep tables of their own
        manager.commit(views, swaps);
        return true;
    }

    kvcore::CacheManager manager{{64, /*page_size=*/4, /*max_sequences=*/8, /*max_seq_len=*/128}};
    std::vector<std::uint32_t> pages = std::vector<std::uint32_t>(8 * 32);  // [rows, columns]
    std::vector<std::uint32_t> lengths = std::vector<std::uint32_t>(8);
    kvcore::LookupTable table{pages.data(), 8, 32, /*unassigned=*/64};
    std::size_t copies = 0;
};

int main() {
    Scheduler scheduler;
    kvcore::CacheManager& manager = scheduler.manager;
    Request first{{11, 12, 13, 14, 15, 16, 17, 18, 19, 20}};
    Request second{{11, 12, 13, 14, 15, 16, 17, 18, 30}};
    if (!scheduler.admit(first) || !scheduler.run({&first})) return 1;
    if (!scheduler.admit(second)) return 1;
    std::printf("cached %d; ", static_cast<int>(second.view.start));

    Request other{first.tokens};  // continues the same ten tokens in another way
    other.tokens.back() = 50;
    other.run_from(0);
    manager.fork(first.view, {&other.view, 1});
    if (!scheduler.run({&first, &second, &other})) return 1;
    std::printf("copied %d; ", static_cast<int>(scheduler.copies));

    const auto is_right = static_cast<std::int64_t>(first.tokens.size()) + 1;
    for (const int draft : {23, 99, 98}) first.tokens.push_back(draft);
    first.run_from(first.view.start);
    if (!scheduler.run({&first})) return 1;
    first.tokens.resize(static_cast<std::size_t>(is_right));  // the other drafts were wrong
    manager.truncate(first.view.sequence, is_right);
    first.tokens.push_back(24);
    first.run_from(is_right);

    for (const Request* request : {&first, &second, &other})
        manager.release(request->view.sequence);
    std::printf("free %d\n", static_cast<int>(manager.stats(0).available_pages()));
}  // prints: cached 8; copied 1; free 64
