// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cache/validate_requests.hpp"
#include "level/quotas.hpp"
#include "request/undo_log.hpp"

namespace kvcore {

/// Cached pages that a commit finds in the tree and that no request held before. The request holds
/// them from now on. If they replace the row's own pages, these become free and quotas can be kept;
/// if both stay, quotas may leave no room for them.
///
/// Owns: their ids, in memory kept from call to call. Threads: not thread-safe. Cost: O(pages).
class OwnedCommit {
   public:
    /// Columns `first` .. known.depth - 1 of a row are cached on the way to `known`. Returns false
    /// if they must not be committed now. Throws std::bad_alloc, and has changed nothing.
    [[nodiscard]] bool begin(const CacheData& state, const Sequence& sequence,
                             SequenceHandle handle, TreePosition known, std::int32_t first);
    /// Called after the columns were committed.
    void end() noexcept;

   private:
    void add(BlockId cached, BlockId own);

    Replica* home_ = nullptr;
    std::vector<BlockId> pages_;
    std::vector<Owner> takers_;  // of each page: the new owner if its owner has no room
};

/// Moves a sequence's own pages to the prefix tree.
///
/// Owns: memory of a call, kept for the next call. Threads: not thread-safe.
/// Cost: O(new tokens), and O(sequences) for a page that forks share.
class Committer {
   public:
    explicit Committer(CacheData& state) noexcept : state_(state) {}

    /// The verb of CacheManager.
    void commit(const RequestBatch& batch, std::vector<PageSwap>& swaps, Transfers* transfers);

   private:
    /// The number of tokens of a request that stay written. With states it is less than `start` if
    /// some tokens run again after rejected drafts.
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

    CacheData& state_;
    std::vector<std::int64_t> rows_;     // rows that have pages to commit
    std::vector<std::int64_t> passing_;  // rows whose windows leave columns
    std::vector<Undo> undo_;             // changes to undo if the batch is refused
    std::vector<DuplicatePage> duplicates_;
    std::vector<PageSwap> swapped_;
    std::vector<BlockId> replaced_;  // columns that were swapped
    OwnedCommit owned_;              // with quotas
};

}  // namespace kvcore
