// SPDX-License-Identifier: Apache-2.0
// Claims, releases, look-ups, pins and counters.
#include "kvcore/cache_manager.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "index/tree_pin.hpp"
#include "kvcore/errors.hpp"
#include "manager/transfer_ledger.hpp"

namespace kvcore {
namespace {

using Lock = std::lock_guard<std::mutex>;

void require_count(const char* name, std::int64_t value, std::int64_t most,
                   std::int64_t least = 1) {
    if (value < least || value > most) {
        throw std::invalid_argument(
            detail::concat(name, " is ", value, ", must be ", least, " .. ", most));
    }
}

const CacheConfig& checked(const CacheConfig& config) {
    constexpr std::int64_t kInt16 = std::numeric_limits<std::int16_t>::max();
    constexpr std::int64_t kInt32 = std::numeric_limits<std::int32_t>::max();
    constexpr std::int64_t kInt64 = std::numeric_limits<std::int64_t>::max();
    require_count("num_blocks", config.num_blocks, kInt32);
    require_count("page_size", config.page_size, kInt32);
    require_count("max_sequences", config.max_sequences, kInt64);
    require_count("max_seq_len", config.max_seq_len, kInt64);
    require_count("num_replicas", config.num_replicas, kInt16);
    require_count("host_pages", config.host_pages, kInt32, 0);
    require_count("partial_page_reuse", config.partial_page_reuse, kInt32, 0);
    if (config.host_pages > 0 && !config.prefix_caching) {
        throw std::invalid_argument(
            detail::concat("host_pages is ", config.host_pages,
                           ", must be 0 without prefix_caching: the host tier holds cached pages"));
    }
    return config;
}

}  // namespace

CacheManager::CacheManager(const CacheConfig& config)
    : config_(checked(config)),
      ledger_(std::make_unique<Ledger>()),
      capacity_tokens_(config.num_blocks * config.page_size) {
    for (std::int32_t i = 0; i < config.num_replicas; ++i) {
        replicas_.push_back(std::unique_ptr<Replica>(
            new Replica{BlockPool(config.num_blocks), PrefixTree(config.page_size), 0, {}}));
        if (config.host_pages == 0) continue;
        replicas_.back()->host = std::make_unique<TierIndex>(config.host_pages, config.page_size);
        replicas_.back()->storing.resize(static_cast<std::size_t>(config.num_blocks));
    }
}

// What is under way holds pages of the replicas.
CacheManager::~CacheManager() { ledger_.reset(); }

void CacheManager::require_replica(std::int32_t index) const {
    if (index >= 0 && index < config_.num_replicas) return;
    throw std::out_of_range(detail::concat("replica ", index, " does not exist, there are ",
                                           config_.num_replicas, ", counted from 0"));
}

SequenceHandle CacheManager::claim(std::int32_t replica) {
    require_replica(replica);
    const Lock lock(mutex_);
    Replica& home = replica_at(replica);
    if (home.num_sequences >= config_.max_sequences) {
        throw CapacityError(detail::concat("replica ", replica, " is full: ", home.num_sequences,
                                           " of ", config_.max_sequences,
                                           " sequences are claimed; release one first"));
    }
    const SequenceHandle handle = sequences_.claim(replica);
    ++home.num_sequences;
    return handle;
}

bool CacheManager::contains(SequenceHandle sequence) const {
    const Lock lock(mutex_);
    return sequences_.find(sequence) != nullptr;
}

std::int32_t CacheManager::replica_of(SequenceHandle sequence) const {
    const Lock lock(mutex_);
    return sequences_.at(sequence).replica;
}

std::vector<BlockId> CacheManager::pages_of(SequenceHandle sequence) const {
    const Lock lock(mutex_);
    return sequences_.at(sequence).pages;
}

// Drops the sequence's references from column `from` on; the row is left to the caller.
void CacheManager::free_own_pages(Replica& replica, const Sequence& sequence, std::int32_t from) {
    const auto first_kept = std::lower_bound(sequence.kept.begin(), sequence.kept.end(), from);
    for (auto column = first_kept; column != sequence.kept.end(); ++column) {
        replica.pool.free(&sequence.pages[static_cast<std::size_t>(*column)], 1);
    }
    const std::int32_t first = std::max(from, sequence.committed);
    if (first < sequence.num_pages()) {
        replica.pool.free(sequence.pages.data() + first, sequence.num_pages() - first);
    }
}

void CacheManager::release(SequenceHandle sequence) {
    const Lock lock(mutex_);
    Sequence& leaving = sequences_.at(sequence);
    Replica& replica = replica_at(leaving.replica);
    if (leaving.num_pending > 0) {
        drop_owed(sequence);
        finished_.notify_all();
    }
    free_own_pages(replica, leaving, 0);
    if (leaving.node != nullptr) {
        replica.tree.unpin(leaving.node, true);
        replica.tree.shrink(leaving.node);
    }
    if (leaving.host_node != nullptr) replica.host->let_go(leaving.host_node);
    --replica.num_sequences;
    sequences_.release(sequence);
}

std::int64_t CacheManager::match(std::int32_t replica, std::string_view name_space,
                                 const TokenId* tokens, std::int64_t n,
                                 std::vector<BlockId>* pages) const {
    require_replica(replica);
    const Lock lock(mutex_);
    const PrefixTree& tree = replica_at(replica).tree;
    TreeNode* root = tree.find_namespace(name_space);
    if (root == nullptr) {
        if (pages != nullptr) pages->clear();
        return 0;
    }
    const TreePosition at = tree.match(root, tokens, n).at;
    if (pages != nullptr) {
        pages->resize(static_cast<std::size_t>(at.depth));
        tree.copy_pages(at, 0, pages->data());
    }
    return at.depth;
}

PinHandle CacheManager::pin(std::int32_t replica, std::string_view name_space,
                            const TokenId* tokens, std::int64_t n) {
    require_replica(replica);
    const Lock lock(mutex_);
    PrefixTree& tree = replica_at(replica).tree;
    TreeNode* root = tree.find_namespace(name_space);
    if (free_pins_.empty()) {
        free_pins_.reserve(pins_.size() + 1);  // unpin must not allocate
        pins_.emplace_back();
        free_pins_.push_back(static_cast<std::uint32_t>(pins_.size() - 1));
    }
    TreePin kept;
    if (root != nullptr) kept = TreePin(tree, tree.split(tree.match(root, tokens, n).at));
    const std::uint32_t index = free_pins_.back();
    free_pins_.pop_back();
    PinSlot& slot = pins_[index];
    slot.replica = replica;
    slot.node = kept.release();
    PinHandle handle{index, slot.generation, 0};
    if (slot.node != nullptr) {
        handle.num_tokens = std::int64_t{PrefixTree::depth_of(slot.node)} * config_.page_size;
        note_peak(replica_at(replica));
    }
    return handle;
}

void CacheManager::unpin(PinHandle pin) {
    const Lock lock(mutex_);
    if (pin.index >= pins_.size() || pins_[pin.index].generation != pin.generation) {
        throw InvalidHandleError(
            detail::concat("pin ", pin.index, " (generation ", pin.generation,
                           ") is not held: it was released before; release each pin once"));
    }
    PinSlot& slot = pins_[pin.index];
    ++slot.generation;
    if (slot.node != nullptr) replica_at(slot.replica).tree.unpin(slot.node, true);
    slot.node = nullptr;
    if (slot.generation != 0)
        free_pins_.push_back(pin.index);  // 0: used up, never handed out again
}

std::int32_t CacheManager::recommend_replica(std::string_view name_space, const TokenId* tokens,
                                             std::int64_t n) const {
    const Lock lock(mutex_);
    using Merit = std::tuple<std::int64_t, std::int64_t, std::int64_t>;
    std::int32_t best = 0;
    Merit most{-1, -1, 0};
    for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
        const Replica& replica = replica_at(i);
        std::int64_t hit = 0;
        if (config_.prefix_caching) {
            TreeNode* root = replica.tree.find_namespace(name_space);
            if (root != nullptr) hit = replica.tree.match(root, tokens, n).at.depth;
            if (replica.host != nullptr) {
                hit = std::max<std::int64_t>(hit, replica.host->match(name_space, tokens, n).depth);
            }
        }
        const std::int64_t available = replica.pool.num_free() + replica.tree.num_evictable();
        const Merit merit{hit, available, -replica.num_sequences};
        if (i == 0 || merit > most) {
            most = merit;
            best = i;
        }
    }
    return best;
}

