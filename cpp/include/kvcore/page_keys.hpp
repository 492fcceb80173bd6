// SPDX-License-Identifier: Apache-2.0
// Chained content keys of pages: what names a page outside of one process. Equal tokens behind
// equal tokens have equal keys in every process, on every machine and in every language:
//
//   root key = SHA-256 of ["kvcore", kKeySchemeVersion, seed, cache salt, extra key]
//   key of a page = SHA-256 of [key in front, [tokens...], extra]
//
// in canonical CBOR, what is absent as nil. The key in front of the first page is the root key;
// extra is the list of [bytes, start counted from the page's, length] of the extra keys (images,
// ...) that overlap the page, by start, length and bytes; nil where there are none. The length is
// that of the whole extra key, so pages whose extra keys differ in length only have other keys, as
// they have other places in a PrefixTree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "kvcore/cbor.hpp"
#include "kvcore/sha256.hpp"
#include "kvcore/types.hpp"

namespace kvcore {
namespace keys {
class HashedItems;
}

using PageKey = Sha256::Digest;

/// Of KeyScheme::kKvcore: another one, other keys.
constexpr std::int64_t kKeySchemeVersion = 1;

/// How root keys and extras are made.
enum class KeyScheme {
    kKvcore,  // as above
    kVllm,    // as vLLM makes them with sha256_cbor, see KeyOptions
};

/// What all keys of a sequence depend on beside its tokens.
///
/// With kVllm the root key is SHA-256 of the seed alone, which is the text of PYTHONHASHSEED there,
/// "vllm-none-hash" where it is not set. The extra of a page is a list of: `extra_key` (the name of
/// a LoRA); [text, start] of each extra key (the identifier of an image); `cache_salt`, of the
/// first page alone and unless it is ""; of prompts with embeddings their digest.
struct KeyOptions {
    KeyScheme scheme = KeyScheme::kKvcore;
    std::string seed = {};  // one item, see kvcore/cbor.hpp; "" is nil, or vLLM's default
    std::optional<std::string> extra_key = {};   // UTF-8
    std::optional<std::string> cache_salt = {};  // UTF-8
    /// kVllm: of each page of a prompt that has embeddings, SHA-256 of those of its tokens; pages
    /// behind them have that of nothing. See embedding_digests.
    std::optional<std::vector<PageKey>> embeddings = {};
};

/// An extra key by its place. In UTF-8 with kVllm.
struct PlacedKey {
    std::int64_t start = 0;   // token of the sequence
    std::int64_t length = 0;  // tokens, at least 1
    std::string_view bytes;

    /// The order of extra keys in a name.
    friend bool operator<(const PlacedKey& a, const PlacedKey& b) noexcept {
        return std::tie(a.start, a.length, a.bytes) < std::tie(b.start, b.length, b.bytes);
    }
};

/// Appends an extra key that overlaps a page, as the key of that page has it with kKvcore. `start`
/// counts from the first token of the page.
template <class Sink>
void put_placed_key(Sink& out, const PlacedKey& key) {
    cbor::put_array(out, 3);
    cbor::put_bytes(out, key.bytes);
    cbor::put_integer(out, key.start);
    cbor::put_integer(out, key.length);
}

/// What is in front of the first page of a sequence.
[[nodiscard]] PageKey root_key(const KeyOptions& options);

/// The key of a page behind `parent`. `extra`: one item, see kvcore/cbor.hpp; "" is nil.
[[nodiscard]] PageKey page_key(const PageKey& parent, const TokenId* tokens, std::int64_t n,
                               std::string_view extra = {});

/// SHA-256 of the rows [n] of each page, the last one possibly not full.
[[nodiscard]] std::vector<PageKey> embedding_digests(const std::byte* rows, std::int64_t n,
                                                     std::int64_t row_bytes,
                                                     std::int64_t page_size);

/// The keys of a sequence that grows.
///
/// Owns: the keys of its complete pages, the hash of the page that is not, the extra keys. Tokens
/// are hashed as they come and not kept. A copy goes on by itself, such as a fork.
/// Invariant: keys() has num_tokens() / page_size() keys.
/// Threads: one at a time.
/// Memory: a verb that cannot get it throws std::bad_alloc and has changed nothing.
/// Cost: `extend` O(new tokens + bytes of extra keys of the new pages), the rest O(1).
class KeyChain {
   public:
    /// Throws std::invalid_argument for a page size below 1, embeddings without kVllm.
    explicit KeyChain(std::int64_t page_size, KeyOptions options = {});

    /// Appends tokens [n], with extra keys [num_extra] that start in them, by start, length and
    /// bytes, each once; they may reach behind. Throws std::invalid_argument for other extra keys.
    void extend(const TokenId* tokens, std::int64_t n, const PlacedKey* extra = nullptr,
                std::size_t num_extra = 0);

    /// Forgets all behind the first pages. Throws std::invalid_argument for more than there are.
    /// O(extra keys).
    void truncate(std::int64_t num_pages);

    [[nodiscard]] const PageKey& root() const noexcept { return root_; }
    [[nodiscard]] const std::vector<PageKey>& keys() const noexcept { return keys_; }
    [[nodiscard]] std::int64_t page_size() const noexcept { return page_size_; }
    [[nodiscard]] std::int64_t num_tokens() const noexcept { return num_tokens_; }

   private:
    struct Extra {
        std::int64_t start;
        std::int64_t length;
        std::string bytes;
    };

    void check(const PlacedKey* extra, std::size_t num_extra, std::int64_t n) const;
    void hash(const TokenId* tokens, std::int64_t n) noexcept;
    void finish_page(keys::HashedItems& out) noexcept;
    void put_extra(keys::HashedItems& out) const noexcept;
    void put_placed(keys::HashedItems& out) const noexcept;
    void leave_behind(std::int64_t token) noexcept;

    std::int64_t page_size_;
    KeyOptions options_;
    PageKey root_;
    std::vector<PageKey> keys_;
    Sha256 page_;  // of the page that is not complete
    std::int64_t num_tokens_ = 0;
    std::vector<Extra> extras_;       // by start
    std::size_t first_ahead_ = 0;     // in extras_: from there on they start behind complete pages
    std::vector<std::size_t> touch_;  // in extras_: they start in front of that and reach behind it
};

}  // namespace kvcore
