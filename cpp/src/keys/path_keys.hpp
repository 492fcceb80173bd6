// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kvcore/extra_keys.hpp"
#include "kvcore/page_keys.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// Keys of the columns of a prefix, from its namespace and its tokens in a tree. Some tokens may be
/// stand-ins for tokens with extra keys.
///
/// Owns: the seed, but not the names of the stand-ins. Threads: constant.
/// Cost: hashing the tokens; with stand-ins, hashing all tokens of the prefix.
class PathKeys {
   public:
    /// `seed`: one item of CBOR, see KeyOptions. `names`: nullptr if no token is a stand-in.
    PathKeys(std::int32_t column_tokens, std::string seed, const StandIns* names)
        : column_tokens_(column_tokens), seed_(std::move(seed)), names_(names) {}

    /// The key before the first column.
    [[nodiscard]] PageKey root(std::string_view name_space) const;
    /// Returns true if a token may be a stand-in.
    [[nodiscard]] bool may_have_extras() const { return names_ != nullptr && names_->size() > 0; }
    /// Writes keys of `n` columns without stand-ins, which follow `parent`, to `out`.
    void keys_behind(const PageKey& parent, const TokenId* tokens, std::int32_t n,
                     PageKey* out) const;
    /// Writes keys of columns `first` .. `last` - 1 to `out`. `tokens` are the tokens of the whole
    /// prefix, and `parent` is the key before column `first`. Throws std::bad_alloc.
    void keys_of(std::string_view name_space, const TokenId* tokens, std::int32_t first,
                 std::int32_t last, const PageKey& parent, PageKey* out) const;

   private:
    [[nodiscard]] KeyOptions options(std::string_view name_space) const;
    void keys_with_extras(std::string_view name_space, const TokenId* tokens, std::int32_t first,
                          std::int32_t last, PageKey* out) const;

    std::int32_t column_tokens_;
    std::string seed_;
    const StandIns* names_;
};

}  // namespace kvcore
