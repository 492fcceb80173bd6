// SPDX-License-Identifier: Apache-2.0
// Pages that enter and leave the caches of a CacheManager, for programs that track them elsewhere:
// for example a router that sends each prompt to the replica that has its prefix.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvcore/page_keys.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// The memory that holds a page.
enum class CacheMedium : std::uint8_t {
    kDevice,
    kHost,
    kStorage,  // stores below the host tier
};

/// An extra key that overlaps a stored page.
struct PageExtra {
    std::int32_t page = 0;    // index of the page in the event
    std::int64_t start = 0;   // token, from the page's first token; negative: before the page
    std::int64_t length = 0;  // tokens of the whole extra key
    std::string bytes;
};

/// Pages that requests can find in a cache from now on, or no longer find.
///
/// With groups of layers, a page is a column with the tokens of the largest page; the event is
/// about the pages that one group has for these tokens.
struct CacheEvent {
    enum class Kind : std::uint8_t {
        kStored,   // pages that follow each other
        kRemoved,  // pages in any order
        kCleared,  // the replica has no page on any medium, except pages of later events
    };

    Kind kind = Kind::kStored;
    CacheMedium medium = CacheMedium::kDevice;
    std::int32_t replica = 0;
    std::int32_t group = -1;  // as in the configuration; -1 without groups, and for kStorage
    std::vector<PageKey> keys;
    // Only for kStored, and not with kStorage:
    std::optional<PageKey> parent;  // of the page before the first; nullopt: no page is before it
    std::vector<TokenId> tokens;    // [keys * page size]
    std::string name_space;
    std::vector<PageExtra> extras;  // by page and start
};

}  // namespace kvcore
