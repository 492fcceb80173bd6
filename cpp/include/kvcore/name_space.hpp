// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
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

/// What a namespace was named by.
struct NamespaceParts {
    std::optional<std::string_view> extra_key;
    std::optional<std::string_view> cache_salt;
};

/// The reverse of namespace_name, as views of that name; a name that it does not make is an extra
/// key. So different names of one kind have different parts. O(1).
[[nodiscard]] inline NamespaceParts read_namespace_name(std::string_view name) noexcept {
    constexpr std::size_t kHead = 9;
    if (name.empty()) return {};
    if (name.size() < kHead || name[0] < 1 || name[0] > 3) return {name, {}};
    std::uint64_t length = 0;
    for (std::size_t byte = 0; byte < 8; ++byte) {
        length |= std::uint64_t{static_cast<unsigned char>(name[1 + byte])} << (8 * byte);
    }
    const bool has_key = (name[0] & 1) != 0;
    const bool has_salt = (name[0] & 2) != 0;
    const std::size_t size = name.size() - kHead;
    const bool is_made = length <= size && (has_key || length == 0) && (has_salt || length == size);
    if (!is_made) return {name, {}};
    NamespaceParts parts;
    if (has_key) parts.extra_key = std::string_view(name.data() + kHead, length);
    if (has_salt) parts.cache_salt = std::string_view(name.data() + kHead + length, size - length);
    return parts;
}

}  // namespace kvcore
