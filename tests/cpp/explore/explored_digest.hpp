// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "explore/explored_nodes.hpp"
#include "explore/explored_world.hpp"

/// A word for a world's state. States with equal words have the same future.
///
/// Pages get numbers in the order of the visit, so it does not matter which free page a request
/// got. Tickets have an order of their own. The order of eviction counts, times do not.
class ExploredDigest {
   public:
    explicit ExploredDigest(const ExploredWorld& world)
        : world_(world),
          nodes_(Probe::tree(world.manager())),
          device_(world.scenario().num_pages, world.device()),
          host_(world.scenario().host_pages, world.host()) {
        order_tickets();
        add_tree(nodes_, device_);
        if (kvcore::Level* store = Probe::host(world.manager())) {
            host_nodes_.emplace(store->tree);
            add_tree(*host_nodes_, host_);
        }
        for (const ExploredRequest& request : world.requests()) add_request(request);
        for (const std::size_t i : tickets_) {
            add(i < world.tickets().size() && world.tickets()[i].is_moved ? 1 : 0);
            add_copies(world.tickets()[i].transfers.ticket);
            add_flights(world.tickets()[i].transfers.ticket);
            add_moved(world.tickets()[i]);
        }
        add_copies(0);
        add(world.pin() ? 1 : 0);
        if (world.pin()) {
            add(nodes_.index_of(Probe::pinned_node(world.manager(), *world.pin())));
        }
    }

    [[nodiscard]] std::uint64_t word() const { return word_; }

   private:
    using Probe = kvcore::CacheManagerProbe;

    /// The numbers of a tier's pages.
    struct Pages {
        Pages(std::int64_t num_pages, const ExploredMemory& memory)
            : numbers(static_cast<std::size_t>(num_pages), -1), memory(memory) {}
        std::vector<int> numbers;
        const ExploredMemory& memory;
        int next = 0;
    };

    void add(std::uint64_t number) { word_ = mixed(word_, number); }
    void add(int number) { add(static_cast<std::uint64_t>(static_cast<std::int64_t>(number))); }
    void add_page(Pages& pages, kvcore::BlockId page) {
        int& number = pages.numbers[static_cast<std::size_t>(page)];
        const bool is_new = number < 0;
        if (is_new) number = pages.next++;
        add(number);
        if (!is_new) return;
        const std::uint64_t* words = pages.memory.page(page);
        for (std::int32_t i = 0; i < pages.memory.page_size(); ++i) add(words[i]);
    }

