// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

#include "explore/explored_digest.hpp"
#include "explore/explored_nodes.hpp"
#include "explore/explored_world.hpp"

/// The laws that hold in every world, after any actions. Throws Violation. Leaves the world
/// unchanged, except for memory that the manager keeps for itself.
class ExploredChecks {
   public:
    explicit ExploredChecks(ExploredWorld& world) : world_(world) {}

    void run() {
        const bool asks_for_laws = world_.scenario().asks_for_laws;
        if (asks_for_laws) world_.manager().check_integrity();
        check_tree(Probe::tree(world_.manager()), world_.device());
        if (kvcore::Level* store = Probe::host(world_.manager())) {
            check_tree(store->tree, world_.host());
        }
        if (asks_for_laws) {
            collect_transfers();
            check_transfers();
        }
        for (const ExploredRequest& request : world_.requests()) {
            if (request.is_claimed) check_request(request);
        }
        check_nothing_is_lost();
        check_pin();
        for (const ExploredRequest& request : world_.requests()) {
            const bool waits = request.is_claimed && world_.sequence_of(request).num_pending > 0;
            if (waits) check_refusals(request);
        }
    }

    /// Right after a reset: a lookup finds no page, even if a request holds it.
    void check_reset() const {
        const kvcore::CacheManager& manager = world_.manager();
        check_empty(Probe::tree(manager));
        if (kvcore::Level* store = Probe::host(manager)) check_empty(store->tree);
    }

   private:
    using Probe = kvcore::CacheManagerProbe;
    using Pages = std::vector<kvcore::BlockId>;

    // A lookup can find a page in the tree at any time.
    static void check_tree(const kvcore::PrefixTree& tree, const ExploredMemory& memory) {
        const std::int32_t page = tree.page_size();
        const TreeNodes nodes(tree);
        for (const kvcore::TreeNode* node : nodes.all()) {
            if (node->is_root()) continue;
            const std::int32_t depth = kvcore::PrefixTree::depth_of(node);
            const kvcore::TreePosition at{const_cast<kvcore::TreeNode*>(node), depth};
            const std::vector<kvcore::TokenId> tokens = tree.tokens_of(at, 0);
            for (std::int32_t i = 0; i < node->num_pages * page; ++i) {
                const std::uint64_t word = memory.page(node->ids(page)[i / page])[i % page];
                require(word == content_of(tokens.data(), node->start * page + i + 1),
                        "a cached page does not hold the prefix that it is found by");
            }
        }
    }

    static void check_empty(const kvcore::PrefixTree& tree) {
        const TreeNodes nodes(tree);
        for (const kvcore::TreeNode* node : nodes.all()) {
            require(node->is_root(), "a reset leaves a page that a lookup finds");
        }
    }

    void collect_transfers() {
        for (const Probe::Copy& copy : Probe::copies(world_.manager())) {
            read_.push_back(copy.copy.source);
            written_.push_back(copy.copy.destination);
        }
        for (const Probe::Flight& flight : Probe::flights(world_.manager()).all()) {
            const bool is_load = flight.is_load;
            Pages& device = is_load ? written_ : read_;
            Pages& host = is_load ? read_below_ : written_below_;
            device.insert(device.end(), flight.device_pages.begin(), flight.device_pages.end());
            host.insert(host.end(), flight.host_pages.begin(), flight.host_pages.end());
        }
    }

    [[nodiscard]] static bool has(const Pages& pages, kvcore::BlockId page) {
        return std::find(pages.begin(), pages.end(), page) != pages.end();
    }

    // Check that one copy at most writes a page, and that no copy reads a page that another one
    // writes.
    static void check_apart(Pages written, const Pages& read, const kvcore::BlockPool& pool) {
        std::sort(written.begin(), written.end());
        require(std::adjacent_find(written.begin(), written.end()) == written.end(),
                "a page is written by two copies");
        for (const kvcore::BlockId page : written) {
            require(!has(read, page), "a page is read by a copy and written by another");
            require(pool.ref_count(page) > 0, "a page that is written by a copy is free");
        }
        for (const kvcore::BlockId page : read) {
            require(pool.ref_count(page) > 0, "a page that is read by a copy is free");
        }
    }

    void check_transfers() const {
        const kvcore::CacheManager& manager = world_.manager();
        check_apart(written_, read_, Probe::pool(manager));
        if (kvcore::Level* store = Probe::host(manager)) {
            check_apart(written_below_, read_below_, store->pool);
        }
        Probe::tree(manager).for_each_run([&](const kvcore::BlockId* ids, std::int32_t n) {
            for (std::int32_t i = 0; i < n; ++i) {
                require(!has(written_, ids[i]), "a cached page is written by a copy");
            }
        });
        for (const ExploredTicket& ticket : world_.tickets()) {
            require(is_known(ticket.transfers.ticket), "the manager has forgotten an open ticket");
        }
    }

    [[nodiscard]] bool is_known(std::uint64_t ticket) const {
        const auto is_its = [ticket](const auto& each) { return each.ticket == ticket; };
        const auto& copies = Probe::copies(world_.manager());
        const auto& flights = Probe::flights(world_.manager()).all();
        return std::any_of(copies.begin(), copies.end(), is_its) ||
               std::any_of(flights.begin(), flights.end(), is_its);
    }

