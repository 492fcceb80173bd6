// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/cached_columns.hpp"
#include "level/page_hold.hpp"
#include "level/page_holds.hpp"
#include "level/replica.hpp"
#include "support/make_room.hpp"
#include "tree/tree_pin.hpp"

namespace kvcore {

/// Columns of the tree whose bytes are copied elsewhere: see CacheExport.
///
/// Owns: a hold on their path, the part of a reader of all their windows, and holds on their
/// checkpoints. Threads: none of its own; CacheManager locks around it. Cost: O(columns).
class ColumnExport {
   public:
    /// Columns `first` .. at.depth - 1 on the way to `at`: one at least. Throws std::bad_alloc.
    ColumnExport(Replica& home, TreePosition at, std::int32_t first);
    ColumnExport(const ColumnExport&) = delete;
    ColumnExport& operator=(const ColumnExport&) = delete;
    ~ColumnExport();

    [[nodiscard]] const Replica& home() const noexcept { return home_; }
    [[nodiscard]] const std::vector<BlockId>& ids() const noexcept { return ids_; }
    [[nodiscard]] const std::vector<CachedColumn>& columns() const noexcept { return columns_; }
    [[nodiscard]] const std::vector<BlockId>& pages() const noexcept { return pages_; }
    /// Of ids(), the last ones: those that the tree has no more.
    [[nodiscard]] PathHold::Pages references() const noexcept { return path_.references(); }

    /// As those of PathHold.
    void loosen() noexcept { path_.loosen(ids_.data(), static_cast<std::int64_t>(ids_.size())); }
    void fasten() noexcept { path_.fasten(ids_.data(), static_cast<std::int64_t>(ids_.size())); }

   private:
    [[nodiscard]] CachedColumn describe(BlockId column) const noexcept;

    Replica& home_;
    std::vector<BlockId> ids_;
    std::vector<CachedColumn> columns_;
    std::vector<BlockId> pages_;
    std::vector<StateHold> states_;
    PathHold path_;
};

/// Columns that are brought into the tree: see CacheImport.
///
/// A column that the tree lacks is taken as a whole; of one that it has, what it lacks of windows
/// comes in a column of its own and is merged, as what arrives from a tier.
///
/// Owns: a reference to each column of its own, whose windows it reads, slots, and until it is
/// published or forgotten a pin on what is in front.
/// Threads: none of its own; CacheManager locks around it. Cost: O(columns).
class ColumnImport {
   public:
    /// `offered` [n / column - first]: what the caller has. Throws std::bad_alloc, and
    /// IntegrityError where counted pages are not there, and has changed nothing.
    ColumnImport(Replica& home, const ColumnSpan& span, const CachedColumn* offered);
    ColumnImport(const ColumnImport&) = delete;
    ColumnImport& operator=(const ColumnImport&) = delete;
    ~ColumnImport();

    [[nodiscard]] ImportStatus status() const noexcept { return status_; }
    [[nodiscard]] const Replica& home() const noexcept { return home_; }
    [[nodiscard]] const std::vector<CachedColumn>& columns() const noexcept { return columns_; }
    [[nodiscard]] const std::vector<BlockId>& pages() const noexcept { return pages_; }
    /// Of the columns that it takes or brings something for.
    [[nodiscard]] const std::vector<TokenId>& tokens() const noexcept { return tokens_; }
    /// Its own column for each, -1 where it needs none.
    [[nodiscard]] const std::vector<BlockId>& own() const noexcept { return own_; }

    /// They are found from now on; `more`: their run is to grow. `holds`: holds on published pages
    /// become pins in the tree. A held page whose column somebody else cached meanwhile stays with
    /// its hold. With quotas, if somebody else cached columns meanwhile, columns from the first
    /// held one on are given back. False where the caches were reset since. Throws std::bad_alloc,
    /// and has changed nothing.
    [[nodiscard]] bool publish(PageHolds& holds, bool more);
    /// What is in front of them was forgotten.
    [[nodiscard]] bool is_cut_off() const noexcept {
        return place_ && PrefixTree::is_forgotten(place_.node());
    }
    /// The caches are reset: nobody wants them any more.
    void forget() noexcept {
        place_.reset();
        is_wanted_ = false;
    }

