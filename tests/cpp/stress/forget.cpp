// SPDX-License-Identifier: Apache-2.0
// Pages turn bad, together with the host tier's records of the same tokens, and are forgotten at
// that moment, while copies, loads and stores are in flight. A request that holds a bad page, or to
// which a bad page is being copied, computes wrong results until it is truncated to its last right
// token. Every other request always reads the content of its own tokens. --count: operations.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <set>
#include <vector>

#include "fakes/simulated_memory.hpp"
#include "kvcore/errors.hpp"
#include "traffic/workers.hpp"

namespace tests::stress::forget {

namespace {

constexpr std::int64_t kMaxLive = 8;
constexpr std::int64_t kRight = std::numeric_limits<std::int64_t>::max();

struct Setting {
    bool dedup;
    std::int64_t host_pages;
    kvcore::WritePolicy write_policy = kvcore::WritePolicy::kWriteThrough;
    kvcore::EvictionOrder order = kvcore::EvictionOrder::kLru;
};

kvcore::CacheConfig make_config(const Setting& setting) {
    kvcore::CacheConfig config;
    config.page_size = 4;
    config.num_pages = 60;
    config.max_sequences = kMaxLive;
    config.max_seq_len = 48;
    config.dedup = setting.dedup;
    config.host_pages = setting.host_pages;
    config.write_policy = setting.write_policy;
    config.eviction.order = setting.order;
    return config;
}

kvcore::CacheConfig host_config(kvcore::CacheConfig config) {
    config.num_pages = std::max<std::int64_t>(1, config.host_pages);
    return config;
}

class Engine {
   public:
    Engine(const Setting& setting, std::uint64_t seed)
        : config_(make_config(setting)),
          manager_(config_),
          memory_(config_),
          host_(host_config(config_)),
          random_(seed),
          table_(cells_.data(), kMaxLive, kColumns, ~0U) {
        prompts_ = random_prompts(random_, 4, 30);
    }

    /// Return the number of copies in flight that brought a bad page.
    std::int64_t run(std::int64_t num_operations) {
        for (std::int64_t i = 0; i < num_operations; ++i) {
            act();
            if (random_.chance(10)) manager_.check_integrity();
        }
        finish_all();
        while (!live_.empty()) release();
        for (const kvcore::PinHandle& pin : pins_) manager_.unpin(pin);
        holds_.clear();
        exports_.clear();
        manager_.check_integrity();
        manager_.reset_prefix_cache();
        manager_.check_integrity();
        CHECK_EQ(manager_.stats(0).free_pages, config_.num_pages);
        CHECK_EQ(manager_.stats(0).host_cached_pages, 0);
        CHECK(num_bad_ > 0 && num_mended_ > 0);
        std::printf("%lld pages went bad, %lld copies brought one, %lld requests were mended\n",
                    static_cast<long long>(num_bad_), static_cast<long long>(num_late_),
                    static_cast<long long>(num_mended_));
        return num_late_;
    }

   private:
    static constexpr std::int64_t kColumns = 16;

    struct Live {
        Request request{"", {}};
        std::int64_t right = kRight;  // tokens before the first wrong token
        bool may_bring = false;       // a copy in flight to it may be wrong
    };
    struct Owed {
        kvcore::Transfers transfers;
        Live* live;  // nullptr: the request has ended, or there are several
    };

    void act() {
        const std::int64_t dice = random_.below(1000);
        if (live_.empty() || (dice < 150 && count(live_) < kMaxLive)) return claim();
        if (dice < 300) return reserve(*random_.pick(live_));
        if (dice < 560) return step();
        if (dice < 640) return release();
        if (dice < 700) return forget();
        if (dice < 760) return mend();
        if (dice < 800) return finish_one();
        if (dice < 850) return fork(*random_.pick(live_));
        if (dice < 880) return cut(*random_.pick(live_));
        if (dice < 930) return pin_or_unpin();
        if (dice < 970) return hold_or_let_go();
        if (dice < 985) return export_or_end();
        reset();
    }

