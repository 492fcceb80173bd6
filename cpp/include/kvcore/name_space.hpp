// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvcore {

/// The name of the prefix-cache namespace of an extra key (LoRA id, image hash) and a cache salt
/// (tenant). Different pairs have different names: which of the two are present and the length of
/// the first are part of it, so ("a", "b") and ("ab", "") differ, as do "" and none. None of both
/// is "", the default namespace. O(bytes).
[[nodiscard]] inline std::string namespace_name(std::optional<std::string_view> extra_key,
                                                std::optional<std::string_view> cache_salt) {
    if (!extra_key && !cache_salt) return {};
    const std::uint64_t length = extra_key ? extra_key->size() : 0;
    std::string name;
    name.push_back(static_cast<char>((extra_key ? 1 : 0) | (cache_salt ? 2 : 0)));
    for (int byte = 0; byte < 8; ++byte) {
        name.push_back(static_cast<char>((length >> (8 * byte)) & 0xff));
    }
    if (extra_key) name += *extra_key;
    if (cache_salt) name += *cache_salt;
    return name;
}

}  // namespace kvcore
