// SPDX-License-Identifier: Apache-2.0
#include "cache/queries.hpp"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "cache/validate_requests.hpp"
#include "kvcore/errors.hpp"
#include "layers/hit_search.hpp"
#include "level/level.hpp"
#include "tree/tree_node.hpp"

namespace kvcore::queries {
namespace {

// The number of tokens after the first `whole` pages that a hit could copy.
std::int32_t find_part(const Replica& replica, const TokenId* tokens, std::int64_t n,
                       const PrefixMatch& found, std::int32_t whole) {
    if (replica.states != nullptr) return 0;
    if (replica.columns == nullptr) return found.partial_tokens;
    const HitSearch search(*replica.columns, replica.tree, tokens, n);
    const PrefixMatch part = search.longest(found, 1);
    return part.at.depth == whole ? part.partial_tokens : 0;
}

void require_bundle(const Grouping& grouping, std::int32_t bundle) {
    const auto n = static_cast<std::int32_t>(grouping.bundles().size());
    if (bundle >= 0 && bundle < n) return;
    throw std::out_of_range(
        detail::concat("bundle ", bundle, " does not exist, there are ", n, ", counted from 0"));
}

// With groups: replaces the columns of a hit in `pages` by their pages in a bundle.
void choose_pages(const ColumnPages& all, std::int32_t bundle, std::vector<BlockId>& pages) {
    const Grouping& grouping = all.grouping();
    const Grouping::Bundle& asked = grouping.bundles()[static_cast<std::size_t>(bundle)];
    const std::size_t depth = pages.size();
    std::size_t first_read = 0;
    if (asked.window >= 0) {
        const auto& window = grouping.windows()[static_cast<std::size_t>(asked.window)];
        const auto tokens = static_cast<std::int64_t>(depth) * grouping.column_tokens();
        first_read = static_cast<std::size_t>(grouping.first_column(window, tokens));
    }
    const auto per_column = static_cast<std::size_t>(asked.pages_per_column);
    pages.resize(depth * per_column);
    BlockId* ids = pages.data();
    for (std::size_t column = depth; column-- > first_read;) {  // backwards, to overwrite in place
        const BlockId id = ids[column];
        for (std::size_t i = per_column; i-- > 0;) {
            ids[column * per_column + i] =
                all.page(id, static_cast<std::int32_t>(asked.first_lane + i));
        }
    }
    std::fill_n(ids, first_read * per_column, ColumnPages::kNoPage);
}

// Finds the cached prefix of the tokens; depth 0 without a node if the namespace has no page.
// Inline: a match is as short as a call.
inline TreePosition find(const Replica& replica, std::string_view name_space, const TokenId* tokens,
                         std::int64_t n, std::vector<BlockId>* pages, std::int32_t* partial_tokens,
                         std::int32_t bundle) {
    TreeNode* root = replica.tree.find_namespace(name_space);
    PrefixMatch found;
    if (root != nullptr) found = replica.tree.match(root, tokens, n, partial_tokens != nullptr);
    TreePosition at = found.at;
    if (replica.narrows_hits() && at.depth > 0) {
        at = PrefixTree::position(at.node, replica.longest_hit(at));
    }
    if (partial_tokens != nullptr) {
        *partial_tokens = root == nullptr ? 0 : find_part(replica, tokens, n, found, at.depth);
    }
    if (pages == nullptr) return at;
    pages->resize(static_cast<std::size_t>(at.depth));
    if (at.depth > 0) replica.tree.copy_pages(at, 0, pages->data());
    if (replica.columns != nullptr) choose_pages(*replica.columns, bundle, *pages);
    return at;
}

}  // namespace

std::int64_t match(const Replica& replica, std::string_view name_space, const TokenId* tokens,
                   std::int64_t n, std::vector<BlockId>* pages, std::int32_t* partial_tokens,
                   std::int32_t bundle) {
    if (bundle != 0) require_bundle(replica.grouping(), bundle);
    return find(replica, name_space, tokens, n, pages, partial_tokens, bundle).depth;
}

std::int64_t touch(Replica& replica, std::string_view name_space, const TokenId* tokens,
                   std::int64_t n, std::vector<BlockId>* pages, std::int32_t* partial_tokens,
                   std::int64_t most_pages, std::int32_t bundle) {
    if (bundle != 0) require_bundle(replica.grouping(), bundle);
    const TreePosition at = find(replica, name_space, tokens, n, pages, partial_tokens, bundle);
    if (pages != nullptr && static_cast<std::int64_t>(pages->size()) > most_pages) return at.depth;
    replica.touch(replica.tree, at);
    replica.tree.touch(at);
    return at.depth;
}

std::int32_t recommend_replica(const CacheData& cache, std::string_view name_space,
                               const TokenId* tokens, std::int64_t n) {
    using Merit = std::tuple<std::int64_t, std::int64_t, std::int64_t>;
    std::int32_t best = 0;
    Merit most{-1, -1, 0};
    for (std::int32_t i = 0; i < cache.config.num_replicas; ++i) {
        const Replica& replica = cache.replica_at(i);
        std::int64_t hit = 0;
        if (cache.config.prefix_caching) {
            hit = tiered::count_columns(replica, name_space, tokens, n);
        }
        const Merit merit{hit, replica.num_available(), -replica.num_sequences};
        if (i == 0 || merit > most) {
            most = merit;
            best = i;
        }
    }
    return best;
}

std::vector<BlockId> pages_of(const CacheData& cache, SequenceHandle handle, std::int32_t bundle,
                              std::int64_t first) {
    const Sequence& sequence = cache.sequences.at(handle);
    require_bundle(cache.grouping, bundle);
    if (first < 0) {
        throw std::invalid_argument(detail::concat("first is ", first, ", must be at least 0"));
    }
    if (cache.is_plain) {
        const std::vector<BlockId>& ids = sequence.pages.ids();
        return {ids.begin() + std::min<std::int64_t>(first, sequence.pages.size()), ids.end()};
    }
    const Grouping::Bundle& asked = cache.grouping.bundles()[static_cast<std::size_t>(bundle)];
    const std::int32_t per_column = asked.pages_per_column;
    const ColumnPages& columns = *cache.home_of(sequence).columns;
    const WindowRow& reader = cache.windows.of(handle);
    const std::int32_t first_read =
        asked.window < 0 ? 0 : reader.first[static_cast<std::size_t>(asked.window)];
    std::vector<BlockId> pages;
    for (std::int64_t i = first; i < std::int64_t{sequence.pages.size()} * per_column; ++i) {
        const auto c = static_cast<std::int32_t>(i / per_column);
        const auto lane = static_cast<std::int32_t>(asked.first_lane + i % per_column);
        pages.push_back(c < first_read ? ColumnPages::kNoPage
                                       : columns.page(sequence.pages[c], lane));
    }
    return pages;
}

std::vector<BlockId> next_pages(const Replica& replica) {
    if (replica.columns != nullptr || replica.owners != nullptr) {
        throw std::invalid_argument(
            "with groups of layers or quotas, the next pages depend on the request; call this on a "
            "manager without them");
    }
    const std::vector<BlockId> cached = replica.tree.evictable_pages();
    std::vector<BlockId> pages(static_cast<std::size_t>(replica.pool.num_free()));
    replica.pool.copy_free(pages.data());
    pages.insert(pages.end(), cached.begin(), cached.end());
    return pages;
}

std::vector<TokenId> tokens_up_to(const CacheData& cache, TokenId highest) {
    std::vector<TokenId> found;
    for (const auto& replica : cache.replicas) {
        replica->for_each_level(
            [&](const Level& level) { level.tree.find_tokens_up_to(highest, found); });
    }
    const auto add = [&](const auto& tokens) {
        std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(found),
                     [&](TokenId token) { return token <= highest; });
    };
    for (const TierFlight& flight : cache.ledger.flights.all()) add(flight.tokens);
    for (const StoreFill& fill : cache.ledger.flights.fills()) add(fill.tokens);
    for (const ColumnImport* import : cache.cache_copies.imports()) add(import->tokens());
    if (cache.events != nullptr) cache.events->find_tokens_up_to(highest, found);
    return found;
}

