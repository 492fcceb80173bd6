// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "fakes/simulated_store.hpp"
#include "kvcore/cache_manager.hpp"
#include "kvcore/eviction.hpp"
#include "oracle/group_oracle.hpp"
#include "support/check.hpp"

/// A request of the traffic, and the columns that it should have of each window.
struct GroupRow {
    Request request;
    std::int32_t replica = 0;
    std::vector<std::int64_t> first{};  // first column that a window reads, by window
    std::int64_t reserved = 0;          // columns that have pages of windows
    std::int64_t size = 0;              // columns
    bool has_declined = false;          // a hit inside a page
};

/// The memory of the pages, and an oracle of the pages that each request should hold.
class GroupRows {
   public:
    using Probe = kvcore::CacheManagerProbe;
    using Rows = std::vector<GroupRow>;

    explicit GroupRows(const kvcore::CacheConfig& config, kvcore::EvictionOrder order = {})
        : manager(config, [=] { return kvcore::make_policy({order}, config.page_size); }),
          oracle(config) {
        const std::int64_t tokens = config.num_pages * config.page_size;
        const auto num_replicas = static_cast<std::size_t>(config.num_replicas);
        memory_.assign(num_replicas, std::vector<Digest>(static_cast<std::size_t>(tokens)));
        const std::int64_t below = config.host_pages * config.page_size;
        below_.assign(num_replicas, std::vector<Digest>(static_cast<std::size_t>(below)));
        for (std::size_t g = 0; g < config.groups.size(); ++g) {
            const kvcore::CacheGroup& group = config.groups[g];
            const bool is_full = group.kind == kvcore::GroupKind::kFull;
            for (std::int32_t b = 0; b < group.num_bundles; ++b) {
                bundles.push_back({is_full ? -1 : num_windows_,
                                   group.page_size == 0 ? config.page_size : group.page_size});
            }
            if (!is_full) ++num_windows_;
        }
    }

    struct Bundle {
        std::int32_t window = -1;
        std::int64_t page_size = 0;
    };

    kvcore::CacheManager manager;
    GroupOracle oracle;
    std::vector<Bundle> bundles;

    [[nodiscard]] GroupRow claimed(Request request, std::int32_t replica) {
        request.sequence = manager.claim(replica);
        GroupRow row{std::move(request), replica};
        row.first.assign(static_cast<std::size_t>(num_windows_), 0);
        return row;
    }
    [[nodiscard]] const kvcore::Sequence& sequence(const GroupRow& row) const {
        return Probe::sequence(manager, row.request.sequence);
    }
    [[nodiscard]] std::vector<std::vector<BlockId>> pages_of(const GroupRow& row) const {
        std::vector<std::vector<BlockId>> pages;
        for (std::size_t b = 0; b < bundles.size(); ++b) {
            pages.push_back(manager.pages_of(row.request.sequence, static_cast<std::int32_t>(b)));
        }
        return pages;
    }

    /// A call gave the row pages for `steps` steps; `hit_before`: the tokens of its earlier hit.
    void reserved(GroupRow& row, std::int64_t hit_before, std::int64_t steps) const {
        const std::int64_t size = size_of(row);
        const std::int64_t hit = sequence(row).hit_tokens;
        row.reserved = std::min(row.reserved, size);
        if (hit > hit_before) {
            CHECK_EQ(row.request.start, hit);
            for (std::size_t w = 0; w < row.first.size(); ++w) {
                row.first[w] = oracle.first_column(w, hit);
            }
            row.reserved = std::max(row.reserved, hit / manager.config().page_size);
        }
        const std::int64_t wanted = oracle.columns(row.request.active + steps - 1);
        CHECK(size >= oracle.columns(std::max(row.request.active, row.request.end()) + steps - 1));
        row.reserved = std::max(row.reserved, std::min(size, wanted));
        row.size = size;
    }
    /// The row has written `n` tokens.
    void advanced(GroupRow& row, std::int64_t n) const {
        const std::int64_t drafts = manager.config().max_draft_tokens;
        n = std::max<std::int64_t>(0, n - (drafts > 0 ? drafts + 1 : 0));
        for (std::size_t w = 0; w < row.first.size(); ++w) {
            row.first[w] = std::max(row.first[w], std::min(row.size, oracle.first_column(w, n)));
        }
    }
    void cut(GroupRow& row, std::int64_t columns) const {
        row.size = std::min(row.size, columns);
        row.reserved = std::min(row.reserved, columns);
    }
    [[nodiscard]] bool can_read(const GroupRow& row, std::int64_t n) const {
        for (std::size_t w = 0; w < row.first.size(); ++w) {
            if (oracle.first_column(w, n) < row.first[w]) return false;
        }
        return true;
    }