    // A page that is only held or copied does not keep the pages before it in the cache.
    void reset() {
        for (const kvcore::PinHandle& pin : pins_) manager_.unpin(pin);
        pins_.clear();
        manager_.reset_prefix_cache();
        manager_.check_integrity();
        std::set<BlockId> held;
        for (const auto& live : live_) {
            const std::vector<BlockId> row = manager_.pages_of(live->request.sequence);
            held.insert(row.begin(), row.end());
        }
        CHECK(manager_.stats(0).cached_pages <= static_cast<std::int64_t>(held.size()));
    }

    void claim() {
        auto live = std::make_unique<Live>();
        live->request = Request("", prompt_like(prompts_, random_));
        live->request.sequence = manager_.claim();
        live_.push_back(std::move(live));
    }

    // ---- copies, now or later
    void take(kvcore::Transfers& transfers, Live* live) {
        if (transfers.ticket == 0) return;
        owed_.push_back({std::move(transfers), live});
        transfers = {};
    }
    void finish_one() {
        if (owed_.empty()) return;
        const auto index = static_cast<std::size_t>(random_.below(count(owed_)));
        Owed owed = std::move(owed_[index]);
        owed_.erase(owed_.begin() + static_cast<std::ptrdiff_t>(index));
        for (const kvcore::PageMove& copy : owed.transfers.copies) memory_.copy(copy);
        for (const kvcore::PageMove& copy : owed.transfers.tier_moves) {
            Digest* here = memory_.page(copy.replica, copy.page_in(kvcore::Tier::kDevice));
            Digest* below = host_.page(copy.replica, copy.page_in(kvcore::Tier::kHost));
            if (copy.is_load()) std::swap(here, below);
            std::copy(here, here + config_.page_size, below);
        }
        manager_.finish(owed.transfers.ticket, true);
        if (owed.live == nullptr || !owed.live->may_bring) return;
        owed.live->may_bring = false;
        look_for_wrong(*owed.live);
        num_late_ += owed.live->right == kRight ? 0 : 1;
    }
    void finish_all() {
        while (!owed_.empty()) finish_one();
    }
    void forget_owed(const Live& live) {
        for (Owed& owed : owed_) {
            if (owed.live == &live) owed.live = nullptr;
        }
    }
    bool is_owed(const Live& live) const {
        return std::any_of(owed_.begin(), owed_.end(),
                           [&](const Owed& owed) { return owed.live == &live; });
    }

    void reserve(Live& live) {
        if (is_owed(live)) return;
        kvcore::RequestView view = live.request.view();
        kvcore::Transfers transfers;
        const bool fits = manager_.reserve(view, 1, &transfers) == kvcore::ReserveStatus::kOk;
        live.request.start = view.start;
        live.request.active = view.active;
        take(transfers, fits ? &live : nullptr);
        if (!fits) finish_all();
        if (!fits) release();
    }

    void step() {
        finish_all();
        for (;;) {
            std::vector<kvcore::RequestView> views = views_of_all();
            kvcore::FetchTarget target;
            target.table = &table_;
            target.cache_lengths = lengths_.data();
            kvcore::Transfers transfers;
            const auto status =
                manager_.fetch({views.data(), count(views)}, 1, &target, &transfers).status;
            for (std::size_t i = 0; i < live_.size(); ++i) {
                live_[i]->request.start = views[i].start;
                live_[i]->request.active = views[i].active;
            }
            take(transfers, nullptr);
            finish_all();
            if (status == kvcore::FetchStatus::kPending) continue;
            if (status != kvcore::FetchStatus::kOk) return release();
            break;
        }
        for (std::size_t i = 0; i < live_.size(); ++i) run_one(*live_[i]);
        std::vector<kvcore::RequestView> views = views_of_all();
        std::vector<kvcore::PageSwap> swaps;
        kvcore::Transfers transfers;
        manager_.commit({views.data(), count(views)}, swaps, &transfers);
        take(transfers, nullptr);
        for (std::size_t i = live_.size(); i-- > 0;) {
            if (live_[i]->request.end() + 2 > config_.max_seq_len) release(i);
        }
    }
    std::vector<kvcore::RequestView> views_of_all() const {
        std::vector<kvcore::RequestView> views;
        for (const auto& live : live_) views.push_back(live->request.view());
        return views;
    }