   private:
    struct Budget {
        std::int64_t pages = 0;
        std::int64_t columns = 0;
        std::int64_t slots = 0;
    };
    struct Arrived;

    void find_place(const ColumnSpan& span, std::int32_t n);
    [[nodiscard]] Budget budget() const;
    void choose(const CachedColumn* offered, std::size_t n, Budget budget);
    [[nodiscard]] std::int64_t count_pages(std::size_t i) const noexcept;
    [[nodiscard]] bool is_new(std::size_t i) const noexcept {
        return static_cast<std::int32_t>(i) >= num_known_;
    }
    void take();
    void take_column(std::size_t i);
    void give_back(std::size_t from) noexcept;
    [[nodiscard]] bool is_held(std::size_t i) const noexcept {
        return own_[i] >= 0 && home_.pool.ref_count(own_[i]) > 1;
    }
    [[nodiscard]] std::size_t count_publishable() const noexcept;
    void settle(Arrived& arrived, TreeNode* end, PageHolds& holds) noexcept;
    void entrust_to_tree(std::size_t i, TreeNode* end, PageHolds& holds) noexcept;
    void merge(std::size_t i, Arrived& arrived) noexcept;
    void leave_windows(const Arrived& arrived, TreeNode* end) noexcept;
    void leave_column(std::size_t i, const Arrived& arrived) noexcept;
    void hand_over_states(const Arrived& arrived, TreeNode* end) noexcept;
    void tell_owners(const Arrived& arrived, TreeNode* end) noexcept;

    Replica& home_;
    ImportStatus status_ = ImportStatus::kTaken;
    bool is_wanted_ = true;
    std::int32_t first_;
    std::int32_t num_known_ = 0;  // of the columns, those that the tree has, as it began
    TreePin place_;               // where those end
    std::vector<TokenId> tokens_;
    std::vector<CachedColumn> columns_;
    std::vector<CachedColumn> offered_;  // of those
    std::vector<BlockId> own_;
    std::vector<BlockId> pages_;
};

/// All exports and imports of a manager's caches, and how often these were reset.
///
/// Owns: none of them: they belong to who copies.
/// Threads: none of its own; CacheManager locks around it. Cost: O(exports and imports) per verb.
class CacheCopies {
   public:
    [[nodiscard]] const std::vector<ColumnExport*>& exports() const noexcept { return exports_; }
    [[nodiscard]] const std::vector<ColumnImport*>& imports() const noexcept { return imports_; }
    [[nodiscard]] std::uint64_t num_resets() const noexcept { return num_resets_; }

    /// So that one more of each can be added. Throws std::bad_alloc.
    void make_room() {
        kvcore::make_room(exports_, 1);
        kvcore::make_room(imports_, 1);
    }
    void add(ColumnExport& one) noexcept { exports_.push_back(&one); }
    void add(ColumnImport& one) noexcept { imports_.push_back(&one); }
    void remove(const ColumnExport& one) noexcept { erase(exports_, &one); }
    void remove(const ColumnImport& one) noexcept { erase(imports_, &one); }

    /// What was to be brought in behind forgotten columns is not wanted any more.
    void drop_forgotten() noexcept {
        for (ColumnImport* each : imports_) {
            if (each->is_cut_off()) each->forget();
        }
    }
    /// Around what forgets all that nobody uses: see PathHold. What was to be brought in is not
    /// wanted any more: it would come back otherwise.
    void loosen() noexcept {
        ++num_resets_;
        for (ColumnExport* each : exports_) each->loosen();
        for (ColumnImport* each : imports_) each->forget();
    }
    void fasten() noexcept {
        for (ColumnExport* each : exports_) each->fasten();
    }

   private:
    template <class T>
    static void erase(std::vector<T*>& all, const T* one) noexcept {
        all.erase(std::find(all.begin(), all.end(), one));
    }

    std::vector<ColumnExport*> exports_;
    std::vector<ColumnImport*> imports_;
    std::uint64_t num_resets_ = 0;
};

}  // namespace kvcore