// What is only being copied is nobody's use of a page: it is not found any more either, though the
// page itself stays until the copy is over.
void CacheManager::reset_prefix_cache() {
    const Lock lock(mutex_);
    for (HostFlight& flight : ledger_->flights) {
        flight.source.loosen();
        // What is stored for a sequence that is gone, or was cut, would come back otherwise.
        const Sequence* sequence = sequences_.find(flight.sequence);
        if (sequence != nullptr && sequence->storing == flight.number) continue;
        flight.is_wanted = false;
        flight.place.reset();
    }
    for (Ledger::Copy& copy : ledger_->copies) copy.source.loosen();
    for (Ledger::Copy& copy : ledger_->copies) copy.source.fasten();
    for (HostFlight& flight : ledger_->flights) {
        const bool is_load = flight.direction == HostDirection::kLoad;
        const std::vector<BlockId>& pages = is_load ? flight.host_pages : flight.device_pages;
        flight.source.fasten(pages.data(), static_cast<std::int64_t>(pages.size()));
    }
    for (const auto& replica : replicas_) {
        std::array<BlockId, 256> evicted;
        for (std::int64_t n = 1; n > 0;) {
            n = replica->tree.evict(static_cast<std::int64_t>(evicted.size()), evicted.data());
            replica->pool.free(evicted.data(), n);
        }
        if (replica->host != nullptr) replica->host->reset();
    }
}

PoolStats CacheManager::stats(std::int32_t replica) const {
    require_replica(replica);
    const Lock lock(mutex_);
    const Replica& asked = replica_at(replica);
    return {config_.num_blocks,
            asked.pool.num_free(),
            asked.tree.num_cached(),
            asked.tree.num_evictable(),
            asked.num_sequences,
            config_.host_pages,
            asked.host == nullptr ? 0 : asked.host->num_stored()};
}

// Only where the peak could move is it worth counting what the cache protects.
void CacheManager::note_peak(Replica& replica) {
    std::int64_t& peak = replica.metrics.peak_used_pages;
    const std::int64_t not_free = config_.num_blocks - replica.pool.num_free();
    if (not_free > peak) peak = std::max(peak, not_free - replica.tree.num_evictable());
}

Metrics CacheManager::metrics() const {
    const Lock lock(mutex_);
    Metrics sum;
    for (const auto& replica : replicas_) sum += replica->metrics;
    return sum;
}

void CacheManager::reset_metrics() {
    const Lock lock(mutex_);
    ++count_epoch_;
    for (const auto& replica : replicas_) {
        replica->metrics = {};
        note_peak(*replica);
    }
}

}  // namespace kvcore