    /// Check that the row has exactly the pages that its layers read or write next.
    void check_row(const GroupRow& row) const {
        const auto pages = pages_of(row);
        for (std::size_t b = 0; b < bundles.size(); ++b) {
            const std::int64_t per_column = manager.config().page_size / bundles[b].page_size;
            CHECK_EQ(count(pages[b]), row.size * per_column);
            for (std::int64_t i = 0; i < count(pages[b]); ++i) {
                const std::int64_t column = i / per_column;
                const bool is_held =
                    bundles[b].window < 0 ||
                    (column >= item(row.first, bundles[b].window) && column < row.reserved);
                const bool is_brought =
                    is_held && bundles[b].window >= 0 &&
                    Probe::flights(manager).brings(sequence(row), static_cast<std::int32_t>(column),
                                                   static_cast<std::size_t>(bundles[b].window));
                CHECK_EQ(item(pages[b], i) >= 0 || is_brought, is_held);
            }
        }
    }
    /// Check that the content that its layers read in the next step was written for this row.
    void read(const GroupRow& row) {
        const auto pages = pages_of(row);
        for (std::size_t b = 0; b < bundles.size(); ++b) {
            const std::int32_t w = bundles[b].window;
            const std::int64_t first =
                w < 0 ? 0 : oracle.first_read(item(oracle.windows, w), row.request.start);
            for (std::int64_t p = first; p < row.request.start; ++p) {
                CHECK_EQ(slot(row, pages[b], b, p), content(row.request, p, b));
            }
        }
    }
    /// The model writes positions from .. to - 1.
    void write(const GroupRow& row, std::int64_t from, std::int64_t to) {
        const auto pages = pages_of(row);
        for (std::size_t b = 0; b < bundles.size(); ++b) {
            for (std::int64_t p = from; p < to; ++p) {
                slot(row, pages[b], b, p) = content(row.request, p, b);
            }
        }
    }
    /// If not `done`, the destinations get garbage.
    void copy(const std::vector<kvcore::PageMove>& moves, bool done = true) {
        for (const kvcore::PageMove& move : moves) {
            const std::vector<Digest>& from = memory(move.source_tier, move.replica);
            std::vector<Digest>& to = memory(move.destination_tier, move.replica);
            const std::int64_t size = manager.config().page_size;
            for (std::int64_t t = 0; t < move.num_tokens; ++t) {
                Digest& word = item(to, move.destination * size + t);
                word = done ? item(from, move.source * size + t) : 1;
            }
        }
    }
    void copy(const kvcore::Transfers& transfers, bool done = true) {
        copy(transfers.copies, done);
        copy(transfers.tier_moves, done);
    }

    /// Check that each cached page was written for exactly its tokens.
    void check_cached(std::int32_t replica, const Cached& cached,
                      kvcore::Tier tier = kvcore::Tier::kDevice) {
        const std::int64_t size = manager.config().page_size;
        for (const auto& [end, column] : cached) {
            Digest digest = column.parent;
            for (std::int64_t t = 0; t < size; ++t) {
                digest = digest_after(digest, item(column.tokens, t));
                std::int64_t lane = 0;
                for (std::size_t b = 0; b < bundles.size(); ++b) {
                    const std::int64_t page_size = bundles[b].page_size;
                    const BlockId page = item(column.pages, lane + t / page_size);
                    lane += size / page_size;
                    if (page < 0) continue;
                    const Digest word = item(memory(tier, replica), page * size + t % page_size);
                    CHECK_EQ(word, scramble(digest + b));
                }
            }
        }
    }
    /// The content of the host tier's pages.
    [[nodiscard]] StoredWords stored_words() {
        std::vector<std::pair<std::size_t, std::int64_t>> lanes;  // bundle, first token
        for (std::size_t b = 0; b < bundles.size(); ++b) {
            for (std::int64_t t = 0; t < manager.config().page_size; t += bundles[b].page_size) {
                lanes.emplace_back(b, t);
            }
        }
        StoredWords words;
        words.size = [=](std::int32_t lane) { return bundles[item(lanes, lane).first].page_size; };
        words.word = [=](std::int32_t replica, std::int32_t, BlockId page,
                         std::int64_t i) -> Digest& {
            return item(item(below_, replica), std::int64_t{page} * manager.config().page_size + i);
        };
        words.expected = [=](const std::vector<Digest>& ends, std::int32_t lane, std::int64_t i) {
            const auto [bundle, first] = item(lanes, lane);
            return scramble(item(ends, first + i) + bundle);
        };
        return words;
    }
    /// Overwrite free pages: no reader may depend on their old content.
    void spoil_free_pages(std::int32_t replica) {
        const kvcore::BlockPool& pool = Probe::replica(manager, replica).columns->pages();
        const std::int64_t size = manager.config().page_size;
        for (std::int64_t page = 0; page < pool.num_blocks(); ++page) {
            if (pool.ref_count(static_cast<BlockId>(page)) > 0) continue;
            std::fill_n(item(memory_, replica).begin() + page * size, size, 0);
        }
    }