    // The pages that transfers into this request's row write.
    [[nodiscard]] Pages awaited(const ExploredRequest& request) const {
        Pages pages;
        for (const Probe::Copy& copy : Probe::copies(world_.manager())) {
            if (copy.copy.sequence == request.sequence) pages.push_back(copy.copy.destination);
        }
        for (const Probe::Flight& flight : Probe::flights(world_.manager()).all()) {
            const bool is_its = flight.sequence == request.sequence && flight.is_load;
            if (!is_its) continue;
            pages.insert(pages.end(), flight.device_pages.begin(), flight.device_pages.end());
        }
        return pages;
    }

    void check_request(const ExploredRequest& request) const {
        const kvcore::Sequence& sequence = world_.sequence_of(request);
        const Pages own = awaited(request);
        require(!world_.scenario().asks_for_laws || own.empty() == (sequence.num_pending == 0),
                "a request counts the transfers that it waits for");
        for (const kvcore::BlockId page : sequence.pages.ids()) {
            require(!has(written_, page) || has(own, page),
                    "a page in a row is written by a copy for another request");
        }
        const std::int32_t page = world_.scenario().page_size;
        const std::int64_t end = request.has_run ? request.active : request.start;
        for (std::int64_t i = 0; i < (sequence.pages.empty() ? 0 : end); ++i) {
            const kvcore::BlockId where = sequence.pages[static_cast<std::int32_t>(i / page)];
            require(has(own, where) || world_.device().page(where)[i % page] ==
                                           content_of(request.tokens.data(), i + 1),
                    "a row shows another prefix at position " + std::to_string(i));
        }
        if (sequence.pages.version() != request.seen_version) return;
        const Pages& seen = request.seen_columns;
        require(seen.size() <= sequence.pages.ids().size() &&
                    std::equal(seen.begin(), seen.end(), sequence.pages.ids().begin()),
                "a row has changed, but not its version");
    }

    void check_nothing_is_lost() const {
        const auto& requests = world_.requests();
        const bool is_busy = std::any_of(requests.begin(), requests.end(),
                                         [](const auto& request) { return request.is_claimed; });
        if (is_busy || world_.pin() || !world_.tickets().empty()) return;
        const kvcore::PoolStats stats = world_.manager().stats(0);
        require(stats.free_pages + stats.evictable_pages == world_.scenario().num_pages,
                "without requests every page is available");
        const kvcore::Level* store = Probe::host(world_.manager());
        require(store == nullptr || store->num_available() == world_.scenario().host_pages,
                "without requests every host page is available");
    }

    void check_pin() const {
        const auto& pin = world_.pin();
        if (!pin) return;
        const kvcore::TreeNode* end = Probe::pinned_node(world_.manager(), *pin);
        if (end == nullptr || kvcore::PrefixTree::is_forgotten(end)) return;  // by a reset
        const auto& tokens = world_.scenario().prompts[0].tokens;
        const auto n = static_cast<std::int64_t>(tokens.size());
        const std::int64_t found = world_.manager().match(0, "", tokens.data(), n);
        require(found * world_.scenario().page_size >= pin->num_tokens, "a pinned prefix is found");
    }

    // Check calls that are refused and must not change anything.
    void check_refusals(const ExploredRequest& request) {
        const std::uint64_t before = ExploredDigest(world_).word();
        kvcore::CacheManager& manager = world_.manager();
        kvcore::RequestView view = request.view();
        kvcore::Transfers transfers;
        require(manager.reserve(view, 1, &transfers) == kvcore::ReserveStatus::kPending,
                "reserve waits for transfers");
        std::uint32_t cells[64] = {};
        std::uint32_t length = 0;
        kvcore::LookupTable table(cells, 1, 64, 0);
        kvcore::FetchTarget target{&table, &length};
        const kvcore::FetchResult fetched = manager.fetch({&view, 1}, 1, &target, &transfers);
        require(fetched.status == kvcore::FetchStatus::kPending && fetched.row == 0,
                "fetch waits for transfers");
        require_refusal("commit", [&] {
            std::vector<kvcore::PageSwap> swaps;
            manager.commit({&view, 1}, swaps, &transfers);
        });
        require_refusal("truncate", [&] { manager.truncate(request.sequence, 0); });
        if (world_.is_under_way(request)) {
            require_refusal("begin_again", [&] { manager.begin_again(request.sequence); });
        }
        require_refusal("fork", [&] {
            kvcore::RequestView child = view;
            manager.fork(view, {&child, 1});
        });
        if (!world_.is_owed(request)) {
            require(manager.take_owed(request.sequence, transfers) == kvcore::OwedStatus::kUnderWay,
                    "a copy in flight is not handed out again");
        }
        require(transfers.empty(), "a refused call hands out no transfers");
        require(view.start == request.start && view.active == request.active,
                "a refused call moves no request");
        require(ExploredDigest(world_).word() == before, "a refused call changes nothing");
    }

    template <class Call>
    static void require_refusal(const std::string& verb, const Call& call) {
        try {
            call();
        } catch (const kvcore::PendingTransfersError&) {
            return;
        }
        throw Violation(verb + " is refused while transfers are pending");
    }

    ExploredWorld& world_;
    Pages read_;
    Pages written_;
    Pages read_below_;
    Pages written_below_;
};
