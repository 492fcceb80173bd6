// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "explore/explored_request.hpp"
#include "explore/explored_scenario.hpp"
#include "explore/explored_tickets.hpp"
#include "kvcore/errors.hpp"
#include "support/manager_probe.hpp"

/// A manager, its three requests, the memory of its pages, and the copies in flight.
///
/// Each verb checks its result; a wrong result is a Violation.
class ExploredWorld {
   public:
    using Probe = kvcore::CacheManagerProbe;
    static constexpr std::size_t kRequests = 3;

    explicit ExploredWorld(const Scenario& scenario)
        : scenario_(&scenario),
          manager_(config_of(scenario)),
          tickets_(scenario.num_pages, scenario.host_pages, scenario.page_size) {}

    [[nodiscard]] const Scenario& scenario() const { return *scenario_; }
    [[nodiscard]] kvcore::CacheManager& manager() { return manager_; }
    [[nodiscard]] const kvcore::CacheManager& manager() const { return manager_; }
    [[nodiscard]] const std::array<ExploredRequest, kRequests>& requests() const {
        return requests_;
    }
    [[nodiscard]] const std::vector<ExploredTicket>& tickets() const { return tickets_.all(); }
    [[nodiscard]] const ExploredMemory& device() const { return tickets_.device(); }
    [[nodiscard]] const ExploredMemory& host() const { return tickets_.host(); }
    [[nodiscard]] const std::optional<kvcore::PinHandle>& pin() const { return pin_; }
    [[nodiscard]] const kvcore::Sequence& sequence_of(const ExploredRequest& request) const {
        return *Probe::find(manager_, request.sequence);
    }
    /// Return the request of a sequence, or -1 if the sequence has ended.
    [[nodiscard]] int request_of(kvcore::SequenceHandle sequence) const {
        for (std::size_t i = 0; i < kRequests; ++i) {
            const ExploredRequest& request = requests_[i];
            if (request.is_claimed && request.sequence == sequence) return static_cast<int>(i);
        }
        return -1;
    }
    /// Return true if transfers into its pages are in flight.
    [[nodiscard]] bool is_under_way(const ExploredRequest& request) const {
        const auto& copies = Probe::copies(manager_);
        const auto& flights = Probe::flights(manager_).all();
        return std::any_of(copies.begin(), copies.end(),
                           [&](const Probe::Copy& copy) {
                               return copy.ticket != 0 && copy.copy.sequence == request.sequence;
                           }) ||
               std::any_of(flights.begin(), flights.end(), [&](const Probe::Flight& flight) {
                   return flight.sequence == request.sequence && flight.is_load;
               });
    }
    /// Return true if copies into its pages have failed.
    [[nodiscard]] bool is_owed(const ExploredRequest& request) const {
        const auto& copies = Probe::copies(manager_);
        return std::any_of(copies.begin(), copies.end(), [&](const Probe::Copy& copy) {
            return copy.ticket == 0 && copy.copy.sequence == request.sequence;
        });
    }

    void apply(const Action& action) {
        switch (action.verb) {
            case Verb::kReserve:
                reserve({at(action.first)});
                break;
            case Verb::kReservePair:
                reserve({at(action.first), at(action.second)});
                break;
            case Verb::kFetch:
                fetch({at(action.first)});
                break;
            case Verb::kFetchPair:
                fetch({at(action.first), at(action.second)});
                break;
            case Verb::kStep:
                step(*at(action.first));
                break;
            case Verb::kFork:
                fork(*at(action.first), *at(action.second));
                break;
            case Verb::kTruncate:
                manager_.truncate(at(action.first)->sequence, action.second);
                set_back(*at(action.first), action.second);
                break;
            case Verb::kRewind:
                set_back(*at(action.first), action.second);
                break;
            case Verb::kRelease:
                manager_.release(at(action.first)->sequence);
                at(action.first)->is_claimed = false;
                break;
            case Verb::kBeginAgain:
                manager_.begin_again(at(action.first)->sequence);
                begin_again(*at(action.first));
                break;
            case Verb::kTakeOwed:
                take_owed(*at(action.first));
                break;
            case Verb::kMove:
                tickets_.move(action.first);
                break;
            case Verb::kFinish:
                finish(action.first, true);
                break;
            case Verb::kFail:
                finish(action.first, false);
                break;
            case Verb::kReset:
                manager_.reset_prefix_cache();
                break;
            case Verb::kPin: {
                const auto& tokens = scenario_->prompts[0].tokens;
                const auto n = static_cast<std::int64_t>(scenario_->pinned_tokens);
                pin_ = manager_.pin(0, "", tokens.data(), n);
                break;
            }
            case Verb::kUnpin:
                if (pin_) manager_.unpin(*pin_);
                pin_.reset();
                break;
        }
        tickets_.device().spoil_free_pages(Probe::pool(manager_));
        if (kvcore::Level* store = Probe::host(manager_))
            tickets_.host().spoil_free_pages(store->pool);
    }

