// SPDX-License-Identifier: Apache-2.0
#include "cache/validate_requests.hpp"

#include <algorithm>
#include <stdexcept>

#include "kvcore/errors.hpp"
#include "level/quotas.hpp"

namespace kvcore {
namespace {

constexpr const char* kRemedy =
    "truncate to a token with a checkpoint, or release the request and claim again; "
    "max_draft_tokens, with two num_states for each request, keeps the state before drafts";

void require_state(const CacheData& cache, std::int64_t start, SequenceHandle handle,
                   std::int64_t row) {
    if (cache.states.can_go_on(handle, start)) return;
    const RecurrentState& known = cache.states.of(handle);
    throw InRow<std::invalid_argument>(
        row, detail::concat("start_idx is ", start, ", but the request's state is that of token ",
                            known.run > known.at ? known.run : known.at, "; ", kRemedy));
}

}  // namespace

namespace rules {

void refuse_indices(const RequestView& request, std::int64_t row) {
    throw InRow<std::invalid_argument>(
        row,
        detail::concat("start_idx ", request.start, ", active_idx ", request.active, ", end_idx ",
                       request.end, " break 0 <= start < active <= end; set the indices first"));
}

void refuse_length(const CacheData& cache, const RequestView& request, std::int64_t row,
                   std::int64_t num_steps) {
    const CacheConfig& config = cache.config;
    if (request.end > cache.most_pooled_tokens()) {
        throw InRow<CapacityError>(
            row, detail::concat(request.end, " tokens need ", cache.least_pages(request.end),
                                " pages, more than the whole pool of ", config.num_pages,
                                "; give the pool more memory"));
    }
    const auto length =
        static_cast<std::uint64_t>(request.end) + static_cast<std::uint64_t>(num_steps) - 1;
    throw InRow<CapacityError>(
        row, detail::concat(request.end, " tokens + ", num_steps, " steps - 1 = ", length,
                            " exceed max_seq_len ", config.max_seq_len,
                            "; end the request or run fewer steps"));
}

void refuse_repetition(std::int64_t row) {
    throw InRow<std::invalid_argument>(
        row, detail::concat("row ", row,
                            " repeats a request of an earlier row of the batch; "
                            "name each request once"));
}

void refuse_pending(std::int64_t row) {
    throw InRow<PendingTransfersError>(row, "copies into its pages are pending; finish them first");
}

void refuse_steps(std::int64_t num_steps) {
    throw std::invalid_argument(detail::concat("num_steps is ", num_steps, ", must be at least 1"));
}

void refuse_namespace(std::int64_t row) {
    throw InRow<std::invalid_argument>(
        row,
        "the claim began in another namespace and has pages of it; "
        "release it and claim again to change extra_key or cache_salt");
}

void refuse_options(const ReserveOptions& options) {
    const bool is_hit = options.max_hit < 0;
    const bool is_free = options.keep_free < 0;
    const char* name = is_hit ? "max_hit" : is_free ? "keep_free" : "must_fit";
    const std::int64_t value = is_hit    ? options.max_hit
                               : is_free ? options.keep_free
                                         : options.must_fit;
    throw std::invalid_argument(detail::concat(name, " is ", value, ", must be at least 0"));
}

void require_fit(const CacheData& cache, const Sequence& sequence, const RequestView& request,
                 const ReserveOptions& options, std::int64_t row) {
    const std::int64_t tokens = options.must_fit;
    const std::int64_t most = cache.most_tokens(1);
    if (tokens > most) {
        throw InRow<CapacityError>(
            row, detail::concat("must_fit is ", tokens, " tokens, must be at most ", most,
                                ": the limit of max_seq_len and the pool of ",
                                cache.config.num_pages, " pages; ask for less"));
    }
    if (!cache.config.quotas.empty()) {
        quotas::require_ceiling(cache, sequence, request, std::max(tokens, request.end), row,
                                options.max_hit);
    }
}

void require_windows(const CacheData& cache, const Sequence& sequence, std::int64_t start,
                     SequenceHandle handle, std::int64_t row) {
    if (cache.has_states) {
        require_state(cache, start, handle, row);
        start = cache.states.begin_of(handle, start);
    }
    if (cache.is_plain || sequence.pages.empty()) return;
    if (cache.windows.can_read(handle, start)) return;
    throw InRow<std::invalid_argument>(
        row, detail::concat("start_idx ", start,
                            " lies where windows have given their pages back; set it no further "
                            "back than truncate may go, or release the request and claim again"));
}

void require_run(const CacheData& cache, const RequestView& request, std::int64_t row) {
    if (cache.states.can_run(request.sequence, request.start)) return;
    throw InRow<std::invalid_argument>(
        row, detail::concat("start_idx is ", request.start,
                            ", as when the request was fetched, but tokens up to ",
                            cache.states.of(request.sequence).run,
                            " may be in its state since; commit what ran, ", kRemedy));
}

void require_transfers(const CacheData& cache, Transfers* transfers) {
    if (transfers == nullptr) {
        throw std::invalid_argument(
            detail::concat("transfers are missing, must be given to a manager with ",
                           cache.config.host_pages, " host pages"));
    }
    if (!transfers->empty()) {
        throw std::invalid_argument(detail::concat("transfers hold copies of ticket ",
                                                   transfers->ticket,
                                                   ", must be empty; finish and clear them first"));
    }
    const std::size_t listed =
        cache.ledger.copy_list.size() + cache.ledger.state_copies.list_size();
    if (listed > 0) {
        throw std::invalid_argument(
            detail::concat("transfers are given, but ", listed,
                           " copies are on the list; call take_copies first, and use one of both"));
    }
    transfers->clear();  // a call that gave out nothing may have moved requests
}

}  // namespace rules

namespace quotas {
namespace {

// The most pages that an owner can hold: its quota, without pages that are reserved for others.
std::int64_t ceiling_of(const Replica& home, Owner owner) {
    const HeldCounts& counts = home.owners->counts();
    const TenantQuota& quota = counts.quota(owner);
    const std::int64_t of_others = counts.num_reserved() - quota.reserved_pages;
    return std::min(home.num_pages() - of_others, quota.max_pages);
}

// The pages that a request shares: the pages of its row, or else the cached pages of its prompt.
// With groups, pages of windows are only counted, because they change.
struct Shared {
    std::vector<BlockId> pages;
    std::int64_t in_windows = 0;
};

Shared shared_pages(const Replica& home, const Sequence& sequence, const RequestView& request,
                    std::int64_t limit) {
    Shared shared;
    const auto add = [&](BlockId column) {
        const auto before = static_cast<std::int64_t>(shared.pages.size());
        home.for_each_full_page(column, [&](BlockId page) { shared.pages.push_back(page); });
        const std::int64_t in_full = static_cast<std::int64_t>(shared.pages.size()) - before;
        shared.in_windows += home.count_pages(column) - in_full;
    };
    TreeNode* root = home.tree.find_namespace(request.name_space);
    if (sequence.is_sealed() || root == nullptr) {
        for (const BlockId column : sequence.pages.ids()) add(column);
        return shared;
    }
    const TreePosition at = home.tree.match(root, request.tokens, limit).at;
    ColumnsUp columns(at, home.tree.page_size());
    for (std::int32_t c = at.depth - 1; c >= 0; --c) add(columns[c]);
    return shared;
}

}  // namespace

bool exceeds_ceiling(const CacheData& cache, const Sequence& sequence, const RequestView& request,
                     std::int64_t tokens, Owner owner, std::int64_t max_hit) {
    const Replica& home = cache.home_of(sequence);
    const std::int64_t pages = cache.least_pages(tokens);
    if (pages <= ceiling_of(home, owner)) return false;
    const Shared shared = shared_pages(home, sequence, request, cache.hit_limit(request, max_hit));
    QuotaTrial alone(*home.owners, home.num_pages(), HeldCounts(cache.config.quotas));
    for (const BlockId page : shared.pages) alone.hold(page);
    const auto known = static_cast<std::int64_t>(shared.pages.size()) + shared.in_windows;
    alone.take(owner, std::max<std::int64_t>(0, pages - known));
    for (const BlockId page : shared.pages) alone.share_out(page, owner);
    return !alone.is_lawful();
}

void require_ceiling(const CacheData& cache, const Sequence& sequence, const RequestView& request,
                     std::int64_t tokens, std::int64_t row, std::int64_t max_hit) {
    const Owner owner = cache.tenants.of(request.sequence);
    if (!exceeds_ceiling(cache, sequence, request, tokens, owner, max_hit)) return;
    throw InRow<CapacityError>(
        row, detail::concat(tokens, " tokens need ", cache.least_pages(tokens),
                            " pages, more than the ", ceiling_of(cache.home_of(sequence), owner),
                            " that quotas leave its tenant; raise its max_pages, or reserve less "
                            "for others"));
}

}  // namespace quotas

}  // namespace kvcore
