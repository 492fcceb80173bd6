// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kvcore/extra_keys.hpp"
#include "kvcore/page_keys.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// Keys of the columns of a prefix, from what a tree knows of it: its namespace, and tokens some of
/// which may be stand-ins for tokens with extra keys.
///
/// Owns: the seed. Not the names of the stand-ins. Threads: constant.
/// Cost: hashing the tokens; where there are stand-ins, those of the whole prefix.
class PathKeys {
   public:
    /// `seed`: one item of CBOR, see KeyOptions. `names`: nullptr where no token is a stand-in.
    PathKeys(std::int32_t column_tokens, std::string seed, const StandIns* names)
        : column_tokens_(column_tokens), seed_(std::move(seed)), names_(names) {}

    /// The key in front of the first column.
    [[nodiscard]] PageKey root(std::string_view name_space) const;
    /// Some token may be a stand-in.
    [[nodiscard]] bool may_have_extras() const { return names_ != nullptr && names_->size() > 0; }
    /// Keys of `n` columns without stand-ins behind `parent` to `out`.
    void keys_behind(const PageKey& parent, const TokenId* tokens, std::int32_t n,
                     PageKey* out) const;
    /// Keys of columns `first` .. `last` - 1 to `out`. `tokens` are those of the whole prefix, and
    /// `parent` the key in front of `first`. Throws std::bad_alloc.
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
