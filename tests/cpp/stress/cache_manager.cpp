// SPDX-License-Identifier: Apache-2.0
// A random engine runs CacheManager next to its oracle: more than 10^6 calls over many
// configurations, with every result compared and page contents simulated. --count: calls.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "traffic/checked_fetch.hpp"

namespace tests::stress::cache_manager {

namespace {

struct Setting {
    kvcore::CacheConfig config;
    std::int64_t vocabulary = 3;  // small: prompts diverge inside pages and meet again
    int num_namespaces = 1;
    bool copies_at_once = false;
    bool compares_always = true;  // else rarely: lazy counts stay unsettled longer
};

/// An engine that decides everything at random: it admits, runs, preempts and retires requests.
class RandomEngine {
   public:
    RandomEngine(const Setting& setting, std::uint64_t seed)
        : setting_(setting), random_(seed), checked_(setting.config, setting.copies_at_once) {
        for (int i = 0; i < 6; ++i) {
            prompts_.push_back(random_tokens(random_.between(1, setting.config.max_seq_len)));
        }
    }

    void run(std::int64_t num_calls) {
        std::int64_t next_check = kCallsPerCheck;
        while (checked_.num_calls() < num_calls) {
            check::note = name_ + " call " + std::to_string(checked_.num_calls());
            act();
            if (setting_.compares_always || random_.chance(6)) checked_.compare();
            if (checked_.num_calls() >= next_check) {
                checked_.check_integrity();
                next_check += kCallsPerCheck;
            }
        }
        finish();
    }
    void set_name(const std::string& name) { name_ = name; }

   private:
    static constexpr std::int64_t kCallsPerCheck = 500;
    static constexpr std::size_t kMaxPins = 5;
    using Batch = CheckedEngine::Batch;

    std::vector<TokenId> random_tokens(std::int64_t n) {
        std::vector<TokenId> tokens;
        for (std::int64_t i = 0; i < n; ++i) tokens.push_back(random_token());
        return tokens;
    }
    // Token ids are opaque: some are negative, some are large.
    TokenId random_token() {
        const std::int64_t token = random_.below(setting_.vocabulary);
        if (token == 1) return -1;
        if (token == 2) return INT32_MIN;
        return static_cast<TokenId>(token * 65537);
    }

    void act() {
        const std::int64_t dice = random_.below(1000);
        if (dice < 120 || live_.empty()) return admit();
        if (dice < 280) return reserve();
        if (dice < 560) return step();
        if (dice < 590) return fork();
        if (dice < 620) return speculate();
        if (dice < 660) return commit_some();
        if (dice < 700) return retire(random_.chance(70));
        if (dice < 740) return void(checked_.plan(*random_.pick(live_), random_steps()));
        if (dice < 800) return look_up();
        if (dice < 850) return pin_or_unpin();
        if (dice < 870) return checked_.shared_prefixes(random_batch(CheckedEngine::kMaxRows));
        if (dice < 874) return checked_.reset();
        if (dice < 876) return checked_.reset_metrics();
        if (dice < 960) return change(*random_.pick(live_));
        if (dice < 990) return settle_copies();
        make_mistake();
    }

    // ---- start and end of requests --------------------------------------------------------
    void admit() {
        const auto replica = static_cast<std::int32_t>(random_.below(setting_.config.num_replicas));
        if (checked_.oracle().num_sequences(replica) >= setting_.config.max_sequences) {
            CHECK_THROWS(kvcore::CapacityError, checked_.manager().claim(replica));
            return;
        }
        std::unique_ptr<Request> request;
        if (!preempted_.empty() && random_.chance(40)) {
            request = std::move(preempted_.front());  // keeps the indices from its preemption
            preempted_.pop_front();
        } else {
            request = new_request();
        }
        checked_.claim(*request, replica);
        live_.push_back(std::move(request));
    }