   private:
    using Rows = std::vector<ExploredRequest*>;

    [[nodiscard]] static kvcore::CacheConfig config_of(const Scenario& scenario) {
        kvcore::CacheConfig config;
        config.num_pages = scenario.num_pages;
        config.page_size = scenario.page_size;
        config.max_sequences = kRequests;
        config.max_seq_len = scenario.num_pages * scenario.page_size;
        config.dedup = scenario.dedup;
        config.host_pages = scenario.host_pages;
        config.write_policy = scenario.write_policy;
        return config;
    }

    [[nodiscard]] ExploredRequest* at(std::size_t i) { return &requests_[i]; }
    [[nodiscard]] std::uint8_t index_of(const ExploredRequest& request) const {
        return static_cast<std::uint8_t>(&request - requests_.data());
    }
    [[nodiscard]] std::vector<kvcore::RequestView> views_of(const Rows& rows) const {
        std::vector<kvcore::RequestView> views;
        for (const ExploredRequest* row : rows) views.push_back(row->view());
        return views;
    }

    void claim(ExploredRequest& request) {
        const Scenario::Prompt& prompt = scenario_->prompts[index_of(request)];
        request = {};
        request.is_known = request.is_claimed = true;
        request.sequence = manager_.claim();
        request.tokens = prompt.tokens;
        request.chunk = prompt.chunk;
        request.active = std::min(prompt.chunk, request.end());
    }

    void begin_again(ExploredRequest& request) {
        require(manager_.pages_of(request.sequence).empty(), "a claim begins without pages");
        request.start = 0;
        request.active = std::min(request.chunk, request.end());
        request.is_sealed = false;
    }

    // Set a request to its position after a reservation. Its pages to write may have any content.
    void stand(ExploredRequest& request, const kvcore::RequestView& view) {
        require(view.start >= 0 && view.start < view.active && view.active <= view.end,
                "a reserved request has a token to run");
        request.start = view.start;
        request.active = view.active;
        const std::vector<kvcore::BlockId> pages = manager_.pages_of(request.sequence);
        const std::int32_t page = scenario_->page_size;
        for (std::size_t column = 0; column < pages.size(); ++column) {
            const std::int64_t from = request.start - static_cast<std::int64_t>(column) * page;
            if (from < page)
                tickets_.device().spoil(pages[column], std::max<std::int64_t>(0, from));
        }
    }

    void reserve(const Rows& rows) {
        if (!rows[0]->is_claimed) claim(*rows[0]);
        std::vector<kvcore::RequestView> views = views_of(rows);
        const kvcore::ReservePlan plan = manager_.plan(views[0]);
        kvcore::Transfers transfers;
        const kvcore::BatchReserve answer = manager_.reserve_batch(
            {views.data(), static_cast<std::int64_t>(views.size())}, 1, &transfers);
        const bool waits_for_room =
            answer.status == kvcore::ReserveStatus::kPending && make_room(transfers);
        require(plan.fits == (answer.reserved > 0) || waits_for_room,
                "plan predicts the result of reserve");
        const bool is_partial = answer.reserved < static_cast<std::int64_t>(rows.size());
        require(is_partial == (answer.status != kvcore::ReserveStatus::kOk),
                "a reservation of some rows returns a status other than kOk");
        require(answer.status != kvcore::ReserveStatus::kPending || !transfers.empty() ||
                    waits_for_room,
                "a request waits only for transfers");
        if (answer.reserved == 0 && !waits_for_room) require_full(rows);
        for (std::size_t i = 0; i < static_cast<std::size_t>(answer.reserved); ++i) {
            stand(*rows[i], views[i]);
        }
        issue(std::move(transfers), rows);
    }

