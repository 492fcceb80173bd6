// SPDX-License-Identifier: Apache-2.0
// Snapshots of a replica's prefix cache: the columns that are exported as bytes, and imported
// again. A column is a page, or with groups the pages of all bundles for the same tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "kvcore/types.hpp"

namespace kvcore {

/// A run of columns that the prefix tree of a replica has.
struct CachedRun {
    std::int32_t parent = -1;      // the run that it continues; -1: it begins its namespace
    std::int32_t name_space = 0;   // index into CachedTree::name_spaces
    std::int32_t first = 0;        // number of columns before it
    std::int32_t num_columns = 0;  // its own columns
    std::int32_t rank = 0;         // present order of eviction: lower ranks are evicted first
};

/// All cached tokens of a replica at one moment, without their pages.
struct CachedTree {
    std::uint64_t num_resets = 0;          // resets of the caches before that moment
    std::vector<std::string> name_spaces;  // as RequestView names them
    std::vector<CachedRun> runs;           // each after its parent; a parent has no lower rank
    std::vector<TokenId> tokens;           // of the runs, in their order
};

/// The parts of one column other than the pages of full-attention groups.
struct CachedColumn {
    std::uint8_t windows = 0;  // a bit for each other group: the column has pages of this group
    std::uint8_t passed = 0;   // groups whose pages requests have passed: evicted first
    std::int32_t state = -1;   // slot of the checkpoint at its end; -1: no checkpoint
};

/// Columns from `first` on of a prefix of tokens [n], whole columns, in one namespace of a replica.
struct ColumnSpan {
    std::int32_t replica = 0;
    std::uint64_t num_resets = 0;  // resets of the caches when the span was made; must be current
    std::string_view name_space = {};
    const TokenId* tokens = nullptr;
    std::int64_t n = 0;
    std::int32_t first = 0;
};

/// Cached columns that a caller copies elsewhere.
///
/// Owns: a pin on the columns. Nothing evicts or rewrites their pages. If the caches are reset,
/// requests no longer find the columns, but the pages stay until the export ends. Ending the export
/// does not count as a use of the columns.
/// Threads: one at a time; other threads may use the manager, which must outlive the export.
/// Cost: O(columns) to end, under the manager's mutex.
class CacheExport {
   public:
    /// Holds nothing.
    CacheExport() noexcept;
    CacheExport(CacheExport&& other) noexcept;
    CacheExport& operator=(CacheExport&& other) noexcept;
    ~CacheExport();

    /// The cached columns of the requested span, from the first on.
    [[nodiscard]] const std::vector<CachedColumn>& columns() const noexcept;
    /// The pages of each column, lane by lane: first the pages of the first bundle, then of the
    /// second, ...; -1 for a page that the column lacks.
    [[nodiscard]] const std::vector<BlockId>& pages() const noexcept;

   private:
    friend class CacheManager;
    struct Held;

    explicit CacheExport(std::unique_ptr<Held> held) noexcept;

    std::unique_ptr<Held> held_;
};

/// The result of an import.
enum class ImportStatus : std::uint8_t {
    kTaken,     // the caller fills the pages, and then publishes the columns
    kKnown,     // no page to fill: publishing counts as a use of the cached columns
    kNoParent,  // nothing changed: the prefix before the columns is not cached
    kNoRoom,    // nothing changed: no page is free, or quotas reserve the free pages
    kReset,     // nothing changed: the caches were reset
};

/// Columns that a caller brings into the cache: free pages, which requests find after `publish`.
/// Columns that are already cached are not written again.
///
/// Owns: these pages, and a pin on the prefix before them; both are released if the import ends
/// without having been published.
/// Threads: as CacheExport.
/// Cost: as CacheExport.
class CacheImport {
   public:
    /// Holds nothing.
    CacheImport() noexcept;
    CacheImport(CacheImport&& other) noexcept;
    CacheImport& operator=(CacheImport&& other) noexcept;
    ~CacheImport();

    [[nodiscard]] ImportStatus status() const noexcept { return status_; }
    /// The columns for which there is room, from the first on: for each, the offered parts that the
    /// cache still lacks. `state`: the slot to fill; -1: no slot.
    [[nodiscard]] const std::vector<CachedColumn>& columns() const noexcept;
    /// The pages to fill, in the order of CacheExport; -1 for a page that needs no write.
    [[nodiscard]] const std::vector<BlockId>& pages() const noexcept;

   private:
    friend class CacheManager;
    struct Held;

    CacheImport(ImportStatus status, std::unique_ptr<Held> held) noexcept;

    ImportStatus status_ = ImportStatus::kTaken;
    std::unique_ptr<Held> held_;
};

}  // namespace kvcore
