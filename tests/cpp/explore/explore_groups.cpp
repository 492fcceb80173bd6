// SPDX-License-Identifier: Apache-2.0
// Run every order in which three requests can call a manager with groups of layers and in which
// their copies can end or fail, up to a depth. Check that the pages that a request reads and the
// cached pages were written for exactly their tokens, in every bundle, and that each request has
// exactly the pages that its windows cover.
//   explore_groups [--depth N] [--contents]
// --contents checks neither the laws of check_integrity nor the pages that requests have. A broken
// law then shows a few steps later, in the content that a request reads.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvcore/errors.hpp"
#include "traffic/group_rows.hpp"

namespace {

enum Verb { kReserve, kFetch, kStep, kRelease, kTakeOwed, kFinish, kFail, kFork, kReset, kPin };

struct Action {
    Verb verb;
    std::size_t index;
};
using Trail = std::vector<Action>;

struct Scene {
    std::string name;
    Trail prologue;
    int depth;
    std::int64_t num_pages = 11;
};

const Scene* scene_run = nullptr;
Trail trail_run;

// Runs whichever way the program ends during a search.
void report() {
    if (scene_run == nullptr) return;
    static const char* const names[] = {"reserve", "fetch", "step", "release", "take_owed",
                                        "finish",  "fail",  "fork", "reset",   "pin"};
    std::printf("VIOLATION in groups at depth %zu: %s\n   ",
                trail_run.size() - scene_run->prologue.size(), scene_run->name.c_str());
    for (const Action& action : trail_run)
        std::printf(" %s(%zu)", names[action.verb], action.index);
    std::printf("\n");
    std::fflush(stdout);
}

class World {
   public:
    explicit World(bool asks_for_laws)
        : rows_(config(scene_run->num_pages)), asks_for_laws_(asks_for_laws) {}

    [[nodiscard]] bool is_possible(const Action& action) const {
        if (action.verb == kReset) return true;
        if (action.verb == kFinish || action.verb == kFail) return action.index < open_.size();
        if (action.verb == kPin) return action.index == 0;
        const std::unique_ptr<Live>& live = live_[action.index];
        const std::int32_t pending = live ? rows_.sequence(live->row).num_pending : 0;
        switch (action.verb) {
            case kReserve:
            case kFetch:
                return pending == 0 && (!live || !live->has_run);
            case kStep:
                return live && live->has_run && pending == 0;
            case kTakeOwed:
                return pending > 0 && open_.empty();
            case kFork:
                return action.index == 0 && live && live->row.request.start > 0 && !live_[1] &&
                       pending == 0;
            default:
                return live != nullptr;
        }
    }
    void apply(const Action& action) {
        switch (action.verb) {
            case kReserve:
                reserve(action.index);
                break;
            case kFetch:
                fetch(action.index);
                break;
            case kStep:
                step(*live_[action.index]);
                break;
            case kRelease:
                rows_.manager.release(live_[action.index]->row.request.sequence);
                live_[action.index].reset();
                break;
            case kTakeOwed: {
                kvcore::Transfers transfers;
                const auto handle = live_[action.index]->row.request.sequence;
                static_cast<void>(rows_.manager.take_owed(handle, transfers));
                if (!transfers.empty()) open_.push_back(transfers);
                break;
            }
            case kFinish:
            case kFail:
                finish(action.index, action.verb == kFinish);
                break;
            case kFork:
                fork();
                break;
            case kReset:
                rows_.manager.reset_prefix_cache();
                break;
            case kPin:
                pin_or_unpin();
                break;
        }
        rows_.spoil_free_pages(0);
    }
    void check() {
        if (asks_for_laws_) rows_.manager.check_integrity();
        rows_.check_cached(0, cached_of(rows_.manager, 0, {""}));
        for (const std::unique_ptr<Live>& live : live_) {
            if (!live) continue;
            if (asks_for_laws_) rows_.check_row(live->row);
            if (rows_.sequence(live->row).num_pending == 0) rows_.read(live->row);
        }
    }

   private:
    struct Live {
        GroupRow row;
        bool has_run = false;
    };

