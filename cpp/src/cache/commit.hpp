// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cache/validate_requests.hpp"
#include "level/quotas.hpp"
#include "request/undo_log.hpp"

namespace kvcore {

/// Pages that a commit finds in the tree already, of which nobody held any: they are held from then
/// on. Where they take the place of a row's own pages, those are free, and quotas can be kept;
/// where both stay, there may be no room for them.
///
/// Owns: their ids, in memory kept from call to call. Threads: none of its own. Cost: O(pages).
class OwnedCommit {
   public:
    /// Columns `first` .. known.depth - 1 of a row are cached on the way to `known`. False where
    /// they must not be committed now. Throws std::bad_alloc, and has changed nothing.
    [[nodiscard]] bool begin(const ManagerState& state, const Sequence& sequence,
                             SequenceHandle handle, TreePosition known, std::int32_t first);
    /// They are committed.
    void end() noexcept;

   private:
    void add(BlockId cached, BlockId own);

    Replica* home_ = nullptr;
    std::vector<BlockId> pages_;
    std::vector<Owner> takers_;  // of each, whose it is where its owner has no room for it
};

/// From a sequence's own pages to the prefix tree's.
///
/// Owns: memory of a call, kept for the next one. Threads: none of its own.
/// Cost: O(new tokens), and O(sequences) for a page that forks share.
class Committer {
   public:
    explicit Committer(ManagerState& state) noexcept : state_(state) {}

    /// The verb of CacheManager.
    void commit(const RequestBatch& batch, std::vector<PageSwap>& swaps, Transfers* transfers);

   private:
    /// Tokens of a request that stay written: with states fewer than it says, where some run again
    /// since drafts behind them were rejected.
    [[nodiscard]] std::int64_t written(const RequestView& request) const noexcept {
        return state_.states.exist() ? state_.states.begin_of(request.sequence, request.start)
                                     : request.start;
    }
    [[nodiscard]] bool has_new_page(const Sequence& sequence,
                                    const RequestView& request) const noexcept {
        return written(request) >=
               (sequence.pages.committed() + std::int64_t{1}) * state_.config.page_size;
    }
    template <bool kHasWindows>
    void find_new_pages(const RequestBatch& given);
    void commit_pages(Sequence& sequence, const RequestView& request, std::int32_t row);
    [[nodiscard]] bool commit_run(Sequence& sequence, SequenceHandle handle, const TokenId* tokens,
                                  std::int32_t end, bool is_shared, const Retention& retention,
                                  std::int32_t row);
    void settle_run(Sequence& sequence, SequenceHandle handle, std::int32_t first, std::int32_t end,
                    bool is_shared, std::int32_t row) noexcept;
    void cache_columns(Replica& home, const PageRow& pages, std::int32_t first,
                       std::int32_t end) const noexcept;
    void keep_what_others_read(Replica& home, SequenceHandle handle, PageRow& pages,
                               std::int32_t first) noexcept;
    void swap_columns(Replica& home, SequenceHandle handle, PageRow& pages, std::int32_t first,
                      std::int32_t row) noexcept;
    void leave_windows(const RequestBatch& batch) noexcept;
    void advance_states(const RequestBatch& batch, Transfers* transfers);
    void store_rows(const RequestBatch& batch, Transfers& transfers) noexcept;
    void make_checkpoint(Sequence& sequence, SequenceHandle handle, Transfers* transfers);
    template <class Visit>
    void for_each_other_holder(const Sequence& sequence, std::int32_t column, const Visit& visit);
    void entrust_to_tree(const Sequence& sequence, std::int32_t column) noexcept;

    ManagerState& state_;
    std::vector<std::int64_t> rows_;     // that have pages to commit
    std::vector<std::int64_t> passing_;  // whose windows leave columns
    std::vector<Undo> undo_;             // what to take back from the rows of a refused batch
    std::vector<DuplicatePage> duplicates_;
    std::vector<PageSwap> swapped_;
    std::vector<BlockId> replaced_;  // columns that were swapped
    OwnedCommit owned_;              // with quotas
};

}  // namespace kvcore