    // Most requests share a prefix with another request.
    std::unique_ptr<Request> new_request() {
        std::vector<TokenId> tokens = random_.pick(prompts_);
        const std::int64_t longest = setting_.config.max_seq_len - 1;
        tokens.resize(static_cast<std::size_t>(
            random_.between(1, std::min<std::int64_t>(count(tokens), longest))));
        const std::int64_t tail =
            random_.chance(50) ? 0 : random_.below(2 * setting_.config.page_size + 2);
        for (std::int64_t i = 0; i < tail && count(tokens) < longest; ++i) {
            tokens.push_back(random_token());
        }
        const std::int64_t name = random_.below(setting_.num_namespaces);
        auto request = std::make_unique<Request>(
            name == 0 ? std::string() : std::string(static_cast<std::size_t>(name), 'n'), tokens);
        if (random_.chance(30)) request->active = random_.between(1, request->end());
        return request;
    }

    void retire(bool is_done) {
        const auto index = static_cast<std::size_t>(random_.below(count(live_)));
        std::unique_ptr<Request> request = std::move(live_[index]);
        live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(index));
        checked_.release(*request);
        if (random_.chance(20)) random_.pick(prompts_) = request->tokens();
        if (!is_done) preempted_.push_back(std::move(request));
        if (preempted_.size() > 4) preempted_.pop_front();
    }

    Batch random_batch(std::int64_t most) {
        Batch batch;
        for (const auto& request : live_) batch.push_back(request.get());
        for (std::int64_t i = count(batch); i > 1; --i) {
            std::swap(item(batch, i - 1), item(batch, random_.below(i)));
        }
        const std::int64_t size = random_.between(1, std::min(most, count(batch)));
        batch.resize(static_cast<std::size_t>(size));
        return batch;
    }
    std::int64_t random_steps() { return random_.chance(75) ? 1 : random_.between(2, 5); }

    // ---- serving --------------------------------------------------------------------------
    void reserve() {
        const Batch batch = random_batch(random_.chance(60) ? 1 : 4);
        const std::int64_t num_steps = random_steps();
        std::optional<kvcore::ReservePlan> plan;
        if (setting_.compares_always || random_.chance(30)) {
            plan = checked_.plan(*batch[0], num_steps);
        }
        const std::int64_t done = checked_.reserve(batch, num_steps, plan);
        if (done < count(batch) && random_.chance(50)) retire(random_.chance(50));
    }

    void step() {
        const Batch batch = random_batch(random_.chance(30) ? 1 : CheckedEngine::kMaxRows);
        const std::int64_t num_steps = random_steps();
        const auto set = static_cast<std::size_t>(random_.below(CheckedEngine::kTableSets));
        if (!checked_.fetch(batch, num_steps, set, random_.chance(5))) {
            return retire(random_.chance(50));
        }
        if (random_.chance(5)) return;  // fetched, but never run
        for (std::int64_t k = 0; k < num_steps; ++k) {
            checked_.run(batch);
            for (Request* request : batch) update(*request);
        }
        if (random_.chance(80)) checked_.commit(batch);
    }

    // The tokens up to `active` are written: run the rest of the prompt or the sampled token.
    void update(Request& request) {
        request.start = request.active;
        if (request.active == request.end()) request.append(random_token());
        const bool is_chunk = random_.chance(30);
        request.active =
            is_chunk ? random_.between(request.start + 1, request.end()) : request.end();
    }

    // Run drafts, accept some of them, and sample the next token after the accepted drafts.
    void speculate() {
        Request& request = *random_.pick(live_);
        for (std::int64_t i = random_.between(1, 4); i > 0; --i) request.append(random_token());
        request.active = request.end();
        const auto set = static_cast<std::size_t>(random_.below(CheckedEngine::kTableSets));
        if (!checked_.fetch({&request}, random_steps(), set, false)) return;
        checked_.run({&request});
        const std::int64_t accepted = random_.between(request.start + 1, request.end());
        if (random_.chance(20)) fork();  // from the state before the drafts
        checked_.truncate(request, accepted);
        request.rewind(accepted);
        if (random_.chance(90)) update(request);
        if (random_.chance(80)) checked_.commit({&request});
    }

