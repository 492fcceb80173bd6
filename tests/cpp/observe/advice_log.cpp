// SPDX-License-Identifier: Apache-2.0
// Advice from all pages: random requests, against the order of all prefixes in a plain list.
#include "observe/advice_log.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cache/cache_data.hpp"
#include "cache/verbs.hpp"
#include "support/check.hpp"
#include "support/manager_fixture.hpp"
#include "support/random.hpp"

namespace tests::observe::advice_log {

using kvcore::Advice;
using kvcore::AdviceLog;
using kvcore::AdviceTokens;
using kvcore::CacheConfig;
using kvcore::EvictionOrder;

namespace {

constexpr std::int32_t kPage = 2;

/// The order in which LRU evicts prefixes, and the uses and releases of prefixes, as lists.
class SlowAdvice {
   public:
    struct Running {
        Request* request;
        std::vector<Digest> pages;  // of whole pages that it holds
        std::int64_t reserved = 0;  // pages of its row
        std::int64_t committed = 0;
        std::int64_t use_end = 0;
        bool is_known = true;       // all pages so far
        std::int64_t distance = 0;  // of the last page
    };
    static constexpr std::int64_t kAnyRoom = 1'000'000;  // the next event makes room
    struct Event {
        Digest page;
        bool is_use;
        std::int64_t tokens;
        std::int64_t room;
        bool was_held;
        bool is_found;  // by LRU at factor 1
    };

    explicit SlowAdvice(std::int64_t pages) : pages_(pages) {}

    std::vector<double> found = std::vector<double>(AdviceTokens::kFactors.size());
    std::vector<Event> events;
    double use_tokens = 0;

    /// A request begins with `cached` pages of the tree.
    void admit(Running& running, std::int64_t cached) {
        const Request& request = *running.request;
        running.reserved = (request.end() + kPage - 1) / kPage;
        running.use_end = (request.end() - 1) / kPage;
        const std::size_t first = events.size();
        const std::int64_t others = outside();
        live_.push_back(&running);
        for (; running.committed < cached; ++running.committed) {
            use(running, others, is_known(page_of(running)));
            hold(running, page_of(running));
        }
        make_room(running, first);
    }
    /// The written pages are committed. The tree had the first `repeated` of them.
    void commit(Running& running, std::int64_t repeated) {
        const std::int64_t end = running.request->start / kPage;
        const std::size_t first = events.size();
        const std::int64_t others = outside() - (running.reserved - running.committed);
        for (; running.committed < end; ++running.committed) {
            const Digest page = page_of(running);
            use(running, others, running.committed >= repeated && is_known(page));
            hold(running, page);
        }
        make_room(running, first);
    }
    void release(Running& running) {
        for (auto page = running.pages.rbegin(); page != running.pages.rend(); ++page) {
            const std::int64_t before = room();
            if (--held_[*page] > 0) continue;
            held_.erase(*page);
            idle_.insert(idle_.begin(), *page);
            events.push_back({*page, false, 0, before, false, false});
        }
        live_.erase(std::find(live_.begin(), live_.end(), &running));
    }
    /// The tokens that the optimum finds.
    [[nodiscard]] std::int64_t optimum() const {
        std::vector<std::size_t> cached;  // next uses
        std::int64_t tokens = 0;
        const auto evict = [&](std::int64_t most) {
            while (static_cast<std::int64_t>(cached.size()) > std::max<std::int64_t>(0, most)) {
                cached.erase(std::max_element(cached.begin(), cached.end()));
            }
        };
        for (std::size_t i = 0; i < events.size(); ++i) {
            const bool is_first = next_of(events[i].page, 0) == i;
            if (is_first && events[i].is_use && !events[i].was_held && events[i].is_found) {
                cached.push_back(i);
            }
        }
        for (std::size_t i = 0; i < events.size(); ++i) {
            const Event& event = events[i];
            if (!event.is_use) {
                evict(event.room);
                const std::size_t next = next_of(event.page, i + 1);
                if (next < events.size() && events[next].is_use) cached.push_back(next);
                continue;
            }
            const auto at = std::find(cached.begin(), cached.end(), i);
            if (at != cached.end() || event.was_held) tokens += event.tokens;
            if (at != cached.end()) cached.erase(at);
            evict(event.room);
        }
        return tokens;
    }