    static kvcore::CacheConfig config(std::int64_t num_pages) {
        kvcore::CacheConfig config;
        config.page_size = 2;
        config.num_pages = num_pages;
        config.max_sequences = 3;
        config.max_seq_len = 9;
        config.groups = {{}, {kvcore::GroupKind::kSliding, 3, 1, 0}};
        return config;
    }
    Live& claimed(std::size_t i) {
        static const std::array<std::vector<TokenId>, 3> prompts = {
            {{1, 2, 3, 4, 5}, {1, 2, 3, 9}, {1, 2, 3, 4, 5, 6}}};
        if (!live_[i]) {
            live_[i] = std::make_unique<Live>(Live{rows_.claimed(Request("", prompts[i]), 0)});
            set_chunk(i);
        }
        return *live_[i];
    }
    void set_chunk(std::size_t i) {
        Request& request = live_[i]->row.request;
        request.active = i == 2 ? std::min(request.start + 3, request.end()) : request.end();
    }
    void reserve(std::size_t i) {
        Live& live = claimed(i);
        kvcore::RequestView view = live.row.request.view();
        const std::int64_t hit = rows_.sequence(live.row).hit_tokens;
        kvcore::Transfers transfers;
        const kvcore::ReservePlan plan = rows_.manager.plan(view);
        const auto status = rows_.manager.reserve(view, 1, &transfers);
        CHECK_EQ(plan.fits, status == kvcore::ReserveStatus::kOk);
        if (plan.fits) stand(live, view, hit);
        if (!transfers.empty()) open_.push_back(transfers);
    }
    void stand(Live& live, const kvcore::RequestView& view, std::int64_t hit) {
        live.row.request.start = view.start;
        live.row.request.active = view.active;
        rows_.reserved(live.row, hit, 1);
    }
    void fetch(std::size_t i) {
        Live& live = claimed(i);
        kvcore::RequestView view = live.row.request.view();
        const std::int64_t hit = rows_.sequence(live.row).hit_tokens;
        std::array<std::uint32_t, 64> cells{};
        std::array<std::uint32_t, 64> more_cells{};
        std::array<std::uint32_t, 1> lengths{};
        kvcore::LookupTable table(cells.data(), 1, 64, ~0U);
        kvcore::LookupTable window(more_cells.data(), 1, 64, ~0U);
        kvcore::LookupTable* more = &window;
        kvcore::FetchTarget target;
        target.table = &table;
        target.more = &more;
        target.cache_lengths = lengths.data();
        kvcore::Transfers transfers;
        const auto result = rows_.manager.fetch({&view, 1}, 1, &target, &transfers);
        if (result.status == kvcore::FetchStatus::kNoSpace) return;
        stand(live, view, hit);
        if (!transfers.empty()) return open_.push_back(transfers);
        CHECK_EQ(result.status, kvcore::FetchStatus::kOk);
        rows_.read(live.row);
        rows_.write(live.row, view.start, view.active);
        live.has_run = true;
    }
    void step(Live& live) {
        Request& request = live.row.request;
        request.start = request.active;
        if (request.start == request.end()) {
            if (request.end() >= 8) request.rewind(8);
            request.append(7);
            request.start = request.end() - 1;
        }
        set_chunk(index_of(live));
        kvcore::RequestView view = request.view();
        std::vector<kvcore::PageSwap> swaps;
        rows_.manager.commit({&view, 1}, swaps);
        rows_.advanced(live.row, request.start);
        live.has_run = false;
    }
    std::size_t index_of(const Live& live) const {
        for (std::size_t i = 0; i < live_.size(); ++i) {
            if (live_[i].get() == &live) return i;
        }
        return 0;
    }
    void finish(std::size_t index, bool done) {
        const kvcore::Transfers transfers = open_[index];
        open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(index));
        rows_.copy(transfers.copies, done);
        rows_.manager.finish(transfers.ticket, done);
    }
    void fork() {
        const GroupRow& parent = live_[0]->row;
        const std::int64_t n = std::min(rows_.sequence(parent).written, parent.request.start);
        const std::vector<TokenId>& all = parent.request.tokens();
        std::vector<TokenId> tokens(all.begin(), all.begin() + n);
        tokens.push_back(8);
        GroupRow child{Request("", tokens), 0};
        kvcore::RequestView view = child.request.view();
        rows_.manager.fork(parent.request.view(), {&view, 1});
        child.request.sequence = view.sequence;
        child.request.start = view.start;
        child.first.assign(1, 0);
        child.size = rows_.oracle.columns(n);
        if (child.size > 0) {
            child.first = parent.first;
            child.reserved = std::min(parent.reserved, child.size);
        }
        live_[1] = std::make_unique<Live>(Live{child});
    }
    void pin_or_unpin() {
        if (pin_) {
            rows_.manager.unpin(*pin_);
            return pin_.reset();
        }
        const std::vector<TokenId> tokens = {1, 2, 3, 4};
        pin_ = rows_.manager.pin(0, "", tokens.data(), 4);
    }

