// SPDX-License-Identifier: Apache-2.0
// What enters and leaves the caches of a CacheManager, for who keeps track of them elsewhere: a
// router that sends each prompt where its prefix lies.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvcore/page_keys.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// Where pages lie.
enum class CacheMedium : std::uint8_t {
    kDevice,
    kHost,
    kStorage,  // stores below the host tier
};

/// An extra key that overlaps a stored page.
struct PageExtra {
    std::int32_t page = 0;    // of the event
    std::int64_t start = 0;   // token, from the page's first one on; negative: in front of it
    std::int64_t length = 0;  // tokens of the whole extra key
    std::string bytes;
};

/// Pages that can be found in a cache from then on, or no more.
///
/// With groups of layers a page is a column: as many tokens as the largest page holds, and the
/// event is about the pages that one group has there.
struct CacheEvent {
    enum class Kind : std::uint8_t {
        kStored,   // pages one behind the other
        kRemoved,  // pages in any order
        kCleared,  // a replica has nothing on any medium, but for what is told next
    };

    Kind kind = Kind::kStored;
    CacheMedium medium = CacheMedium::kDevice;
    std::int32_t replica = 0;
    std::int32_t group = -1;  // as in the configuration; -1 without groups, and of kStorage
    std::vector<PageKey> keys;
    // Of stored pages, but those of kStorage:
    std::optional<PageKey> parent;  // of the page in front of the first one; none: it is the first
    std::vector<TokenId> tokens;    // [keys * page size]
    std::string name_space;
    std::vector<PageExtra> extras;  // by page and start
};

}  // namespace kvcore
