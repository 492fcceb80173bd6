// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fakes/simulated_store.hpp"
#include "kvcore/errors.hpp"
#include "oracle/group_oracle.hpp"
#include "support/check.hpp"
#include "support/random.hpp"

/// Random traffic of requests that compute a state, compared with an oracle of each slot's content:
/// the digest of the tokens that the state covers. After a hit, a fork or a truncation, a request's
/// slot must have the state of exactly its tokens, whether the checkpoint was on the device or in
/// the host tier.
class StateWorld {
   public:
    using Probe = kvcore::CacheManagerProbe;

    /// `copies_later`: copies are transfers that end later or fail; otherwise they run in list
    /// order.
    StateWorld(const kvcore::CacheConfig& config, bool copies_later, std::uint64_t seed)
        : manager_(config), oracle_(config), random_(seed), copies_later_(copies_later) {
        live_.reserve(16);
        for (int i = 0; i < 4; ++i) prompts_.push_back(tokens(random_.between(1, 44)));
        const auto slots = static_cast<std::size_t>(config.num_state_slots);
        const auto host_slots = static_cast<std::size_t>(config.num_host_state_slots);
        const auto replicas = static_cast<std::size_t>(config.num_replicas);
        slots_.assign(replicas, std::vector<Digest>(slots, 1));
        host_slots_.assign(replicas, std::vector<Digest>(host_slots, 1));
        for (std::int32_t r = 0; r < config.num_replicas; ++r) tables_.emplace_back(config);
        if (config.has_stores) store_.emplace(manager_, random_, stored_words());
    }
    void operate() {
        if (store_ && random_.chance(30)) {
            use_store();
        } else if (config().host_pages > 0 && random_.chance(6)) {
            crowd_out();
        } else {
            act(random_.below(100));
        }
        check_state();
    }
    [[nodiscard]] const std::optional<SimulatedStore>& store() const { return store_; }
    [[nodiscard]] kvcore::StateStats stats() const {
        kvcore::StateStats sum;
        for (std::int32_t r = 0; r < config().num_replicas; ++r) sum += manager_.state_stats(r);
        return sum;
    }
    void end() {
        hit_.reset();
        while (!open_.empty()) finish(true);
        while (!live_.empty()) drop(live_.back());
        for (const auto& pin : pins_) manager_.unpin(pin);
        pins_.clear();
        if (store_) store_->drain();
        check_state();
        manager_.reset_prefix_cache();
        for (std::int32_t r = 0; r < config().num_replicas; ++r) {
            CHECK_EQ(manager_.stats(r).free_pages, config().num_pages);
            CHECK_EQ(manager_.state_stats(r).available_slots, config().num_state_slots);
            CHECK_EQ(manager_.state_stats(r).checkpoints, 0);
            CHECK_EQ(manager_.stats(r).host_cached_pages, 0);
            CHECK_EQ(manager_.state_stats(r).host_checkpoints, 0);
        }
    }

    std::int64_t num_hits = 0;
    std::int64_t num_checkpoints = 0;
    std::int64_t num_truncated = 0;    // to a checkpoint
    std::int64_t num_refused = 0;      // for lack of a slot
    std::int64_t num_stored = 0;       // checkpoints found in the host tier
    std::int64_t num_lost = 0;         // requests whose loads failed
    std::int64_t num_rejected = 0;     // runs whose last tokens were rejected
    std::int64_t num_rerun_alone = 0;  // runs that were cut after the accepted tokens

   private:
    struct Row {
        Request request;
        std::int32_t replica = 0;
        std::int64_t branch = 0;
        std::int64_t prompt_end = 0;
        std::int64_t stands = 0;   // number of tokens that the slot's state covers
        std::int64_t ran = -1;     // end of the run that is fetched but not committed; -1: none
        bool is_rejected = false;  // the last run went too far: the state is that of its start
    };
    /// The tables of a replica.
    struct Tables {
        static constexpr std::int64_t kRows = 8;
        explicit Tables(const kvcore::CacheConfig& config) : stride(config.max_seq_len + 64) {
            std::int64_t bundles = 0;
            for (const auto& group : config.groups) bundles += group.num_bundles;
            for (std::int64_t b = 0; b < std::max<std::int64_t>(1, bundles); ++b) {
                cells.emplace_back(static_cast<std::size_t>(kRows * stride));
                tables.push_back(
                    std::make_unique<kvcore::LookupTable>(cells.back().data(), kRows, stride, ~0U));
                if (b > 0) more.push_back(tables.back().get());
            }
            lengths.resize(static_cast<std::size_t>(kRows));
            states.resize(static_cast<std::size_t>(kRows));
        }
        [[nodiscard]] kvcore::FetchTarget target() {
            kvcore::FetchTarget target;
            target.table = tables[0].get();
            target.more = more.data();
            target.cache_lengths = lengths.data();
            target.states = states.data();
            return target;
        }
        std::int64_t stride;
        std::vector<std::uint32_t> lengths;
        std::vector<std::int32_t> states;
        std::vector<std::vector<std::uint32_t>> cells;
        std::vector<std::unique_ptr<kvcore::LookupTable>> tables;
        std::vector<kvcore::LookupTable*> more;
    };