    /// Pages of a replica that rows, pinned prefixes and copies hold.
    [[nodiscard]] std::set<BlockId> used(const Rows& rows, std::int32_t replica,
                                         const Cached& cached, std::set<BlockId> pinned) const {
        std::set<BlockId> used = std::move(pinned);
        for (const GroupRow& row : rows) {
            if (row.replica != replica) continue;
            for (const auto& pages : pages_of(row)) used.insert(pages.begin(), pages.end());
            // The tree may hold another page for a row's column. It protects the full-attention
            // pages.
            const kvcore::PageRow& held = sequence(row).pages;
            for (const auto& [digest, column] : cached) {
                if (is_above(column.id, replica, held)) add_full(used, {&column});
            }
        }
        const auto& columns = *Probe::replica(manager, replica).columns;
        for (const auto& copy : Probe::copies(manager)) {
            if (copy.copy.replica != replica) continue;
            for (std::int32_t lane = 0; lane < oracle.lanes(); ++lane) {
                used.insert(columns.page(copy.source.column(), lane));
                used.insert(columns.page(copy.destination.column(), lane));
            }
            // A pinned source also keeps all columns before it in the tree.
            if (copy.source.at().node != nullptr) add_above(used, cached, copy.source.column());
        }
        used.erase(-1);
        return used;
    }
    /// Add the pages of columns that are being copied between tiers.
    void add_flights(std::set<BlockId>& used, std::int32_t replica) const {
        const auto& columns = *Probe::replica(manager, replica).columns;
        Probe::flights(manager).for_each_column(replica, [&](BlockId column) {
            for (std::int32_t lane = 0; lane < oracle.lanes(); ++lane) {
                used.insert(columns.page(column, lane));
            }
        });
        used.erase(-1);
    }
    void add_full(std::set<BlockId>& used, const std::vector<const CachedColumn*>& path) const {
        for (const CachedColumn* column : path) {
            for (std::int64_t lane = 0; lane < oracle.lanes(); ++lane) {
                if (!is_window_lane(lane)) used.insert(item(column->pages, lane));
            }
        }
    }

   private:
    [[nodiscard]] std::vector<Digest>& memory(kvcore::Tier tier, std::int32_t replica) {
        return item(tier == kvcore::Tier::kDevice ? memory_ : below_, replica);
    }
    // Return true if the column is on the path to the row's last committed column.
    [[nodiscard]] bool is_above(BlockId id, std::int32_t replica,
                                const kvcore::PageRow& row) const {
        if (row.committed() == 0) return false;
        std::vector<BlockId> ids(static_cast<std::size_t>(row.committed()));
        Probe::replica(manager, replica)
            .tree.copy_pages({row.node(), row.committed()}, 0, ids.data());
        return std::find(ids.begin(), ids.end(), id) != ids.end();
    }
    [[nodiscard]] bool is_window_lane(std::int64_t lane) const {
        for (const GroupOracle::Window& window : oracle.windows) {
            if (lane >= window.first_lane && lane < window.first_lane + window.lanes) return true;
        }
        return false;
    }
    void add_above(std::set<BlockId>& used, const Cached& cached, BlockId id) const {
        for (auto at = cached.begin(); at != cached.end(); ++at) {
            if (at->second.id != id) continue;
            for (auto up = at; up != cached.end(); up = cached.find(up->second.parent)) {
                add_full(used, {&up->second});
            }
            return;
        }
    }
    [[nodiscard]] std::int64_t size_of(const GroupRow& row) const {
        const std::int64_t per_column = manager.config().page_size / bundles[0].page_size;
        return count(manager.pages_of(row.request.sequence, 0)) / per_column;
    }
    static Digest content(const Request& request, std::int64_t position, std::size_t bundle) {
        return scramble(request.digest(position + 1) + bundle);
    }
    Digest& slot(const GroupRow& row, const std::vector<BlockId>& pages, std::size_t bundle,
                 std::int64_t position) {
        const std::int64_t page_size = bundles[bundle].page_size;
        const BlockId page = item(pages, position / page_size);
        CHECK(page >= 0);
        return item(item(memory_, row.replica),
                    std::int64_t{page} * manager.config().page_size + position % page_size);
    }

    std::int32_t num_windows_ = 0;
    std::vector<std::vector<Digest>> memory_;  // [replicas][pages * page_size]
    std::vector<std::vector<Digest>> below_;   // [replicas][host pages * page_size]
};