    // Fork a request up to three times after its written tokens.
    void fork() {
        const Request& parent = *random_.pick(live_);
        std::vector<std::unique_ptr<Request>> forks;
        Batch children;
        for (std::int64_t i = random_.between(1, 3); i > 0; --i) {
            forks.push_back(new_fork(parent));
            children.push_back(forks.back().get());
        }
        const std::int32_t replica = checked_.oracle().claim_of(parent).replica;
        if (checked_.oracle().num_sequences(replica) + count(forks) >
            setting_.config.max_sequences) {
            std::vector<kvcore::RequestView> views;
            for (const auto& child : forks) views.push_back(child->view());
            CHECK_THROWS(kvcore::CapacityError,
                         checked_.manager().fork(parent.view(), {views.data(), count(views)}));
            return;
        }
        checked_.fork(parent, children);
        for (auto& child : forks) live_.push_back(std::move(child));
    }
    std::unique_ptr<Request> new_fork(const Request& parent) {
        std::vector<TokenId> tokens = parent.tokens();
        const std::int64_t written = checked_.oracle().written(parent);
        tokens.resize(static_cast<std::size_t>(random_.between(written, parent.end())));
        const std::int64_t tail = random_.below(3) + (count(tokens) == written ? 1 : 0);
        for (std::int64_t i = 0; i < tail; ++i) tokens.push_back(random_token());
        auto child = std::make_unique<Request>(parent.name_space(), tokens);
        child->active = random_.between(1, child->end());
        return child;
    }

    void commit_some() {
        Batch batch;
        for (Request* request : random_batch(4)) {
            const std::int64_t room =
                checked_.oracle().claim_of(*request).num_pages() * setting_.config.page_size;
            if (request->start <= room) batch.push_back(request);
        }
        checked_.commit(batch);
    }

    // Change a request as an engine does between calls.
    void change(Request& request) {
        const std::int64_t dice = random_.below(100);
        const bool is_reserved = checked_.oracle().claim_of(request).num_pages() > 0;
        if (dice < 30) {
            request.active = random_.between(request.start + 1, request.end());
        } else if (dice < 55) {
            for (std::int64_t i = random_.between(1, 4); i > 0; --i) request.append(random_token());
            request.active = request.end();
        } else if (dice < 75) {
            request.rewind(random_.between(1, request.end()));
        } else if (dice < 85) {
            cut(request);
        } else if (is_reserved) {
            request.start = random_.between(0, request.start);  // to be written once more
        }
    }

    // Truncate written tokens. If fewer tokens can be kept, the call is refused.
    void cut(Request& request) {
        const std::int64_t n = random_.between(0, request.active + (random_.chance(10) ? 9 : 0));
        const bool is_done = n <= checked_.oracle().most_kept(request);
        checked_.truncate(request, n);
        if (is_done) request.rewind(std::min(std::max<std::int64_t>(n, 1), request.end()));
    }

    // ---- matches, pins, copies -------------------------------------------------------------
    void look_up() {
        const Request& request = *random_.pick(live_);
        checked_.match(random_replica(), request, random_.between(0, request.end()));
    }
    std::int32_t random_replica() {
        return static_cast<std::int32_t>(random_.below(setting_.config.num_replicas));
    }

    void pin_or_unpin() {
        if (pins_.size() >= kMaxPins || (!pins_.empty() && random_.chance(50))) {
            std::swap(random_.pick(pins_), pins_.back());
            checked_.unpin(pins_.back());
            pins_.pop_back();
            return;
        }
        const Request& request = *random_.pick(live_);
        pins_.push_back(checked_.pin(random_replica(), request, random_.between(0, request.end())));
    }

    void settle_copies() {
        if (random_.chance(30)) checked_.copies().do_copies();
        if (random_.chance(30)) checked_.copies().take();
    }