    void act(std::int64_t verb) {
        if (verb < 18) return claim();
        if (verb < 56) return step();
        if (verb < 64) return release();
        if (verb < 70) return fork();
        if (verb < 76) return truncate();
        if (verb < 79) return pin();
        if (verb < 82) return hold();
        if (verb < 85) return allocate();
        if (verb < 86) return reset();
        if (verb < 90) return finish(random_.chance(80));
        if (verb < 92) return begin_again();
        if (verb < 94) return set_back();
        if (!live_.empty()) reserve(random_.pick(live_));
    }

    [[nodiscard]] const kvcore::CacheConfig& config() const { return manager_.config(); }
    // Only the states: this world tracks which pages exist, but not their content.
    [[nodiscard]] StoredWords stored_words() {
        StoredWords words;
        words.size = [](std::int32_t part) { return part == kvcore::kStatePart ? 1 : 0; };
        words.word = [this](std::int32_t replica, std::int32_t, BlockId slot,
                            std::int64_t) -> Digest& {
            return item(item(host_slots_, replica), slot);
        };
        words.expected = [](const std::vector<Digest>& ends, std::int32_t, std::int64_t) {
            return ends.back();
        };
        return words;
    }
    void use_store() {
        if (!store_) return;
        auto& store = *store_;
        if (random_.chance(2)) return reset();  // only the store has the pages
        if (random_.chance(50)) return store.write();
        const auto replica = static_cast<std::int32_t>(random_.below(config().num_replicas));
        const std::vector<TokenId> asked = random_.chance(60) ? random_.pick(prompts_) : prompt();
        store.read(replica, Request(random_.chance(10) ? "other" : "", asked));
    }
    void reset() {
        // The oracle cannot describe pages that are held across a reset: a lookup no longer finds
        // them.
        hit_.reset();
        while (!live_.empty()) drop(live_.back());
        for (const auto& pin : pins_) manager_.unpin(pin);
        pins_.clear();
        if (store_) store_->note_reset();
        static_cast<void>(manager_.reset_prefix_cache());
    }
    [[nodiscard]] Cached cached(std::int32_t replica) const {
        return cached_of(manager_, replica, {"", "other"});
    }
    [[nodiscard]] const kvcore::Sequence& sequence(const Row& row) const {
        return Probe::sequence(manager_, row.request.sequence);
    }
    [[nodiscard]] Digest& content(const Row& row) {
        return item(item(slots_, row.replica), manager_.state_of(row.request.sequence));
    }
    kvcore::Transfers* later(kvcore::Transfers& transfers) const {
        return copies_later_ ? &transfers : nullptr;
    }
    std::vector<TokenId> tokens(std::int64_t n) {
        std::vector<TokenId> tokens;
        while (count(tokens) < n) tokens.push_back(static_cast<TokenId>(random_.below(2)));
        return tokens;
    }
    std::vector<TokenId> prompt() {
        std::vector<TokenId> prompt = random_.pick(prompts_);
        prompt.resize(static_cast<std::size_t>(random_.between(1, count(prompt))));
        for (const TokenId token : tokens(random_.below(12))) prompt.push_back(token);
        return prompt;
    }
    [[nodiscard]] std::int64_t page() const { return config().page_size; }

    [[nodiscard]] Cached records(std::int32_t replica) const {
        return records_of(manager_, replica, {"", "other"});
    }
    /// The longest prefix of at most `n` tokens that the device can serve in every group.
    [[nodiscard]] std::int64_t hit_of(const Cached& cached, const Request& request,
                                      std::int64_t n) const {
        return oracle_.state_hit(cached, {}, request, n);
    }
    [[nodiscard]] std::int64_t next_due(const Row& row, std::int64_t start) const {
        std::int64_t due = 1 << 30;
        if (!config().prefix_caching) return due;
        for (std::int64_t n = start + 1; n < 400; ++n) {
            bool is_due = n == row.branch || n == row.prompt_end;
            for (const kvcore::StateGroup& group : config().states) {
                is_due = is_due || (group.interval > 0 && n % group.interval == 0);
            }
            if (is_due) return n;
        }
        return due;
    }

