// SPDX-License-Identifier: Apache-2.0
// Random traffic of a manager. For each of its calls, the traffic is repeated up to the call, and
// memory runs out in the call.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/failing_scene.hpp"

namespace tests::faults::traffic {

using failing_memory::Failing;

namespace {

enum class Verb {
    kReserve,
    kFetch,
    kCommit,
    kFork,
    kTruncate,
    kRelease,
    kBeginAgain,
    kPin,
    kUnpin,
    kReset,
    kFinish,
    kTakeOwed,
    kClaim,
    kResetMetrics,
};

/// Traffic from a seed. `prepare` chooses the next call, `call` makes it, and `settle` updates the
/// scene with its result. Each fetched step has run before the next call.
class Traffic {
   public:
    Traffic(std::uint64_t seed, const Mode& mode) : scene(mode, 14), random_(seed) {}

    ManagerScene scene;
    Verb verb = Verb::kClaim;

    void step() {
        prepare();
        call();
        settle();
    }

    void prepare() {
        const std::vector<std::size_t> live = live_requests();
        verb = live.size() < 2 ? Verb::kClaim : random_.pick(verbs_);
        std::vector<std::size_t> rows;
        for (const std::size_t i : live) {
            const bool has_run = verb == Verb::kCommit;
            if (has_run ? is_fetched(i) : random_.chance(60)) rows.push_back(i);
        }
        if (rows.empty()) rows.push_back(live.empty() ? 0 : live[0]);
        const std::size_t first = rows[0];
        switch (verb) {
            case Verb::kClaim:
                rows = {scene.add(prompt(), random_.chance(70) ? "" : "tenant")};
                replica_ = static_cast<std::int32_t>(random_.below(2));
                break;
            case Verb::kFork:
                if (scene.at(first).start == 0 || live.size() > 6) verb = Verb::kTakeOwed;
                rows = {first};
                if (verb != Verb::kFork) break;
                scene.parent = scene.at(first).view();
                rows = {scene.child_of(first, prompt()), scene.child_of(first, {1})};
                break;
            case Verb::kCommit:
                for (const std::size_t i : rows) {
                    if (is_fetched(i)) scene.sample(i, token());
                }
                break;
            case Verb::kTruncate:
                length_ = random_.below(scene.at(first).start + 1);
                rows = {first};
                break;
            case Verb::kReserve:
            case Verb::kRelease:
            case Verb::kBeginAgain:
            case Verb::kTakeOwed:
                rows = {first};
                break;
            default:
                break;
        }
        finished_ = scene.open_tickets.empty() ? 0 : random_.pick(scene.open_tickets);
        is_done_ = random_.chance(70);
        scene.choose(rows);
        scene.pins.reserve(scene.pins.size() + 1);
    }

    /// The test code itself allocates nothing here.
    void call() {
        kvcore::CacheManager& manager = scene.manager;
        const kvcore::SequenceHandle sequence = scene.views[0].sequence;
        try {
            switch (verb) {
                case Verb::kClaim:
                    scene.views[0].sequence = manager.claim(replica_);
                    break;
                case Verb::kReserve:
                    scene.call_reserve();
                    break;
                case Verb::kFetch:
                    scene.call_fetch();
                    break;
                case Verb::kCommit:
                    scene.call_commit();
                    break;
                case Verb::kFork:
                    scene.call_fork();
                    break;
                case Verb::kTruncate:
                    manager.truncate(sequence, length_);
                    scene.answer[1] = length_;
                    break;
                case Verb::kRelease:
                    manager.release(sequence);
                    break;
                case Verb::kBeginAgain:
                    manager.begin_again(sequence);
                    scene.views[0].start = 0;
                    break;
                case Verb::kPin:
                    scene.pins.push_back(manager.pin(0, scene.views[0].name_space,
                                                     scene.views[0].tokens, scene.views[0].end));
                    break;
                case Verb::kUnpin:
                    if (scene.pins.empty()) break;
                    manager.unpin(scene.pins.back());
                    scene.pins.pop_back();
                    break;
                case Verb::kReset:
                    manager.reset_prefix_cache();
                    break;
                case Verb::kFinish:
                    if (finished_ != 0) manager.finish(finished_, is_done_);
                    is_finished = true;
                    break;
                case Verb::kTakeOwed:
                    scene.answer[0] =
                        static_cast<std::int64_t>(manager.take_owed(sequence, scene.transfers));
                    break;
                case Verb::kResetMetrics:
                    manager.reset_metrics();
                    break;
            }
        } catch (const kvcore::Error&) {
            scene.answer[0] = -2;
        } catch (const std::invalid_argument&) {
            scene.answer[0] = -3;
        }
    }

    /// Does the caller's work after the call.
    void settle() {
        scene.take_over();
        forget_finished();
        const auto status = static_cast<kvcore::FetchStatus>(scene.answer[0]);
        fetched_.resize(scene.requests.size());
        if (verb == Verb::kFetch && status == kvcore::FetchStatus::kOk) {
            for (const std::size_t i : scene.rows) fetched_[i] = true;
        } else if (verb == Verb::kCommit || verb == Verb::kTruncate || verb == Verb::kBeginAgain) {
            for (const std::size_t i : scene.rows) fetched_[i] = false;
        }
        if (verb == Verb::kTruncate && scene.answer[1] >= 0) {
            scene.at(scene.rows[0]).rewind(scene.answer[1] + 1);
        }
        if (scene.transfers.ticket != 0) {
            scene.open_tickets.push_back(scene.transfers.ticket);
            moved_.push_back(scene.transfers);
            scene.transfers.clear();
        }
        scene.forget_call();
        is_finished = false;
    }