   private:
    [[nodiscard]] static Digest page_of(const Running& running) {
        return running.request->digest((running.committed + 1) * kPage);
    }
    void use(Running& running, std::int64_t others, bool is_known) {
        if (running.committed >= running.use_end) return;
        const Digest page = page_of(running);
        use_tokens += kPage;
        running.is_known &= is_known;
        const bool was_held = running.is_known && held_.count(page) > 0;
        const std::int64_t own = was_held ? 0 : place(page) + others;
        running.distance = running.is_known ? std::max(running.distance, own) : kAnyRoom;
        const std::int64_t distance = running.distance;
        for (std::size_t i = 0; i < found.size(); ++i) {
            const double size = AdviceTokens::kFactors[i] * static_cast<double>(pages_);
            if (static_cast<double>(distance) < size) found[i] += kPage;
        }
        events.push_back({page, true, kPage, kAnyRoom, was_held, distance < pages_});
    }
    void make_room(const Running& running, std::size_t first) {
        if (events.size() > first)
            events.back().room = room() + running.reserved - running.committed;
    }
    [[nodiscard]] bool is_known(Digest page) const {
        return held_.count(page) > 0 || std::count(idle_.begin(), idle_.end(), page) > 0;
    }
    [[nodiscard]] std::int64_t place(Digest page) const {
        return count_held() + (std::find(idle_.begin(), idle_.end(), page) - idle_.begin());
    }
    [[nodiscard]] std::int64_t outside() const {
        std::int64_t n = 0;
        for (const Running* each : live_) n += each->reserved - each->committed;
        return n;
    }
    [[nodiscard]] std::int64_t room() const { return pages_ - outside() - count_held(); }
    void hold(Running& running, Digest page) {
        running.pages.push_back(page);
        if (held_[page]++ > 0) return;
        idle_.erase(std::remove(idle_.begin(), idle_.end(), page), idle_.end());
        const std::int64_t idle = std::max<std::int64_t>(16, 4 * pages_) - count_held();
        if (count(idle_) > idle) idle_.resize(static_cast<std::size_t>(idle));
    }
    [[nodiscard]] std::int64_t count_held() const {
        return static_cast<std::int64_t>(held_.size());
    }
    [[nodiscard]] std::size_t next_of(Digest page, std::size_t from) const {
        while (from < events.size() && events[from].page != page) ++from;
        return from;
    }

    std::int64_t pages_;
    std::map<Digest, int> held_;
    std::vector<Digest> idle_;  // the last released page first
    std::vector<Running*> live_;
};

CacheConfig config_of(std::int64_t pages, EvictionOrder order) {
    CacheConfig config = ManagerFixture::config(kPage, pages);
    config.advice_sample = 1;
    config.eviction.order = order;
    config.partial_page_reuse = 0;
    return config;
}

/// Random requests, several at a time, whose prompts share starts.
class Traffic {
   public:
    Traffic(std::uint64_t seed, std::int64_t pages, EvictionOrder order)
        : random_(seed), order_(order), scene_(config_of(pages, order)), slow_(pages) {}

    void run(int steps) {
        for (int i = 0; i < steps; ++i) {
            const std::int64_t choice = random_.below(4);
            if (running_.empty() || (choice < 2 && running_.size() < 4)) {
                admit();
            } else if (choice == 2) {
                decode(*random_.pick(running_));
            } else {
                release(static_cast<std::size_t>(random_.below(count(running_))));
            }
        }
        while (!running_.empty()) release(0);
        compare();
    }

   private:
    struct Live {
        Request request;
        SlowAdvice::Running slow{};
        bool has_run = false;  // since its last fetch
    };

