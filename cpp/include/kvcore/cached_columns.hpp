// SPDX-License-Identifier: Apache-2.0
// What leaves the prefix cache of a replica as bytes, and what is brought back: a snapshot of it. A
// column is a page, or with groups what the pages of all bundles for the same tokens are.
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
    std::int32_t name_space = 0;   // by its place in CachedTree::name_spaces
    std::int32_t first = 0;        // columns in front of it
    std::int32_t num_columns = 0;  // of its own
    std::int32_t rank = 0;         // of two runs that of less goes first, as it stands
};

/// All that is cached in a replica at one moment, without its pages.
struct CachedTree {
    std::uint64_t num_resets = 0;          // of the caches until then
    std::vector<std::string> name_spaces;  // as RequestView names them
    std::vector<CachedRun> runs;           // each behind its parent, whose rank is no less
    std::vector<TokenId> tokens;           // of the runs, one behind the other
};

/// What there is of one column beside the pages of groups that keep everything.
struct CachedColumn {
    std::uint8_t windows = 0;  // a bit for each group that does not: the column has its pages,
    std::uint8_t passed = 0;   // which are the first to go: requests went on from them
    std::int32_t state = -1;   // slot of the checkpoint at its end; -1: none
};

/// Columns `first` .. of a prefix of tokens [n], whole columns, in one namespace of a replica.
struct ColumnSpan {
    std::int32_t replica = 0;
    std::uint64_t num_resets = 0;  // no more of the caches since
    std::string_view name_space = {};
    const TokenId* tokens = nullptr;
    std::int64_t n = 0;
    std::int32_t first = 0;
};

/// Cached columns that somebody copies elsewhere.
///
/// Owns: a hold on them. Nobody evicts or rewrites what it names; where the caches are reset, they
/// are found no more, but their pages stay until it ends. Ending it is no use of them.
/// Threads: one at a time; the manager, which must outlive it, may be used by others.
/// Cost: O(columns) to end, under the manager's mutex.
class CacheExport {
   public:
    /// Holds nothing.
    CacheExport() noexcept;
    CacheExport(CacheExport&& other) noexcept;
    CacheExport& operator=(CacheExport&& other) noexcept;
    ~CacheExport();

    /// Those that were cached of what was asked for, from the first one on.
    [[nodiscard]] const std::vector<CachedColumn>& columns() const noexcept;
    /// The pages of each column, lane by lane: those of the first bundle, of the second one, ...;
    /// -1 where it has none.
    [[nodiscard]] const std::vector<BlockId>& pages() const noexcept;

   private:
    friend class CacheManager;
    struct Held;

    explicit CacheExport(std::unique_ptr<Held> held) noexcept;

    std::unique_ptr<Held> held_;
};

/// What an import came to.
enum class ImportStatus : std::uint8_t {
    kTaken,     // the caller fills the pages, and has the columns published
    kKnown,     // there is nothing to fill: to publish them is a use of what is cached
    kNoParent,  // nothing changed: what is in front of the columns is not cached
    kNoRoom,    // nothing changed: there is not one free page, or quotas keep those
    kReset,     // nothing changed: the caches were reset
};

/// Columns that somebody brings into the cache: free pages, which are found once they are
/// published. What is cached already is not written again.
///
/// Owns: those pages, and a pin on what is in front of them; both are given back where it ends
/// without having been published. Threads, cost: as CacheExport.
class CacheImport {
   public:
    /// Holds nothing.
    CacheImport() noexcept;
    CacheImport(CacheImport&& other) noexcept;
    CacheImport& operator=(CacheImport&& other) noexcept;
    ~CacheImport();

    [[nodiscard]] ImportStatus status() const noexcept { return status_; }
    /// Those for which there is room, from the first one on: what each still lacks of what was
    /// offered. `state`: the slot to be filled; -1: none.
    [[nodiscard]] const std::vector<CachedColumn>& columns() const noexcept;
    /// The pages to be filled, as CacheExport has them; -1 where there is nothing to be written.
    [[nodiscard]] const std::vector<BlockId>& pages() const noexcept;

   private:
    friend class CacheManager;
    struct Held;

    CacheImport(ImportStatus status, std::unique_ptr<Held> held) noexcept;

    ImportStatus status_ = ImportStatus::kTaken;
    std::unique_ptr<Held> held_;
};

}  // namespace kvcore
