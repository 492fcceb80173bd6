// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "explore/explored_memory.hpp"
#include "explore/explored_scenario.hpp"
#include "kvcore/page_moves.hpp"

/// The transfers that a call handed out.
struct ExploredTicket {
    using Words = std::vector<std::uint64_t>;
    kvcore::Transfers transfers;
    std::vector<kvcore::SequenceHandle> rows;  // of the call's batch
    std::vector<Words> copied;                 // expected content of each page copy
    std::vector<Words> moved;                  // expected content of each host copy
    bool is_moved = false;
};

/// The memory of both tiers, and the transfers in flight in the order in which they were handed
/// out.
class ExploredTickets {
   public:
    ExploredTickets(std::int64_t num_pages, std::int64_t host_pages, std::int32_t page_size)
        : device_(num_pages, page_size), host_(host_pages, page_size) {}

    [[nodiscard]] const std::vector<ExploredTicket>& all() const { return tickets_; }
    [[nodiscard]] ExploredMemory& device() { return device_; }
    [[nodiscard]] const ExploredMemory& device() const { return device_; }
    [[nodiscard]] ExploredMemory& host() { return host_; }
    [[nodiscard]] const ExploredMemory& host() const { return host_; }

    /// From now until the ticket ends, the destinations may have any content.
    void add(ExploredTicket ticket) {
        for (const kvcore::PageMove& copy : ticket.transfers.copies) {
            device_.spoil(copy.destination);
        }
        for (const kvcore::PageMove& copy : ticket.transfers.tier_moves) {
            if (copy.is_load()) {
                device_.spoil(copy.page_in(kvcore::Tier::kDevice));
            } else {
                host_.spoil(copy.page_in(kvcore::Tier::kHost));
            }
        }
        tickets_.push_back(std::move(ticket));
    }

    /// Make the copies of a ticket.
    void move(std::size_t index) {
        for_each_copy(tickets_[index],
                      [](const auto* source, auto* destination, const auto& words) {
                          require(std::equal(words.begin(), words.end(), source),
                                  "the source of a copy has changed before it was made");
                          std::copy(words.begin(), words.end(), destination);
                      });
        tickets_[index].is_moved = true;
    }

    /// Remove a ticket: its copies are done, or they failed half-way.
    [[nodiscard]] ExploredTicket take(std::size_t index, bool done) {
        ExploredTicket ticket = std::move(tickets_[index]);
        tickets_.erase(tickets_.begin() + static_cast<std::ptrdiff_t>(index));
        for_each_copy(ticket, [&](const auto*, auto* destination, const auto& words) {
            require(!done || std::equal(words.begin(), words.end(), destination),
                    "the destination of a copy has changed before it was over");
            if (!done) std::fill_n(destination, words.size(), kGarbage);
        });
        return ticket;
    }

   private:
    // Call visit(source, destination, words that must arrive) for each copy of a ticket.
    template <class Visit>
    void for_each_copy(const ExploredTicket& ticket, const Visit& visit) {
        const kvcore::Transfers& transfers = ticket.transfers;
        for (std::size_t i = 0; i < transfers.copies.size(); ++i) {
            const kvcore::PageMove& copy = transfers.copies[i];
            visit(device_.page(copy.source), device_.page(copy.destination), ticket.copied[i]);
        }
        for (std::size_t i = 0; i < transfers.tier_moves.size(); ++i) {
            const kvcore::PageMove& copy = transfers.tier_moves[i];
            std::uint64_t* device = device_.page(copy.page_in(kvcore::Tier::kDevice));
            std::uint64_t* host = host_.page(copy.page_in(kvcore::Tier::kHost));
            const bool is_load = copy.is_load();
            visit(is_load ? host : device, is_load ? device : host, ticket.moved[i]);
        }
    }

    ExploredMemory device_;
    ExploredMemory host_;
    std::vector<ExploredTicket> tickets_;
};
