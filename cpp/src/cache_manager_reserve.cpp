// SPDX-License-Identifier: Apache-2.0
// A reservation in two halves: `admit` works out what it would do and changes nothing, `apply` does
// it and cannot fail. `plan` is the first half alone, so it tells exactly what `reserve` would do.
#include <algorithm>
#include <stdexcept>

#include "admission.hpp"
#include "kvcore/errors.hpp"

namespace kvcore {

void CacheManager::refuse_indices(const RequestView& request, std::int64_t row) const {
    throw InRow<std::invalid_argument>(
        row,
        detail::concat("start_idx ", request.start, ", active_idx ", request.active, ", end_idx ",
                       request.end, " break 0 <= start < active <= end; set the indices first"));
}

void CacheManager::refuse_length(const RequestView& request, std::int64_t row,
                                 std::int64_t num_steps) const {
    const std::int64_t pages = ceil_div(request.end, config_.page_size);
    if (pages > config_.num_blocks) {
        throw InRow<CapacityError>(
            row, detail::concat(request.end, " tokens need ", pages,
                                " pages, more than the whole pool of ", config_.num_blocks,
                                "; give the pool more memory"));
    }
    const auto length =
        static_cast<std::uint64_t>(request.end) + static_cast<std::uint64_t>(num_steps) - 1;
    throw InRow<CapacityError>(
        row, detail::concat(request.end, " tokens + ", num_steps, " steps - 1 = ", length,
                            " exceed max_seq_len ", config_.max_seq_len,
                            "; end the request or run fewer steps"));
}

// Prefix reuse is open only while nothing of the claim has been fetched or written.
void CacheManager::find_hit(Admission& admission, const Sequence& sequence,
                            const RequestView& request, bool allow_partial) const {
    const std::int64_t begin = admission.start;
    const bool is_open = !sequence.is_sealed && begin == sequence.hit_tokens;
    if (!config_.prefix_caching || !is_open || request.active - begin <= 1) return;
    const Replica& replica = replica_at(sequence.replica);
    TreeNode* root = replica.tree.find_namespace(request.name_space);
    if (root != nullptr) {
        // At least one token is left to run.
        admission.match = replica.tree.match(root, request.tokens, request.end - 1,
                                             allow_partial && config_.partial_page_reuse);
    }
    PrefixMatch& match = admission.match;
    std::int64_t hit = std::int64_t{match.at.depth} * config_.page_size + match.partial_tokens;
    if (replica.host != nullptr) hit = find_hit_below(admission, *replica.host, request, hit);
    if (hit <= sequence.hit_tokens) {
        match = {};
        admission.below = {};
        return;
    }
    admission.takes_hit = true;
    admission.hit_tokens = hit;
    admission.hit_pages = match.at.depth;
    admission.start = hit;
    if (hit >= request.active) {
        admission.active = std::min(request.end, hit + (request.active - begin));
    }
}

bool CacheManager::is_own(const Sequence& sequence, std::int32_t column) noexcept {
    return column >= sequence.committed ||
           std::binary_search(sequence.kept.begin(), sequence.kept.end(), column);
}

// Nobody else holds it: neither the tree nor a fork. Forks that let go of it in the same call have
// done so already.
bool CacheManager::is_sole_holder(const Sequence& sequence, std::int32_t column) const {
    if (!is_own(sequence, column)) return false;
    const BlockId page = sequence.pages[static_cast<std::size_t>(column)];
    std::uint32_t holders = replica_at(sequence.replica).pool.ref_count(page);
    if (holders > 1 && !leaving_.empty()) {
        const auto left = leaving_.find({sequence.replica, page});
        if (left != leaving_.end()) holders -= left->second;
    }
    return holders == 1;
}

std::int64_t CacheManager::count_sole(const Sequence& sequence, std::int64_t begin,
                                      std::int64_t end) const {
    std::int64_t count = 0;
    for (auto column = static_cast<std::int32_t>(begin); column < end; ++column) {
        count += is_sole_holder(sequence, column) ? 1 : 0;
    }
    return count;
}

// Pages that are free once the row is cut. Not those of forks that let go as well: they may be held
// for a copy until the call is over.
std::int64_t CacheManager::count_returned(const Sequence& sequence, std::int64_t from) const {
    const BlockPool& pool = replica_at(sequence.replica).pool;
    std::int64_t count = 0;
    for (auto column = static_cast<std::int32_t>(from); column < sequence.num_pages(); ++column) {
        const BlockId page = sequence.pages[static_cast<std::size_t>(column)];
        count += is_own(sequence, column) && pool.ref_count(page) == 1 ? 1 : 0;
    }
    return count;
}

// Counts pages: what is needed, what falls back to the pool, what would have to be evicted for it.
void CacheManager::weigh(Admission& admission, const Sequence& sequence,
                         std::int64_t needed) const {
    const std::int32_t held = sequence.num_pages();
    const std::int64_t first_written = admission.start / config_.page_size;
    admission.needed = static_cast<std::int32_t>(needed);
    admission.appended = std::max<std::int64_t>(0, needed - std::max(held, admission.hit_pages));
    admission.returned = std::min(held, admission.hit_pages) - sequence.committed;
    if (sequence.frozen > first_written) {  // never with a hit, which ends behind them
        const std::int64_t end = std::min<std::int64_t>(sequence.frozen, needed);
        admission.replaced =
            static_cast<std::int32_t>(std::max<std::int64_t>(0, end - first_written) -
                                      count_sole(sequence, first_written, end));
        if (sequence.frozen > needed) admission.returned = count_returned(sequence, needed);
    }

    const Replica& replica = replica_at(sequence.replica);
    const std::int64_t free = replica.pool.num_free() + admission.returned;
    admission.available = free;
    admission.evicted = std::max<std::int64_t>(0, admission.new_pages() - free);
    admission.fits = admission.evicted == 0;
    if (admission.fits) return;
    std::int64_t evictable = replica.tree.num_evictable();
    if (admission.shares()) {
        // What the hit takes is no longer there to evict, nor is the page it copies from.
        evictable -= replica.tree.num_unprotected(admission.match.at);
        const bool copies = admission.match.partial_tokens > 0;
        if (copies && !replica.tree.is_protected(admission.match.partial)) --evictable;
    }
    admission.available += evictable;
    admission.fits = admission.evicted <= evictable;
}

CacheManager::Admission CacheManager::admit(const Sequence& sequence, const RequestView& request,
                                            std::int64_t num_steps, bool allow_partial) const {
    Admission admission;
    admission.hit_pages = sequence.committed;
    // A claim that holds no page has nothing written, wherever its context stood before.
    admission.start = sequence.pages.empty() ? 0 : request.start;
    admission.active = request.active;
    find_hit(admission, sequence, request, allow_partial);
    weigh(admission, sequence, ceil_div(request.end + num_steps - 1, config_.page_size));
    if (!admission.fits && admission.match.partial_tokens > 0) {
        // Without its source as a victim it does not fit: both are dropped.
        return admit(sequence, request, num_steps, false);
    }
    return admission;
}

void CacheManager::take_hit(const Admission& admission, Replica& replica, Sequence& sequence) {
    TreeNode* node = replica.tree.split(admission.match.at);
    replica.tree.pin(node);
    if (sequence.node != nullptr) replica.tree.unpin(sequence.node, false);
    sequence.node = node;
    const std::int32_t first = sequence.committed;
    if (admission.hit_pages > first) {
        replica.pool.free(sequence.pages.data() + first, admission.returned);
        if (!sequence.pages.empty()) ++sequence.row_version;
        if (sequence.num_pages() < admission.hit_pages) {
            sequence.pages.resize(static_cast<std::size_t>(admission.hit_pages));
        }
        replica.tree.copy_pages({node, admission.hit_pages}, first, sequence.pages.data() + first);
        sequence.committed = sequence.frozen = admission.hit_pages;
    }
}

// The page that a hit copies from is the first behind it; no other page may be needed instead.
EvictionGuard CacheManager::guard_of(const Admission& admission, const Sequence& sequence) {
    if (admission.match.partial_tokens == 0) return {};
    const TreePosition& source = admission.match.partial;
    return {PrefixTree::position(source.node, source.depth).node,
            source.depth - PrefixTree::depth_of(sequence.node)};
}

// Free pages first, then evicted ones: those change hands without a detour through the pool. The
// caller has made sure that there are enough.
void CacheManager::take_pages(Replica& replica, std::int64_t n, BlockId* out, EvictionGuard guard) {
    const std::int64_t free = std::min(n, replica.pool.num_free());
    detail::require_law(replica.pool.allocate(free, out), "reserve: admitted pages are there");
    if (free == n) return;
    const std::int64_t evicted = replica.tree.evict(n - free, out + free, guard);
    detail::require_law(evicted == n - free, "reserve: admitted pages are there");
    replica.metrics.evicted_pages += evicted;
}

void CacheManager::append_pages(Replica& replica, Sequence& sequence, std::int64_t n,
                                EvictionGuard guard) {
    if (n == 0) return;
    const std::size_t held = sequence.pages.size();
    sequence.pages.resize(held + static_cast<std::size_t>(n));
    take_pages(replica, n, &sequence.pages[held], guard);
}

// With `copies` the caller copies at once, and the source is held until it has; without, the copy
// is on the list that take_copies hands out before the next kernels run.
void CacheManager::owe_copy(PageCopy copy, TreePosition source, Replica& replica,
                            std::vector<PageCopy>* copies) {
    if (copies != nullptr) {
        copy.held = PrefixTree::position(source.node, source.depth).node;
        replica.tree.pin(copy.held);
        copies->push_back(copy);
        return;
    }
    put_on_list(copy);
}

// The same of a page that forks hold: the reference given up is the one that holds it.
void CacheManager::owe_shared_copy(const PageCopy& copy, Replica& replica,
                                   std::vector<PageCopy>* copies) {
    if (copies != nullptr) {
        held_sources_.push_back(copy);
        copies->push_back(copy);
        return;
    }
    put_on_list(copy);
    replica.pool.free(&copy.source, 1);
}

void CacheManager::put_on_list(const PageCopy& copy) {
    prune_copies();
    owed_copies_.push_back(copy);
}

// A caller that never takes them must not gather those of sequences long gone.
void CacheManager::prune_copies() {
    if (owed_copies_.size() < prune_copies_at_) return;
    const auto gone = [this](const PageCopy& owed) {
        return sequences_.find(owed.sequence) == nullptr;
    };
    owed_copies_.erase(std::remove_if(owed_copies_.begin(), owed_copies_.end(), gone),
                       owed_copies_.end());
    prune_copies_at_ = std::max<std::size_t>(64, 2 * owed_copies_.size());
}

void CacheManager::drop_columns(Replica& replica, Sequence& sequence, std::int32_t from) {
    if (from >= sequence.num_pages()) return;
    free_own_pages(replica, sequence, from);
    sequence.pages.resize(static_cast<std::size_t>(from));
    sequence.kept.erase(std::lower_bound(sequence.kept.begin(), sequence.kept.end(), from),
                        sequence.kept.end());
    ++sequence.row_version;
}

// The committed columns from `columns` on are the tree's alone from now on.
void CacheManager::move_back(Replica& replica, Sequence& sequence, std::int32_t columns) {
    if (sequence.committed <= columns) return;
    sequence.storing = 0;  // pages on their way arrive without it
    if (sequence.host_node != nullptr && PrefixTree::depth_of(sequence.host_node) > columns) {
        sequence.host_node = replica.host->retreat(sequence.host_node, columns);
    }
    sequence.committed = columns;
    TreeNode* old_node = sequence.node;
    sequence.node = replica.tree.split({old_node, columns});
    replica.tree.pin(sequence.node);
    replica.tree.unpin(old_node, true);
}

// What is written next lies in pages that others may read, in the tree or as forks: the sequence
// gets pages of its own there, the first with what it keeps of the old one. Behind what it needs
// it lets go of them.
void CacheManager::thaw(const Admission& admission, Replica& replica, SequenceHandle handle,
                        Sequence& sequence, std::vector<PageCopy>* copies) {
    const auto first = static_cast<std::int32_t>(admission.start / config_.page_size);
    const auto kept_tokens = static_cast<std::int32_t>(admission.start % config_.page_size);
    const std::int32_t end = std::min(sequence.frozen, admission.needed);
    if (sequence.frozen > admission.needed) drop_columns(replica, sequence, admission.needed);
    for (std::int32_t column = first; column < end; ++column) {
        if (is_sole_holder(sequence, column)) continue;
        BlockId& page = sequence.pages[static_cast<std::size_t>(column)];
        const BlockId source = page;
        take_pages(replica, 1, &page);
        ++sequence.row_version;
        const bool is_copied = column == first && kept_tokens > 0;
        const PageCopy copy{sequence.replica, source, page, kept_tokens, handle, nullptr};
        if (is_own(sequence, column)) {
            if (is_copied) {
                owe_shared_copy(copy, replica, copies);
            } else {
                replica.pool.free(&source, 1);
            }
        } else if (is_copied) {
            owe_copy(copy, {sequence.node, column + 1}, replica, copies);
        }
    }
    sequence.kept.erase(std::lower_bound(sequence.kept.begin(), sequence.kept.end(), first),
                        sequence.kept.end());
    sequence.frozen = first;
    move_back(replica, sequence, first);
}

// Every position of a claim counts once, as input or as cached; a longer hit moves what it covers.
void CacheManager::count_hit(const Admission& admission, Sequence& sequence) {
    Metrics& metrics = replica_at(sequence.replica).metrics;
    const std::int64_t covered = std::min(sequence.counted_end, admission.hit_tokens) -
                                 std::max(sequence.counted_from, sequence.hit_tokens);
    metrics.input_tokens -= std::max<std::int64_t>(0, covered);
    metrics.cache_tokens += admission.hit_tokens - sequence.hit_tokens;
    metrics.copied_tokens += admission.match.partial_tokens;
    sequence.hit_tokens = admission.hit_tokens;
}

// True when the request now stands elsewhere.
bool CacheManager::apply(const Admission& admission, Sequence& sequence, RequestView& request,
                         Owed owed) {
    Replica& replica = replica_at(sequence.replica);
    if (admission.shares()) take_hit(admission, replica, sequence);
    if (sequence.node == nullptr) {
        sequence.node = replica.tree.open_namespace(request.name_space);
        replica.tree.pin(sequence.node);
    }
    append_pages(replica, sequence, admission.appended, guard_of(admission, sequence));
    if (sequence.frozen > admission.start / config_.page_size) {
        thaw(admission, replica, request.sequence, sequence, owed.copies);
    }
    note_peak(replica);  // before a copy holds its source for a moment
    if (admission.match.partial_tokens > 0) {
        const TreePosition& source = admission.match.partial;
        BlockId source_page = 0;
        replica.tree.copy_pages(source, source.depth - 1, &source_page);
        owe_copy({sequence.replica, source_page,
                  sequence.pages[static_cast<std::size_t>(admission.hit_pages)],
                  admission.match.partial_tokens, request.sequence, nullptr},
                 source, replica, owed.copies);
    }
    if (admission.below.node != nullptr) {
        owe_loads(admission, sequence, request.sequence, *owed.host_copies);
    }
    if (sequence.count_epoch != count_epoch_) {
        sequence.count_epoch = count_epoch_;
        sequence.counted_from = sequence.counted_end;
    }
    sequence.written =
        admission.takes_hit ? admission.start : std::min(sequence.written, admission.start);
    if (admission.takes_hit) count_hit(admission, sequence);
    count_input(admission.start, admission.active, sequence);
    const bool has_moved = request.start != admission.start || request.active != admission.active;
    request.start = admission.start;
    request.active = admission.active;
    return has_moved;
}

ReserveStatus CacheManager::reserve(RequestView& request, std::int64_t num_steps,
                                    std::vector<PageCopy>* copies,
                                    std::vector<HostCopy>* host_copies) {
    const bool fits = reserve_batch({&request, 1}, num_steps, copies, host_copies) == 1;
    return fits ? ReserveStatus::kOk : ReserveStatus::kNoSpace;
}

std::int64_t CacheManager::reserve_batch(const RequestBatch& batch, std::int64_t num_steps,
                                         std::vector<PageCopy>* copies,
                                         std::vector<HostCopy>* host_copies) {
    const std::int64_t n = batch.size();
    require_host_copies(host_copies);
    const std::lock_guard<std::mutex> lock(mutex_);
    check_batch(batch, num_steps);
    for (std::int64_t i = 0; i < n; ++i) {
        Sequence& sequence = *batch_[static_cast<std::size_t>(i)];
        if (sequence.is_sealed && is_reserved(sequence, batch[i], num_steps)) {
            sequence.written = std::min(sequence.written, batch[i].start);
            count_input(batch[i].start, batch[i].active, sequence);
            continue;
        }
        const Admission admission = admit(sequence, batch[i], num_steps, true);
        if (!admission.fits) return i;
        apply(admission, sequence, batch[i], {copies, host_copies});
        // Rows behind may need the source's page, or would meet it held in the eviction order.
        if (copies != nullptr && !copies->empty()) return i + 1;
    }
    return n;
}

ReservePlan CacheManager::plan(const RequestView& request, std::int64_t num_steps) const {
    require_steps(num_steps);
    const std::lock_guard<std::mutex> lock(mutex_);
    const Sequence& sequence = sequences_.at(request.sequence);
    if (!has_legal_indices(request)) refuse_indices(request, 0);
    if (request.end > most_tokens(num_steps)) return {};
    const Admission admission = admit(sequence, request, num_steps, true);
    return {admission.takes_hit ? admission.hit_tokens - sequence.hit_tokens : 0,
            admission.new_pages(), admission.evicted, admission.match.partial_tokens,
            admission.fits};
}

}  // namespace kvcore
