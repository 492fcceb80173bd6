// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "manager/page_hold.hpp"
#include "support/make_room.hpp"

namespace kvcore {

/// A place in a host tier that its holder gives back: see TierIndex.
class StorePlace {
   public:
    StorePlace() noexcept = default;
    /// Takes over a place that the caller holds.
    StorePlace(TierIndex& store, TreeNode* node) noexcept : store_(&store), node_(node) {}
    StorePlace(StorePlace&& other) noexcept : store_(other.store_), node_(other.release()) {}
    StorePlace& operator=(StorePlace&& other) noexcept {
        StorePlace moved(std::move(other));
        std::swap(store_, moved.store_);
        std::swap(node_, moved.node_);
        return *this;
    }
    ~StorePlace() { reset(); }

    [[nodiscard]] TreeNode* node() const noexcept { return node_; }
    [[nodiscard]] TreeNode* release() noexcept { return std::exchange(node_, nullptr); }
    void reset() noexcept {
        if (TreeNode* node = release()) store_->let_go(node);
    }

   private:
    TierIndex* store_ = nullptr;
    TreeNode* node_ = nullptr;
};

/// Pages between the pool and the host tier that one sequence was given in one call.
struct CacheManager::HostFlight {
    std::uint64_t ticket = 0;
    std::thread::id owner;  // the thread that was given them
    std::int32_t replica = 0;
    SequenceHandle sequence;
    HostDirection direction = HostDirection::kStore;
    std::vector<BlockId> host_pages;  // loads: those of `source`; stores: taken from the tier
    std::vector<BlockId>
        device_pages;  // loads: with a reference to each; stores: those of `source`
    PathHold source;   // what is read: loads, of the tier; stores, of the tree
    // Of stores alone:
    StorePlace place;             // in the tier: what is stored goes behind it
    std::int32_t ahead = 0;       // pages behind `place` that earlier flights store
    std::vector<TokenId> tokens;  // of those and of the copies
    std::uint32_t number = 0;     // no other flight has it now
    bool is_wanted = true;        // false: forgotten meanwhile
};

/// Transfers that are owed or under way.
///
/// Owns: a hold on every page that is read or written by them.
/// Invariant: a sequence's `num_pending` counts its copies and loads here. An entry without a
/// ticket is owed: it failed, and waits for its sequence to ask again. A sequence that is gone has
/// entries only as long as they are under way. Threads: none of its own; CacheManager locks around
/// it.
struct CacheManager::Ledger {
    struct Copy {
        PageCopy copy;
        PageHold source;
        PageHold destination;
        std::uint64_t ticket = 0;  // 0: owed
        std::thread::id owner;
    };

    std::vector<Copy> copies;
    std::vector<HostFlight> flights;
    std::uint64_t last_ticket = 0;
    std::uint32_t last_number = 0;
    // Copies from here on are those of the present call.
    std::size_t call_begin = static_cast<std::size_t>(-1);

    /// What names a store for its sequence, in half the memory of a ticket.
    std::uint32_t free_number() noexcept {
        const auto is_taken = [this](const HostFlight& each) { return each.number == last_number; };
        do {
            ++last_number;
        } while (last_number == 0 || std::any_of(flights.begin(), flights.end(), is_taken));
        return last_number;
    }
    /// The ticket of a call's transfers, a new one for its first.
    std::uint64_t ticket_of(Transfers& transfers) noexcept {
        if (transfers.ticket == 0) transfers.ticket = ++last_ticket;
        return transfers.ticket;
    }
    void give_out(Copy& copy, Transfers& transfers) noexcept {
        copy.ticket = ticket_of(transfers);
        copy.owner = std::this_thread::get_id();
        transfers.copies.push_back(copy.copy);  // there is room
    }
    /// A copy for the caller to do at once. There is room.
    void add(const PageCopy& copy, PageHold source, PageHold destination,
             Transfers& transfers) noexcept {
        copies.push_back({copy, std::move(source), std::move(destination), 0, {}});
        give_out(copies.back(), transfers);
    }
    /// References to a page that copies of the present call read, which its holders gave up.
    [[nodiscard]] Leavers leavers_of_call(std::int32_t replica, BlockId page) const {
        Leavers leavers;
        for (std::size_t i = call_begin; i < copies.size(); ++i) {
            const Copy& each = copies[i];
            const bool is_its = each.copy.replica == replica && each.source.is_reference() &&
                                each.source.page() == page;
            if (is_its) leavers.add(each.copy.num_tokens);
        }
        return leavers;
    }
};

/// Marks the copies of a call, which know of each other.
class CacheManager::CallScope {
   public:
    explicit CallScope(Ledger& ledger) noexcept : ledger_(ledger) {
        ledger_.call_begin = ledger_.copies.size();
    }
    CallScope(const CallScope&) = delete;
    CallScope& operator=(const CallScope&) = delete;
    ~CallScope() { ledger_.call_begin = static_cast<std::size_t>(-1); }

   private:
    Ledger& ledger_;
};

}  // namespace kvcore