    // A result that is computed from a wrong token is wrong.
    void run_one(Live& live) {
        Request& request = live.request;
        const std::vector<BlockId> row = manager_.pages_of(request.sequence);
        memory_.check_contents(0, row, request, std::min(request.start, live.right));
        memory_.write(0, row, request, request.start, request.active);
        for (std::int64_t i = request.start; live.right < kRight && i < request.active; ++i) {
            memory_.page(0, item(row, i / 4))[i % 4] ^= kBad;
        }
        request.start = request.active;
        if (request.active == request.end()) {
            request.append(static_cast<TokenId>(random_.below(3)));
        }
        request.active = request.end();
    }

    void release() { release(static_cast<std::size_t>(random_.below(count(live_)))); }
    void release(std::size_t index) {
        forget_owed(*live_[index]);
        manager_.release(live_[index]->request.sequence);
        live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(index));
    }

    void fork(const Live& parent) {
        if (count(live_) >= kMaxLive || parent.request.end() + 4 > config_.max_seq_len) return;
        auto child = std::make_unique<Live>();
        child->request = parent.request;
        child->right = parent.right;
        child->request.append(static_cast<TokenId>(random_.below(3)));
        kvcore::RequestView view = child->request.view();
        try {
            manager_.fork(parent.request.view(), {&view, 1});
        } catch (const kvcore::PendingTransfersError&) {
            return;
        }
        child->request.sequence = view.sequence;
        child->request.start = view.start;
        child->request.active = view.active;
        if (view.start <= child->right) child->right = kRight;
        live_.push_back(std::move(child));
    }

    void cut(Live& live) { cut_to(live, random_.between(0, live.request.start)); }
    void cut_to(Live& live, std::int64_t n) {
        try {
            manager_.truncate(live.request.sequence, n);
        } catch (const std::invalid_argument&) {
            return;  // not fetched yet
        } catch (const kvcore::PendingTransfersError&) {
            return;
        }
        live.request.rewind(std::max<std::int64_t>(n, 1));
        live.request.start = std::min(live.request.start, n);
        if (n <= live.right) live.right = kRight;
    }
    // Truncate to the last right token, or to the start of its page: then it may be cached again.
    void mend() {
        for (auto& live : live_) {
            if (live->right == kRight || live->right > live->request.start) continue;
            const std::int64_t n = live->right - (random_.chance(50) ? live->right % 4 : 0);
            cut_to(*live, n);
            num_mended_ += live->right == kRight ? 1 : 0;
            return;
        }
    }

    // ---- bad pages
    void forget() {
        const Live& live = *random_.pick(live_);
        std::vector<BlockId> pages = manager_.pages_of(live.request.sequence);
        if (random_.chance(50)) {
            const std::vector<TokenId> tokens = prompt_like(prompts_, random_);
            static_cast<void>(manager_.match(0, "", tokens.data(), count(tokens), &pages));
        }
        if (pages.empty()) return;
        const BlockId page = random_.pick(pages);
        if (manager_.forget(0, &page, 1) == 0) return;  // not cached
        ++num_bad_;
        const std::int64_t before = live.right;
        const Digest was = memory_.page(0, page)[3];  // represents all tokens up to here
        spoil(memory_.page(0, page));
        for (std::int64_t i = 0; i < config_.host_pages; ++i) {
            Digest* below = host_.page(0, static_cast<BlockId>(i));
            if (below[3] == was) spoil(below);
        }
        for (auto& each : live_) {
            if (is_owed(*each)) each->may_bring = true;
            const std::vector<BlockId> row = manager_.pages_of(each->request.sequence);
            if (std::find(row.begin(), row.end(), page) != row.end()) look_for_wrong(*each);
        }
        const std::vector<TokenId>& tokens = live.request.tokens();
        if (live.right < before) {
            CHECK(manager_.match(0, "", tokens.data(), live.right + 4) <= live.right / 4);
        }
    }
    void spoil(Digest* page) {
        for (std::int64_t i = 0; i < config_.page_size; ++i) page[i] ^= kBad;
    }
    void look_for_wrong(Live& live) {
        const std::vector<BlockId> row = manager_.pages_of(live.request.sequence);
        for (std::int64_t i = 0; i < std::min(live.request.start, live.right); ++i) {
            const Digest found = memory_.page(0, item(row, i / 4))[i % 4];
            if (found != live.request.contents()[i]) live.right = i;
        }
    }