SequenceMark mark_of(const CacheData& cache, SequenceHandle handle) {
    const Sequence& sequence = cache.sequences.at(handle);
    if (sequence.num_pending > 0) rules::refuse_pending(-1);
    SequenceMark mark;
    mark.written = sequence.written;
    mark.pages = sequence.pages.version();
    if (!cache.is_plain) mark.windows = cache.windows.of(handle).version;
    if (cache.has_states) {
        const RecurrentState& row = cache.states.of(handle);
        mark.state = row.at;
        mark.run = row.run;
    }
    return mark;
}

std::int64_t first_uncached(const CacheData& cache, SequenceHandle handle) {
    const Sequence& sequence = cache.sequences.at(handle);
    if (!sequence.is_sealed()) return 0;
    return std::int64_t{sequence.pages.committed()} * cache.config.page_size;
}

PoolStats stats(const CacheData& cache, std::int32_t replica) {
    const Replica& asked = cache.replica_at(replica);
    return {cache.config.num_pages, asked.num_free(),    asked.num_cached(),
            asked.num_evictable(),  asked.num_sequences, cache.config.host_pages,
            asked.num_stored()};
}

std::vector<TenantStats> tenant_stats(const Replica& replica) {
    std::vector<TenantStats> stats;
    if (replica.owners == nullptr) return stats;
    static_cast<void>(replica.num_evictable());  // reports recent pins to the owners
    const HeldCounts& counts = replica.owners->counts();
    for (std::size_t i = 1; i < counts.num_owners(); ++i) {
        const auto owner = static_cast<Owner>(i);
        const TenantQuota& quota = counts.quota(owner);
        const OwnerTally& tally = replica.owners->tally(owner);
        stats.push_back({counts.held(owner), quota.reserved_pages, quota.max_pages, tally.refused,
                         tally.input_tokens, tally.cache_tokens, tally.generated_tokens});
    }
    return stats;
}

