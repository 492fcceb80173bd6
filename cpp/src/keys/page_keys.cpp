// SPDX-License-Identifier: Apache-2.0
#include "kvcore/page_keys.hpp"

#include <algorithm>

#include "keys/hashed_items.hpp"
#include "kvcore/cbor.hpp"

namespace kvcore {
namespace {

constexpr std::string_view kDefaultVllmSeed = "vllm-none-hash";

void put_text_or_nil(std::string& out, const std::optional<std::string>& text) {
    if (text) {
        cbor::put_text(out, *text);
    } else {
        cbor::put_nil(out);
    }
}

// Of what is an item already.
template <class Sink>
void put_item_or_nil(Sink& out, std::string_view item) {
    if (item.empty()) {
        cbor::put_nil(out);
    } else {
        out.append(item.data(), item.size());
    }
}

}  // namespace

PageKey root_key(const KeyOptions& options) {
    std::string items;
    if (options.scheme == KeyScheme::kVllm) {
        items = options.seed;
        if (items.empty()) cbor::put_text(items, kDefaultVllmSeed);
    } else {
        cbor::put_array(items, 5);
        cbor::put_text(items, "kvcore");
        cbor::put_integer(items, kKeySchemeVersion);
        put_item_or_nil(items, options.seed);
        put_text_or_nil(items, options.cache_salt);
        put_text_or_nil(items, options.extra_key);
    }
    return Sha256::of(items.data(), items.size());
}

PageKey page_key(const PageKey& parent, const TokenId* tokens, std::int64_t n,
                 std::string_view extra) {
    Sha256 hash;
    keys::HashedItems out(hash);
    out.begin_page(parent, n);
    out.put_tokens(tokens, n);
    put_item_or_nil(out, extra);
    return out.finish();
}

std::vector<PageKey> embedding_digests(const std::byte* rows, std::int64_t n,
                                       std::int64_t row_bytes, std::int64_t page_size) {
    std::vector<PageKey> digests;
    digests.reserve(static_cast<std::size_t>(ceil_div(n, page_size)));
    for (std::int64_t first = 0; first < n; first += page_size) {
        const std::int64_t size = std::min(page_size, n - first) * row_bytes;
        digests.push_back(Sha256::of(rows + first * row_bytes, static_cast<std::size_t>(size)));
    }
    return digests;
}

}  // namespace kvcore