    GroupRows rows_;
    bool asks_for_laws_;
    std::array<std::unique_ptr<Live>, 3> live_;
    std::vector<kvcore::Transfers> open_;
    std::optional<kvcore::PinHandle> pin_;
};

std::vector<Action> all_actions() {
    std::vector<Action> actions;
    for (const Verb verb : {kReserve, kFetch, kStep, kRelease, kTakeOwed}) {
        for (std::size_t i = 0; i < 3; ++i) actions.push_back({verb, i});
    }
    for (const std::size_t i : {0, 1}) {
        actions.push_back({kFinish, i});
        actions.push_back({kFail, i});
    }
    for (const Verb verb : {kFork, kReset, kPin}) actions.push_back({verb, 0});
    return actions;
}

// Replay from the start each time: a manager cannot be copied.
std::int64_t search(bool asks_for_laws, int depth) {
    static const std::vector<Action> actions = all_actions();
    const auto replay = [&] {
        auto world = std::make_unique<World>(asks_for_laws);
        for (const Action& action : trail_run) world->apply(action);
        return world;
    };
    const std::unique_ptr<World> here = replay();
    here->check();
    if (depth == 0) return 1;
    std::int64_t ends = 0;
    for (const Action& action : actions) {
        if (!here->is_possible(action)) continue;
        trail_run.push_back(action);
        ends += search(asks_for_laws, depth - 1);
        trail_run.pop_back();
    }
    return ends;
}

}  // namespace

int main(int count, char** words) {
    int depth = 0;
    bool asks_for_laws = true;
    for (int i = 1; i < count; ++i) {
        if (std::strcmp(words[i], "--contents") == 0) asks_for_laws = false;
        if (std::strcmp(words[i], "--depth") == 0 && i + 1 < count) depth = std::atoi(words[++i]);
    }
    std::atexit(report);
    std::set_terminate([] {
        try {
            if (std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
        } catch (const std::exception& error) {
            std::printf("%s\n", error.what());
        }
        report();
        std::_Exit(1);
    });
    const std::vector<Scene> scenes = {
        {"nothing has run", {}, 4},
        {"one has run", {{kFetch, 0}, {kStep, 0}}, 4},
        {"a copy is under way", {{kFetch, 0}, {kStep, 0}, {kReserve, 1}}, 4},
        {"one is cached, others have its pages",
         {{kFetch, 0},
          {kStep, 0},
          {kFetch, 0},
          {kStep, 0},
          {kRelease, 0},
          {kReserve, 2},
          {kFinish, 0}},
         4},
        {"one has run, little room",
         {{kFetch, 0}, {kStep, 0}, {kFetch, 0}, {kStep, 0}, {kRelease, 0}},
         4,
         7},
        {"a chunk has run, forked", {{kFetch, 2}, {kFetch, 0}, {kStep, 0}, {kFork, 0}}, 4},
    };
    std::int64_t ends = 0;
    for (const Scene& scene : scenes) {
        scene_run = &scene;
        trail_run = scene.prologue;
        for (int d = 0; d <= (depth > 0 ? depth : scene.depth); ++d) {
            ends += search(asks_for_laws, d);
        }
        scene_run = nullptr;
    }
    std::printf("%lld orders\n", static_cast<long long>(ends));
}