    /// Return true if the call's transfers store pages to make room. If the call has no transfers,
    /// look at the transfers in flight.
    [[nodiscard]] bool make_room(const kvcore::Transfers& transfers) const {
        const auto& flights = Probe::flights(manager_).all();
        return std::any_of(flights.begin(), flights.end(), [&](const Probe::Flight& flight) {
            const bool is_its = transfers.empty() || flight.ticket == transfers.ticket;
            return is_its && flight.is_spill();
        });
    }

    // A request without others always fits, unless others hold pages or it reserved more pages
    // before it was set back.
    void require_full(const Rows& rows) const {
        const ExploredRequest& first = *rows[0];
        const std::int64_t needed = kvcore::ceil_div(first.end(), scenario_->page_size);
        bool is_alone = tickets().empty() && !pin_ && rows.size() == 1 &&
                        sequence_of(first).pages.size() <= needed;
        for (const ExploredRequest& request : requests_) {
            is_alone = is_alone && (!request.is_claimed || &request == rows[0]);
        }
        require(!is_alone, "a request without others fits");
    }

    void fetch(const Rows& rows) {
        for (ExploredRequest* row : rows) {
            if (!row->is_claimed) claim(*row);
        }
        std::vector<kvcore::RequestView> views = views_of(rows);
        const auto stride = scenario_->num_pages;
        std::array<std::uint32_t, 64> cells{};
        std::array<std::uint32_t, kRequests> lengths{};
        kvcore::LookupTable table(cells.data(), kRequests, stride, 0);
        kvcore::FetchTarget target{&table, lengths.data()};
        kvcore::Transfers transfers;
        const kvcore::FetchResult answer = manager_.fetch(
            {views.data(), static_cast<std::int64_t>(views.size())}, 1, &target, &transfers);
        require(answer.status != kvcore::FetchStatus::kGrow, "the table has room");
        const bool waits = answer.status == kvcore::FetchStatus::kPending;
        if (waits && make_room(transfers)) return issue(std::move(transfers), rows);
        require(transfers.empty() == !waits, "a fetch waits for its transfers");
        if (answer.status == kvcore::FetchStatus::kNoSpace) return require_full(rows);
        for (std::size_t i = 0; i < rows.size(); ++i) stand(*rows[i], views[i]);
        if (!transfers.empty()) return issue(std::move(transfers), rows);
        for (std::size_t i = 0; i < rows.size(); ++i) {
            require(lengths[i] == rows[i]->start, "a fetched length is where the request stands");
            run(*rows[i], cells.data() + static_cast<std::ptrdiff_t>(i) * stride);
        }
    }

    // The model reads cached tokens and writes active tokens.
    void run(ExploredRequest& request, const std::uint32_t* row) {
        const std::int32_t page = scenario_->page_size;
        for (std::int64_t i = 0; i < request.active; ++i) {
            std::uint64_t& word =
                tickets_.device().page(static_cast<kvcore::BlockId>(row[i / page]))[i % page];
            const std::uint64_t content = content_of(request.tokens.data(), i + 1);
            if (i >= request.start) word = content;
            require(word == content, "a fetched table shows another prefix at position " +
                                         std::to_string(i) + " of request " +
                                         std::to_string(index_of(request)));
        }
        const kvcore::Sequence& sequence = sequence_of(request);
        request.has_run = request.is_sealed = true;
        request.seen_version = sequence.pages.version();
        request.seen_columns = sequence.pages.ids();
    }

    void step(ExploredRequest& request) {
        request.start = request.active;
        const kvcore::TokenId next = index_of(request) == 1 ? 8 : 7;
        if (request.active == request.end()) request.tokens.push_back(next);
        request.active = std::min(request.end(), request.start + request.chunk);
        request.has_run = false;
        kvcore::RequestView view = request.view();
        std::vector<kvcore::PageSwap> swaps;
        kvcore::Transfers transfers;
        manager_.commit({&view, 1}, swaps, &transfers);
        require(transfers.copies.empty(), "commit copies nothing within the pool");
        issue(std::move(transfers), {&request});
    }