    // The order in which tickets were handed out does not matter: sort them by request.
    void order_tickets() {
        const std::vector<ExploredTicket>& all = world_.tickets();
        const auto key = [&](std::size_t i) {
            return std::make_tuple(world_.request_of(all[i].rows[0]), all[i].is_moved,
                                   all[i].copied.size(), all[i].moved.size(), i);
        };
        tickets_.resize(all.size());
        std::iota(tickets_.begin(), tickets_.end(), std::size_t{0});
        std::sort(tickets_.begin(), tickets_.end(),
                  [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
    }
    // Return 0 if no ticket matches.
    [[nodiscard]] int number_of(std::uint64_t ticket) const {
        for (std::size_t i = 0; i < tickets_.size(); ++i) {
            if (world_.tickets()[tickets_[i]].transfers.ticket == ticket) {
                return static_cast<int>(i) + 1;
            }
        }
        return 0;
    }

    [[nodiscard]] int flight_of(std::uint32_t number) const {
        for (const Probe::Flight& flight : Probe::flights(world_.manager()).all()) {
            if (number != 0 && flight.number == number) return number_of(flight.ticket);
        }
        return 0;
    }

    void add_tree(const TreeNodes& nodes, Pages& pages) {
        add(static_cast<int>(nodes.all().size()));
        for (const kvcore::TreeNode* node : nodes.all()) {
            add(nodes.index_of(node->parent));
            add(static_cast<int>(node->pins));
            if (node->is_root()) continue;
            add(node->num_pages);
            add(node->capacity);
            for (std::int32_t i = 0; i < node->num_pages; ++i) {
                const kvcore::BlockId page = node->ids(nodes.page_size())[i];
                add_page(pages, page);
                if (&pages == &device_) add(Probe::mark_of(world_.manager(), page));
                const kvcore::TokenId* tokens = node->page_tokens(i, nodes.page_size());
                for (std::int32_t t = 0; t < nodes.page_size(); ++t) add(tokens[t]);
            }
        }
        for (const int index : nodes.eviction_order()) add(index);
        add(-1);
    }

    void add_request(const ExploredRequest& request) {
        add(request.is_known ? 1 : 0);
        add(request.is_claimed ? 1 : 0);
        if (!request.is_claimed) return;
        add((request.has_run ? 1 : 0) + (request.is_sealed ? 2 : 0));
        for (const kvcore::TokenId token : request.tokens) add(token);
        add(static_cast<int>(request.start));
        add(static_cast<int>(request.active));
        add(static_cast<int>(request.chunk));
        const kvcore::Sequence& sequence = world_.sequence_of(request);
        const bool is_seen = sequence.pages.version() == request.seen_version;
        add(is_seen ? static_cast<int>(request.seen_columns.size()) : -1);
        const kvcore::PageRow& row = sequence.pages;
        add(row.size());
        for (const kvcore::BlockId page : row.ids()) add_page(device_, page);
        for (const std::int32_t column : row.own_duplicates()) add(column);
        add(static_cast<int>(sequence.reuse) + 3 * sequence.num_pending);
        add(row.committed());
        add(row.read_only_end());
        add(static_cast<int>(sequence.counted_end));
        add(static_cast<int>(sequence.written));
        add(static_cast<int>(sequence.hit_tokens));
        add(flight_of(Probe::store_of(world_.manager(), request.sequence)));
        add(Probe::is_due(world_.manager(), request.sequence) ? 1 : 0);
        add(row.node() == nullptr ? -2 : nodes_.index_of(row.node()));
        add(host_index(Probe::host_node_of(world_.manager(), request.sequence)));
    }

    [[nodiscard]] int host_index(const kvcore::TreeNode* node) const {
        return node == nullptr || !host_nodes_ ? -2 : host_nodes_->index_of(node);
    }

    void add_copies(std::uint64_t ticket) {
        for (const Probe::Copy& copy : Probe::copies(world_.manager())) {
            if (copy.ticket != ticket) continue;
            add_page(device_, copy.copy.source);
            add_page(device_, copy.copy.destination);
            add(copy.copy.num_tokens);
            add(world_.request_of(copy.copy.sequence));
            add(copy.source.is_reference() ? -2 : nodes_.index_of(copy.source.at().node));
        }
        add(-1);
    }

    void add_flights(std::uint64_t ticket) {
        for (const Probe::Flight& flight : Probe::flights(world_.manager()).all()) {
            if (flight.ticket != ticket) continue;
            const bool is_load = flight.is_load;
            add(is_load ? 1 : 0);
            add(world_.request_of(flight.sequence));
            for (const kvcore::BlockId page : flight.device_pages) add_page(device_, page);
            for (const kvcore::BlockId page : flight.host_pages) add_page(host_, page);
            const kvcore::TreeNode* source = flight.source.node();
            add(source == nullptr ? -2 : is_load ? host_index(source) : nodes_.index_of(source));
            add(static_cast<int>(flight.source.references().n));
            add(host_index(flight.place.node()));
            add(flight.ahead);
            for (const kvcore::TokenId token : flight.tokens) add(token);
            add((flight.place ? 1 : 0) + 2 * static_cast<int>(flight.held_back));
        }
        add(-1);
    }

    void add_moved(const ExploredTicket& ticket) {
        for (const kvcore::SequenceHandle row : ticket.rows) add(world_.request_of(row));
        for (const kvcore::MovedRequest& moved : ticket.transfers.moved) {
            add(static_cast<int>(moved.row));
            add(static_cast<int>(moved.start));
            add(static_cast<int>(moved.active));
        }
        add(-1);
    }

    const ExploredWorld& world_;
    TreeNodes nodes_;
    std::optional<TreeNodes> host_nodes_;
    Pages device_;
    Pages host_;
    std::vector<std::size_t> tickets_;
    std::uint64_t word_ = 7;
};