    Tokens prompt() {
        Tokens tokens(static_cast<std::size_t>(random_.between(2, 4 * kPage + 1)));
        for (TokenId& token : tokens) token = static_cast<TokenId>(random_.below(2));
        return tokens;
    }
    void admit() {
        auto live = std::make_unique<Live>(
            Live{scene_.claim(prompt(), 0, random_.chance(20) ? "other" : "")});
        live->slow.request = &live->request;
        if (!scene_.reserve(live->request)) {
            scene_.manager.release(live->request.sequence);
            return;
        }
        const std::int64_t cached = live->request.start / kPage;
        slow_.admit(live->slow, cached);
        CHECK_EQ(scene_.fetch({&live->request}).status, kvcore::FetchStatus::kOk);
        running_.push_back(std::move(live));
    }
    void step(Live& live) {
        ManagerFixture::sample(live.request, static_cast<TokenId>(random_.below(2)));
        const std::int64_t repeated = scene_.manager.match(
            0, live.request.name_space(), live.request.tokens().data(), live.request.start);
        scene_.commit({&live.request});
        slow_.commit(live.slow, repeated);
        live.has_run = true;
    }
    void decode(Live& live) {
        if (!live.has_run) return step(live);
        if (scene_.fetch({&live.request}).status != kvcore::FetchStatus::kOk) return;
        live.slow.reserved = std::max(live.slow.reserved, (live.request.end() + kPage - 1) / kPage);
        step(live);
    }
    void release(std::size_t i) {
        slow_.release(running_[i]->slow);
        scene_.manager.release(running_[i]->request.sequence);
        running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    void compare() {
        const Advice advice = scene_.manager.advice();
        CHECK_EQ(advice.lost_uses, 0);
        const AdviceTokens& tokens = advice.tenants.at(0);
        const kvcore::Metrics metrics = scene_.manager.metrics();
        // With LRU, the tokens that the cache had correct the estimates.
        const double more = order_ == EvictionOrder::kLru
                                ? static_cast<double>(metrics.cache_tokens) - slow_.found[1]
                                : 0;
        const auto expected = [&](double found) {
            return std::clamp(found + more, 0.0, slow_.use_tokens);
        };
        for (std::size_t i = 0; i < slow_.found.size(); ++i) {
            CHECK_EQ(tokens.found_tokens[i], expected(slow_.found[i]));
        }
        CHECK_EQ(tokens.cached_tokens, metrics.cache_tokens);
        CHECK_EQ(tokens.prompt_tokens, metrics.cache_tokens + metrics.input_tokens);
        CHECK_EQ(tokens.optimum_tokens, expected(static_cast<double>(slow_.optimum())));
    }

    Random random_;
    EvictionOrder order_;
    ManagerFixture scene_;
    SlowAdvice slow_;
    std::vector<std::unique_ptr<Live>> running_;
};

TEST(all_sizes_and_the_optimum_of_random_requests) {
    const std::uint64_t first = check::seed_or(1);
    for (std::uint64_t seed = first; seed < first + 20; ++seed) {
        for (const std::int64_t pages : {12, 17, 40}) {
            for (const EvictionOrder order : {EvictionOrder::kLru, EvictionOrder::kLfu}) {
                Traffic(seed, pages, order).run(300);
            }
        }
    }
}

// ---- the window of time -------------------------------------------------------------------------

constexpr std::int64_t kMinute = 60'000'000'000;  // ns
std::int64_t fake_time = 0;
std::int64_t read_fake_time() { return fake_time; }

/// A cache whose advice reads `fake_time`.
struct TimedScene {
    TimedScene() : cache(config_of(64, EvictionOrder::kLru), nullptr) {
        fake_time = 7 * kMinute;
        cache.advice.reset();
        cache.advice =
            std::make_unique<AdviceLog>(cache.config, cache.replicas, true, read_fake_time);
    }
    /// Run a prompt of 9 tokens, 4 whole pages, and release it.
    void serve(TokenId first) {
        Tokens tokens = count_up(first, 9);
        kvcore::RequestView view{kvcore::verbs::claim(cache, 0), tokens.data(), 0, 9, 9};
        CHECK_EQ(kvcore::verbs::reserve(cache, {&view, 1}, 1, nullptr).status,
                 kvcore::ReserveStatus::kOk);
        tokens.push_back(0);
        view.tokens = tokens.data();
        view.start = 9;
        view.active = view.end = 10;
        std::vector<kvcore::PageSwap> swaps;
        kvcore::verbs::commit(cache, {&view, 1}, swaps, nullptr);
        static_cast<void>(kvcore::verbs::release(cache, view.sequence, nullptr,
                                                 kvcore::ReturnTime::kUnknown, nullptr));
    }
    [[nodiscard]] Advice advice() const { return advise(cache.advice->copy()); }

    kvcore::CacheData cache;
};

TEST(the_window_is_the_last_hour) {
    TimedScene scene;
    scene.serve(0);
    for (int minute = 0; minute < 59; ++minute) {
        fake_time += kMinute;
        scene.serve(0);
        CHECK_EQ(scene.advice().admissions, minute + 2);
        CHECK_EQ(scene.advice().seconds, 60.0 * (minute + 1));
    }
    fake_time += kMinute;  // the first request is an hour old
    CHECK_EQ(scene.advice().admissions, 59);
    CHECK_EQ(scene.advice().seconds, 59 * 60.0);
    CHECK_EQ(scene.advice().tenants[0].found_tokens[1], 59 * 8.0);
    CHECK_EQ(scene.advice().tenants[0].optimum_tokens, 59 * 8.0);
    fake_time += 70 * kMinute;
    CHECK_EQ(scene.advice().admissions, 0);
    CHECK_EQ(scene.advice().tenants[0].prompt_tokens, 0);
    scene.serve(0);  // the cache still has the pages
    CHECK_EQ(scene.advice().admissions, 1);
    CHECK_EQ(scene.advice().tenants[0].found_tokens[1], 8.0);
}

TEST(a_minute_without_requests_takes_no_slice) {
    TimedScene scene;
    for (int i = 0; i < 3; ++i) {
        scene.serve(0);
        fake_time += 25 * kMinute;
    }
    CHECK_EQ(scene.advice().admissions, 2);
    CHECK_EQ(scene.advice().seconds, 50 * 60.0);
}

TEST(many_records_make_the_window_shorter) {
    TimedScene scene;
    constexpr auto kRecords =
        static_cast<std::int64_t>(AdviceLog::kNumSlices * AdviceLog::kSliceRecords);
    constexpr std::int64_t kPerRequest = 8;  // 4 uses and 4 releases
    constexpr std::int64_t kRequests = kRecords / kPerRequest;
    for (std::int64_t i = 0; i < 2 * kRequests; ++i) scene.serve(0);
    const Advice advice = scene.advice();
    CHECK(advice.admissions <= kRequests);
    CHECK(advice.admissions > kRequests * 9 / 10);
    CHECK_EQ(advice.sampled_uses, 4 * advice.admissions);
    CHECK_EQ(advice.tenants[0].prompt_tokens, 9 * advice.admissions);
    CHECK_EQ(advice.tenants[0].optimum_tokens, 8.0 * static_cast<double>(advice.admissions));
}

}  // namespace

}  // namespace tests::observe::advice_log