    // ---- wrong calls ----------------------------------------------------------------------
    // The manager refuses each wrong call. The next comparison then finds any effect of it.
    void make_mistake() {
        kvcore::CacheManager& manager = checked_.manager();
        const Request& first = *random_.pick(live_);
        const Request& request = *random_.pick(live_);
        if (!checked_.oracle().can_ever_fit(first, 1)) return;
        std::vector<kvcore::RequestView> batch{first.view(), request.view()};
        std::vector<kvcore::PageSwap> swaps;
        kvcore::RequestView& wrong = batch[1];
        switch (random_.below(5)) {
            case 0:
                wrong.sequence.generation += 7;
                CHECK_THROWS(kvcore::RequestNotFoundError,
                             manager.reserve_batch({batch.data(), 2}));
                CHECK_THROWS(kvcore::RequestNotFoundError, manager.commit({&wrong, 1}, swaps));
                break;
            case 1:
                wrong = batch[0];
                CHECK_THROWS(std::invalid_argument, manager.reserve_batch({batch.data(), 2}));
                break;
            case 2:
                wrong.start = wrong.active;
                CHECK_THROWS(std::invalid_argument, manager.reserve_batch({batch.data(), 2}));
                CHECK_THROWS(std::invalid_argument, manager.plan(wrong));
                break;
            case 3:
                wrong.start =
                    count(manager.pages_of(request.sequence)) * setting_.config.page_size + 1;
                wrong.active = wrong.end = wrong.start + 1;
                CHECK_THROWS(std::invalid_argument, manager.commit({&wrong, 1}, swaps));
                break;
            default:
                CHECK_THROWS(std::invalid_argument, manager.reserve_batch({batch.data(), 2}, 0));
                CHECK_THROWS(std::out_of_range, manager.claim(setting_.config.num_replicas));
        }
    }

    void finish() {
        checked_.check_integrity();
        while (!live_.empty()) retire(true);
        for (const CheckedEngine::Pin& pin : pins_) checked_.unpin(pin);
        checked_.compare();
        checked_.reset();
        checked_.compare();
        for (std::int32_t i = 0; i < setting_.config.num_replicas; ++i)
            CHECK_EQ(checked_.manager().stats(i).free_pages, setting_.config.num_pages);
        checked_.check_integrity();
    }

    Setting setting_;
    Random random_;
    CheckedEngine checked_;
    std::string name_;
    std::vector<std::vector<TokenId>> prompts_;
    std::vector<std::unique_ptr<Request>> live_;
    std::deque<std::unique_ptr<Request>> preempted_;
    std::vector<CheckedEngine::Pin> pins_;
};

std::vector<Setting> settings() {
    std::vector<Setting> all;
    for (const std::int32_t page_size : {1, 2, 3, 16, 128}) {
        for (int variant = 0; variant < 6; ++variant) {
            Setting setting;
            kvcore::CacheConfig& config = setting.config;
            config.page_size = page_size;
            config.num_pages = std::vector<std::int64_t>{
                24, 10, 60, 40, 16, 120}[static_cast<std::size_t>(variant)];
            config.max_sequences = variant == 5 ? 20 : 6;
            config.max_seq_len = (page_size < 16 ? 12 : 5) * page_size + (variant % 3);
            config.num_replicas = variant % 3 == 1 ? 2 : 1;
            config.dedup = variant % 2 == 0;
            config.partial_page_reuse = variant == 3 ? 0 : variant == 4 ? 2 : 1;
            setting.vocabulary =
                std::vector<std::int64_t>{3, 2, 40, 3, 5, 400}[static_cast<std::size_t>(variant)];
            if (variant == 2) setting.num_namespaces = 3;
            setting.copies_at_once = variant % 2 == 1;
            setting.compares_always = variant != 2 && variant != 5;
            all.push_back(setting);
        }
    }
    Setting uncached;
    uncached.config.page_size = 4;
    uncached.config.num_pages = 20;
    uncached.config.max_sequences = 6;
    uncached.config.max_seq_len = 40;
    uncached.config.prefix_caching = false;
    all.push_back(uncached);
    return all;
}

TEST(random_calls_agree_with_the_oracle) {
    const std::uint64_t seed = check::seed_or(20240607);
    const std::int64_t calls = check::count_or(1'010'000);
    const std::vector<Setting> all = settings();
    for (std::size_t i = 0; i < all.size(); ++i) {
        RandomEngine engine(all[i], seed + i);
        engine.set_name("setting " + std::to_string(i) + ", page size " +
                        std::to_string(all[i].config.page_size) + ",");
        engine.run(calls / count(all) + 1);
    }
    std::printf("%lld calls over %zu configurations agree with the oracle\n",
                static_cast<long long>(calls), all.size());
}

}  // namespace

}  // namespace tests::stress::cache_manager