    void fork(ExploredRequest& parent, ExploredRequest& child) {
        ExploredRequest made;
        made.is_known = made.is_claimed = made.is_sealed = true;
        made.chunk = 1;
        made.tokens.assign(parent.tokens.begin(), parent.tokens.begin() + parent.start);
        made.tokens.push_back(index_of(child) == 1 ? 8 : 7);
        kvcore::RequestView view = made.view();
        manager_.fork(parent.view(), {&view, 1});
        made.sequence = view.sequence;
        made.start = view.start;
        made.active = view.active;
        require(made.start == parent.start, "a fork has the tokens that its parent has written");
        child = std::move(made);
    }

    // From position `n` on, the tokens are new.
    void set_back(ExploredRequest& request, std::int64_t n) {
        request.tokens.resize(static_cast<std::size_t>(n));
        request.tokens.push_back(50 + index_of(request));
        request.start = n;
        request.active = request.end();
        request.has_run = false;
    }

    void take_owed(ExploredRequest& request) {
        kvcore::Transfers transfers;
        const kvcore::OwedStatus status = manager_.take_owed(request.sequence, transfers);
        require(status == kvcore::OwedStatus::kTaken, "an owed copy can be taken");
        issue(std::move(transfers), {&request});
    }

    void issue(kvcore::Transfers transfers, const Rows& rows) {
        if (transfers.empty()) return;
        ExploredTicket ticket;
        for (const ExploredRequest* row : rows) ticket.rows.push_back(row->sequence);
        for (const kvcore::PageMove& copy : transfers.copies) {
            ticket.copied.push_back(copied_words(rows, copy.destination, copy.num_tokens));
        }
        for (const kvcore::PageMove& copy : transfers.tier_moves) {
            const std::int32_t n = scenario_->page_size;
            const std::uint64_t* stored = device().page(copy.page_in(kvcore::Tier::kDevice));
            const bool is_load = copy.is_load();
            ticket.moved.push_back(is_load
                                       ? copied_words(rows, copy.page_in(kvcore::Tier::kDevice), n)
                                       : ExploredTicket::Words(stored, stored + n));
        }
        ticket.transfers = std::move(transfers);
        tickets_.add(std::move(ticket));
    }

    [[nodiscard]] ExploredTicket::Words copied_words(const Rows& rows, kvcore::BlockId page,
                                                     std::int64_t n) const {
        for (const ExploredRequest* row : rows) {
            const std::vector<kvcore::BlockId>& pages = sequence_of(*row).pages.ids();
            const bool is_its = std::find(pages.begin(), pages.end(), page) != pages.end();
            if (is_its) return row->contents_of(pages, page, n, scenario_->page_size);
        }
        throw Violation("a copy goes to a page of a request of the call");
    }

    void finish(std::size_t index, bool done) {
        const ExploredTicket ticket = tickets_.take(index, done);
        std::vector<bool> is_loaded;  // by row
        for (const kvcore::SequenceHandle row : ticket.rows) {
            is_loaded.push_back(has_load(ticket, row));
        }
        manager_.finish(ticket.transfers.ticket, done);
        if (done) return;
        for (std::size_t i = 0; i < ticket.rows.size(); ++i) {
            const int found = request_of(ticket.rows[i]);
            if (found < 0 || !is_loaded[i]) continue;
            begin_again(*at(static_cast<std::size_t>(found)));
            for (const kvcore::MovedRequest& moved : ticket.transfers.moved) {
                if (moved.row != static_cast<std::int64_t>(i)) continue;
                at(static_cast<std::size_t>(found))->start = moved.start;
                at(static_cast<std::size_t>(found))->active = moved.active;
            }
        }
    }

    [[nodiscard]] bool has_load(const ExploredTicket& ticket, kvcore::SequenceHandle row) const {
        const auto& flights = Probe::flights(manager_).all();
        return std::any_of(flights.begin(), flights.end(), [&](const Probe::Flight& flight) {
            return flight.ticket == ticket.transfers.ticket && flight.sequence == row &&
                   flight.is_load;
        });
    }

    const Scenario* scenario_;
    kvcore::CacheManager manager_;
    ExploredTickets tickets_;
    std::array<ExploredRequest, kRequests> requests_;
    std::optional<kvcore::PinHandle> pin_;
};