    void claim() {
        if (live_.size() >= 5) return release();
        Row row{Request(random_.chance(10) ? "other" : "", prompt())};
        row.replica = static_cast<std::int32_t>(random_.below(config().num_replicas));
        row.request.sequence = manager_.claim(row.replica);
        if (random_.chance(50)) {
            row.request.active = random_.between(1, row.request.end());
        }
        live_.push_back(row);
    }
    [[nodiscard]] bool reruns_alone(const Row& row) const {
        return row.is_rejected && row.request.start - row.stands > 2 * config().max_draft_tokens;
    }
    [[nodiscard]] bool is_open(const Row& row) const {
        const kvcore::Sequence& known = sequence(row);
        const std::int64_t begin = known.pages.empty() ? 0 : row.request.start;
        return config().prefix_caching && !known.is_sealed() && begin == known.hit_tokens &&
               row.request.active - begin > 1;
    }
    /// The expected effect of a reservation on a row: its context `before`, and how far it runs.
    struct Expected {
        std::int64_t start = 0;
        std::int64_t active = 0;
        bool is_cut = false;
    };
    [[nodiscard]] Expected expect(Row& row, const Cached& before) const {
        const Request& request = row.request;
        const kvcore::Sequence& known = sequence(row);
        const std::int64_t stands = row.is_rejected ? row.stands : request.start;
        const std::int64_t begin = known.pages.empty() ? 0 : stands;
        Expected expected{begin, request.active, false};
        if (!known.is_sealed()) row.prompt_end = (request.end() - 1) / page() * page();
        if (is_open(row)) {
            const std::int64_t most = request.end() - 1;
            const Cached& all = before;
            const auto path = oracle_.path(all, request, most);
            const bool has_namespace = !all.empty() || count(path) > 0;
            const Cached stored = records(row.replica);
            const std::int64_t below = count(oracle_.path(stored, request, most));
            if (has_namespace || below > 0) row.branch = std::max(count(path), below) * page();
            const std::int64_t hit = oracle_.state_hit(all, stored, request, most);
            if (hit > known.hit_tokens) {
                expected.start = hit;
                if (hit >= request.active) {
                    expected.active = std::min(request.end(), hit + request.active - begin);
                }
            }
        }
        std::int64_t due = next_due(row, expected.start);
        if (reruns_alone(row)) due = std::min(due, request.start);
        expected.is_cut = due < expected.active;
        expected.active = std::min(expected.active, due);
        return expected;
    }
    bool reserve(Row& row);
    void check_reserved(Row& row, const kvcore::RequestView& view, const Expected& expected);
    void settle(const kvcore::Transfers& transfers) {
        if (!copies_later_) {
            static_cast<void>(manager_.take_copies());
            return copy(manager_.take_state_copies());
        }
        if (!transfers.empty()) open_.push_back(transfers);
    }
    std::vector<Digest>& slots_of(std::int32_t replica, kvcore::Tier tier) {
        return item(tier == kvcore::Tier::kHost ? host_slots_ : slots_, replica);
    }
    void copy(const std::vector<kvcore::StateMove>& moves, bool done = true) {
        for (const kvcore::StateMove& move : moves) {
            const Digest content = item(slots_of(move.replica, move.source_tier), move.source);
            item(slots_of(move.replica, move.destination_tier), move.destination) =
                done ? content : 2;
        }
    }
    // Run the lists in any order. Some copies then read slots that are not written yet.
    void copy_all(const kvcore::Transfers& transfers, bool done) {
        const bool is_tier_first = random_.chance(50);
        if (is_tier_first) copy(transfers.state_moves, done);
        copy(transfers.state_copies, done);
        if (!is_tier_first) copy(transfers.state_moves, done);
    }
    void finish(bool done) {
        if (open_.empty()) return;
        const std::int64_t i = random_.below(count(open_));
        const kvcore::Transfers transfers = item(open_, i);
        open_.erase(open_.begin() + i);
        copy_all(transfers, done);
        manager_.finish(transfers.ticket, done);
        if (!done) note_lost_loads();
    }
    void note_lost_loads();
    static void note_begun_again(Row& row) {
        row.request.start = row.stands = row.branch = row.prompt_end = 0;
        row.is_rejected = false;
        row.request.active = row.request.end();
    }
    void take_owed(const Row& row) {
        kvcore::Transfers transfers;
        const auto status = manager_.take_owed(row.request.sequence, transfers);
        if (status != kvcore::OwedStatus::kTaken) return;
        copy(transfers.state_copies);
        manager_.finish(transfers.ticket);
    }
    void drop(Row& row) {
        manager_.release(row.request.sequence);
        live_.erase(live_.begin() + (&row - live_.data()));
    }
    void release() {
        if (!live_.empty()) drop(random_.pick(live_));
    }
    void step();
    bool fetch(const std::vector<Row*>& batch, std::int64_t steps);
    void run(Row& row, std::int64_t steps);
    void commit(const std::vector<Row*>& batch);
    void fork();
    void truncate();
    void set_back();
    void begin_again();
    void pin();
    void hold();
    void allocate();
    void crowd_out();
    void check_stored(const Row& row, std::int64_t n);
    void check_state();

    kvcore::CacheManager manager_;
    GroupOracle oracle_;
    Random random_;
    bool copies_later_;
    std::vector<Tables> tables_;
    std::vector<std::vector<TokenId>> prompts_;
    std::vector<std::vector<Digest>> slots_;       // [replicas][slots]
    std::vector<std::vector<Digest>> host_slots_;  // slots of the host tier
    std::vector<Row> live_;
    std::vector<kvcore::PinHandle> pins_;
    std::optional<kvcore::PrefixHit> hit_;
    kvcore::SequenceHandle hit_row_;
    std::vector<kvcore::Transfers> open_;
    std::optional<SimulatedStore> store_;
};

#include "traffic/state_world_checks.hpp"
#include "traffic/state_world_verbs.hpp"