    /// Returns all observable state. May be called only once.
    [[nodiscard]] std::string text() {
        forget_finished();
        return ManagerText(scene).of_all();
    }

    bool is_finished = false;

   private:
    [[nodiscard]] bool is_fetched(std::size_t i) const {
        return i < fetched_.size() && fetched_[i];
    }
    [[nodiscard]] std::vector<std::size_t> live_requests() {
        std::vector<std::size_t> live;
        for (std::size_t i = 0; i < scene.requests.size(); ++i) {
            if (scene.manager.contains(scene.at(i).sequence)) live.push_back(i);
        }
        std::vector<std::size_t> some;
        while (!live.empty()) {
            const auto k = random_.below(static_cast<std::int64_t>(live.size()));
            some.push_back(live[static_cast<std::size_t>(k)]);
            live.erase(live.begin() + k);
        }
        return some;
    }
    [[nodiscard]] TokenId token() { return static_cast<TokenId>(random_.below(2)); }
    // Most prompts start with the same tokens.
    [[nodiscard]] Tokens prompt() {
        Tokens tokens = count_up(static_cast<TokenId>(10 * random_.below(2)), random_.below(14));
        for (std::int64_t n = random_.between(1, 6); n > 0; --n) tokens.push_back(token());
        return tokens;
    }
    void forget_finished() {
        if (!is_finished || finished_ == 0) return;
        auto& open = scene.open_tickets;
        open.erase(std::find(open.begin(), open.end(), finished_));
        // Requests whose loads failed start again.
        for (const kvcore::Transfers& transfers : moved_) {
            if (transfers.ticket != finished_ || is_done_) continue;
            if (transfers.tier_moves.empty()) continue;
            if (!transfers.tier_moves[0].is_load()) continue;
            for (const auto& request : scene.requests) {
                if (!scene.manager.contains(request->sequence)) continue;
                if (!scene.manager.pages_of(request->sequence).empty()) continue;
                request->start = 0;
            }
        }
    }

    Random random_;
    std::vector<Verb> verbs_{
        Verb::kReserve, Verb::kFetch,   Verb::kFetch,       Verb::kFetch,  Verb::kFetch,
        Verb::kCommit,  Verb::kCommit,  Verb::kCommit,      Verb::kFork,   Verb::kTruncate,
        Verb::kRelease, Verb::kRelease, Verb::kBeginAgain,  Verb::kPin,    Verb::kUnpin,
        Verb::kReset,   Verb::kFinish,  Verb::kFinish,      Verb::kFinish, Verb::kTakeOwed,
        Verb::kClaim,   Verb::kClaim,   Verb::kResetMetrics};
    std::vector<bool> fetched_;
    std::vector<kvcore::Transfers> moved_;
    std::int32_t replica_ = 0;
    std::int64_t length_ = 0;
    std::uint64_t finished_ = 0;
    bool is_done_ = true;
};

using TrafficPtr = std::unique_ptr<Traffic>;

// A failed allocation may leave part of these calls undone: stores not published, pages not
// committed.
bool may_do_a_part(const Traffic& traffic) {
    const bool stores = traffic.scene.mode.host_pages > 0;
    return traffic.verb == Verb::kCommit || (stores && traffic.verb == Verb::kFinish);
}

void run_traffic(std::uint64_t seed, const Mode& mode, int steps) {
    check::seed = seed;
    for (int step = 0; step < steps; ++step) {
        const auto make = [&] {
            auto traffic = std::make_unique<Traffic>(seed, mode);
            for (int i = 0; i < step; ++i) traffic->step();
            traffic->prepare();
            return traffic;
        };
        const auto call = [](const TrafficPtr& traffic) { traffic->call(); };
        const auto text = [](const TrafficPtr& traffic) { return traffic->text(); };
        const std::string name = std::string(mode.name) + ", step " + std::to_string(step);
        auto probe = make();
        if (!may_do_a_part(*probe)) {
            failing_memory::any_site(name.c_str(), make, call, text);
            continue;
        }
        std::string before;
        for (std::int64_t site = 0, sites = 1; site <= sites; ++site) {
            for (const Failing failing : {Failing::kOnce, Failing::kFromThereOn}) {
                failing_memory::detail::name_place(name.c_str(), site, failing);
                auto traffic = make();
                const auto outcome = failing_memory::detail::run(traffic, call, site, failing);
                if (site == 0) sites = outcome.num_seen;
                traffic->scene.manager.check_integrity();
                if (outcome.has_thrown) {
                    if (before.empty()) before = make()->text();
                    CHECK_EQ(traffic->text(), before);
                    continue;
                }
                // Checks that the traffic can continue after a partial call.
                traffic->settle();
                for (int i = 0; i < 12; ++i) {
                    traffic->step();
                    traffic->scene.manager.check_integrity();
                }
            }
        }
    }
    check::note.clear();
}

TEST(random_calls_leave_no_trace) {
    const std::uint64_t first = check::seed_or(1);
    const auto seeds = static_cast<std::uint64_t>(check::count_or(2));
    for (std::uint64_t seed = first; seed < first + seeds; ++seed) {
        for (const Mode& mode : kModes) run_traffic(seed, mode, 120);
        for (const Mode& mode : {kExplained, kHostExplained, kAdvised, kHostAdvised}) {
            run_traffic(seed, mode, 120);
        }
    }
}

}  // namespace

}  // namespace tests::faults::traffic