    void pin_or_unpin() {
        if (pins_.size() >= 2 || (!pins_.empty() && random_.chance(60))) {
            manager_.unpin(pins_.back());
            return pins_.pop_back();
        }
        const std::vector<TokenId> tokens = prompt_like(prompts_, random_);
        pins_.push_back(manager_.pin(0, "", tokens.data(), count(tokens)));
    }
    void hold_or_let_go() {
        if (holds_.size() >= 2 || (!holds_.empty() && random_.chance(60))) {
            return void(holds_.erase(holds_.begin()));
        }
        std::vector<BlockId> pages = manager_.pages_of(random_.pick(live_)->request.sequence);
        while (!pages.empty() && random_.chance(70)) pages.pop_back();
        holds_.push_back(manager_.hold(0, pages.data(), count(pages)));
    }
    void export_or_end() {
        if (exports_.size() >= 2) return void(exports_.erase(exports_.begin()));
        const std::vector<TokenId> tokens = prompt_like(prompts_, random_);
        kvcore::ColumnSpan span;
        span.num_resets = manager_.num_resets();
        span.tokens = tokens.data();
        span.n = count(tokens) / config_.page_size * config_.page_size;
        span.first = static_cast<std::int32_t>(random_.below(2));
        if (span.n > span.first * std::int64_t{config_.page_size}) {
            exports_.push_back(manager_.export_columns(span));
        }
    }

    static constexpr Digest kBad = 1;

    const kvcore::CacheConfig config_;
    kvcore::CacheManager manager_;
    SimulatedMemory memory_;
    SimulatedMemory host_;
    Random random_;
    std::vector<std::uint32_t> cells_ = std::vector<std::uint32_t>(kMaxLive * kColumns);
    std::vector<std::uint32_t> lengths_ = std::vector<std::uint32_t>(kMaxLive);
    kvcore::LookupTable table_;
    std::vector<std::vector<TokenId>> prompts_;
    std::vector<std::unique_ptr<Live>> live_;
    std::vector<Owed> owed_;
    std::vector<kvcore::PinHandle> pins_;
    std::vector<kvcore::HeldPages> holds_;
    std::vector<kvcore::CacheExport> exports_;
    std::int64_t num_bad_ = 0;
    std::int64_t num_late_ = 0;
    std::int64_t num_mended_ = 0;
};

TEST(forgotten_pages_are_read_by_nobody) {
    const std::uint64_t seed = check::seed_or(26);
    const std::int64_t operations = check::count_or(20'000);
    const std::vector<Setting> settings{
        {true, 0},
        {false, 0},
        {true, 90},
        {false, 30},
        {true, 90, kvcore::WritePolicy::kWriteBack},
        {true, 90, kvcore::WritePolicy::kSelective, kvcore::EvictionOrder::kArc},
    };
    std::int64_t num_late = 0;
    for (std::size_t i = 0; i < settings.size(); ++i) {
        check::note = "setting " + std::to_string(i);
        num_late += Engine(settings[i], seed + i).run(operations);
    }
    CHECK(num_late > 0);
}

}  // namespace

}  // namespace tests::stress::forget
