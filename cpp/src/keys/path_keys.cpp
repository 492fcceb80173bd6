// SPDX-License-Identifier: Apache-2.0
#include "keys/path_keys.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "kvcore/extra_keys.hpp"

namespace kvcore {

KeyOptions PathKeys::options(std::string_view name_space) const {
    const NamespaceParts parts = read_namespace_name(name_space);
    KeyOptions options;
    options.seed = seed_;
    if (parts.extra_key) options.extra_key = std::string(*parts.extra_key);
    if (parts.cache_salt) options.cache_salt = std::string(*parts.cache_salt);
    return options;
}

PageKey PathKeys::root(std::string_view name_space) const { return root_key(options(name_space)); }

void PathKeys::keys_behind(const PageKey& parent, const TokenId* tokens, std::int32_t n,
                           PageKey* out) const {
    const PageKey* before = &parent;
    for (std::int32_t c = 0; c < n; ++c, ++out) {
        *out = page_key(*before, tokens + std::int64_t{c} * column_tokens_, column_tokens_);
        before = out;
    }
}

void PathKeys::keys_of(std::string_view name_space, const TokenId* tokens, std::int32_t first,
                       std::int32_t last, const PageKey& parent, PageKey* out) const {
    const auto is_stand_in = [](TokenId token) { return token <= StandIns::kHighest; };
    const std::int64_t n = std::int64_t{last} * column_tokens_;
    if (may_have_extras() && std::any_of(tokens, tokens + n, is_stand_in)) {
        return keys_with_extras(name_space, tokens, first, last, out);
    }
    keys_behind(parent, tokens + std::int64_t{first} * column_tokens_, last - first, out);
}

// An extra key that starts in one column reaches into others, so all columns are hashed from the
// start.
void PathKeys::keys_with_extras(std::string_view name_space, const TokenId* tokens,
                                std::int32_t first, std::int32_t last, PageKey* out) const {
    std::vector<TokenId> own(tokens, tokens + std::int64_t{last} * column_tokens_);
    std::vector<std::string> names;  // the extra keys below point into them
    std::vector<std::size_t> starts;
    for (std::size_t i = 0; i < own.size(); ++i) {
        if (own[i] > StandIns::kHighest) continue;
        std::optional<std::string> name = names_->name_of(own[i]);
        if (!name) continue;
        names.push_back(*std::move(name));
        starts.push_back(i);
    }
    std::vector<PlacedKey> extras;
    for (std::size_t i = 0; i < names.size(); ++i) {
        const StandInParts parts = read_stand_in_name(names[i]);
        own[starts[i]] = parts.token;
        for (const ExtraKey& extra : parts.keys) {
            extras.push_back({static_cast<std::int64_t>(starts[i]), extra.length, extra.bytes});
        }
    }
    KeyChain chain(column_tokens_, options(name_space));
    chain.extend(own.data(), static_cast<std::int64_t>(own.size()), extras.data(), extras.size());
    std::copy(chain.keys().begin() + first, chain.keys().end(), out);
}

}  // namespace kvcore
