// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "explore/explored_memory.hpp"
#include "explore/explored_scenario.hpp"
#include "kvcore/page_moves.hpp"

/// Transfers that a call gave out.
struct ExploredTicket {
    using Words = std::vector<std::uint64_t>;
    kvcore::Transfers transfers;
    std::vector<kvcore::SequenceHandle> rows;  // of the call's batch
    std::vector<Words> copied;                 // what each page copy has to find
    std::vector<Words> moved;                  // the same of each host copy
    bool is_moved = false;
};

/// The memory of both tiers and the transfers under way, in the order in which they were given out.
class ExploredTickets {
   public:
    ExploredTickets(std::int64_t num_pages, std::int64_t host_pages, std::int32_t page_size)
        : device_(num_pages, page_size), host_(host_pages, page_size) {}

    [[nodiscard]] const std::vector<ExploredTicket>& all() const { return tickets_; }
    [[nodiscard]] ExploredMemory& device() { return device_; }
    [[nodiscard]] const ExploredMemory& device() const { return device_; }
    [[nodiscard]] ExploredMemory& host() { return host_; }
    [[nodiscard]] const ExploredMemory& host() const { return host_; }

    /// From now on until it is over the destinations may hold anything.
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

    /// Moves the bytes of a ticket.
    void move(std::size_t index) {
        for_each_copy(tickets_[index],
                      [](const auto* source, auto* destination, const auto& words) {
                          require(std::equal(words.begin(), words.end(), source),
                                  "the source of a copy has changed before it was made");
                          std::copy(words.begin(), words.end(), destination);
                      });
        tickets_[index].is_moved = true;
    }

    /// Takes a ticket off: done, so that its bytes are there, or failed half way.
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
    // Calls visit(source, destination, words that have to arrive) for each copy of a ticket.
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