Metrics metrics(const CacheData& cache) noexcept {
    Metrics sum;
    for (const auto& replica : cache.replicas) sum += replica->counted();
    return sum;
}

namespace {

/// Pages that some rows hold at the same place: a run of the prefix tree or, after the runs, one
/// page that forks share.
struct Stretch {
    std::int64_t end = 0;  // tokens
    std::size_t most_rows_below = 0;
    std::vector<std::int32_t> rows;
    std::vector<std::int64_t> reach;  // of each row: its written tokens, at most `end`
};

/// The stretches of one replica's rows, as a tree.
class Stretches {
   public:
    /// Adds a row to the stretch `key` under `above` (0: the root).
    std::size_t enter(std::size_t above, std::uint64_t key, std::int64_t end, std::int32_t row,
                      std::int64_t written) {
        const std::size_t id = ids_.try_emplace({above, key}, stretches_.size()).first->second;
        if (id == stretches_.size()) stretches_.push_back({end, 0, {}, {}});
        Stretch& stretch = stretches_[id];
        stretch.rows.push_back(row);
        stretch.reach.push_back(std::min(end, written));
        std::size_t& most = stretches_[above].most_rows_below;
        most = std::max(most, stretch.rows.size());
        return id;
    }
    /// Adds each stretch that several rows hold, unless the same rows all continue together.
    void collect(std::int32_t replica, std::vector<SharedPrefix>& groups) const {
        for (std::size_t id = 1; id < stretches_.size(); ++id) {
            const Stretch& stretch = stretches_[id];
            for (const std::int64_t tokens : std::set(stretch.reach.begin(), stretch.reach.end())) {
                SharedPrefix group{replica, tokens, {}};
                for (std::size_t i = 0; i < stretch.rows.size(); ++i) {
                    if (stretch.reach[i] >= tokens) group.rows.push_back(stretch.rows[i]);
                }
                const bool all_go_on =
                    tokens == stretch.end && stretch.most_rows_below == group.rows.size();
                if (group.rows.size() > 1 && !all_go_on) groups.push_back(std::move(group));
            }
        }
    }

   private:
    std::map<std::pair<std::size_t, std::uint64_t>, std::size_t> ids_;
    std::vector<Stretch> stretches_{1};
};

// The runs from the root of its namespace to `node`.
std::vector<const TreeNode*> path_to(const TreeNode* node) {
    std::vector<const TreeNode*> path;
    for (; node != nullptr && !node->is_root(); node = node->parent) path.push_back(node);
    std::reverse(path.begin(), path.end());
    return path;
}

// Enters the stretches of a row. An own duplicate begins at a run boundary, because it was
// committed after a run.
void enter(Stretches& stretches, const PageRow& pages, std::int32_t row, std::int64_t written,
           std::int64_t page_size) {
    std::size_t at = 0;
    const std::int32_t cached = pages.num_cached();
    for (const TreeNode* node : path_to(pages.node())) {
        if (node->end() > cached || written <= node->start * page_size) break;
        const std::uint64_t key = std::uint64_t{node->id} << 1;
        at = stretches.enter(at, key, node->end() * page_size, row, written);
    }
    const auto num_pages = static_cast<std::int32_t>(ceil_div(written, page_size));
    const std::int32_t end = std::min(pages.read_only_end(), num_pages);
    for (std::int32_t column = cached; column < end; ++column) {
        const std::uint64_t key = static_cast<std::uint64_t>(pages[column]) << 1 | 1;
        at = stretches.enter(at, key, (column + 1) * page_size, row, written);
    }
}

}  // namespace

std::vector<SharedPrefix> shared_prefixes(const CacheData& cache, const RequestBatch& batch) {
    std::vector<Stretches> parts(cache.replicas.size());
    std::vector<std::int32_t> num_rows(cache.replicas.size());
    for (std::int64_t i = 0; i < batch.size(); ++i) {
        const Sequence& sequence = cache.sequences.at(batch[i].sequence);
        const auto home = static_cast<std::size_t>(sequence.replica);
        const std::int64_t written = std::min(sequence.written, batch[i].start);
        enter(parts[home], sequence.pages, num_rows[home]++, written, cache.config.page_size);
    }
    std::vector<SharedPrefix> groups;
    for (std::size_t r = 0; r < parts.size(); ++r) {
        parts[r].collect(static_cast<std::int32_t>(r), groups);
    }
    std::stable_sort(groups.begin(), groups.end(),
                     [](const auto& a, const auto& b) { return a.num_tokens > b.num_tokens; });
    return groups;
}

}  // namespace kvcore::queries
