// SPDX-License-Identifier: Apache-2.0
// Chained content keys of pages, which identify a page across processes. A page has the same key in
// every process, on every machine and in every language if its tokens and all tokens before it are
// equal:
//
//   root key = SHA-256 of ["kvcore", kKeySchemeVersion, seed, cache salt, extra key]
//   key of a page = SHA-256 of [key of the page before, [tokens...], extra]
//
// in canonical CBOR, with nil for absent values. The first page uses the root key as the key of the
// page before. `extra` lists the extra keys (images, ...) that overlap the page as [bytes, start
// counted from the page's first token, length], sorted by start, length and bytes; nil if no extra
// key overlaps. The length is the length of the whole extra key. So two extra keys that differ only
// in length give different page keys, as they give different places in a PrefixTree.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "kvcore/types.hpp"

namespace kvcore {

// Items of canonical CBOR (RFC 8949, 4.2.1): every number uses the fewest bytes, every length
// precedes its content. A sink is a type with append(const char*, std::size_t), for example
// std::string. The bytes are the same on every machine. O(bytes of the item).
namespace cbor {

/// Most bytes of a head with its number.
constexpr std::size_t kMostHeadBytes = 9;

/// Writes the head of an item of a major type (0 .. 7) and its number; returns the number of bytes.
inline std::size_t write_head(char* out, unsigned major, std::uint64_t number) noexcept {
    const bool is_short = number < 24;
    const unsigned log = number <= 0xff ? 0 : number <= 0xffff ? 1 : number <= 0xffffffff ? 2 : 3;
    const std::size_t more = is_short ? 0 : std::size_t{1} << log;
    const auto low = is_short ? static_cast<unsigned>(number) : 24 + log;
    out[0] = static_cast<char>(major << 5 | low);
    for (std::size_t i = 0; i < more; ++i) {
        out[1 + i] = static_cast<char>(number >> (8 * (more - 1 - i)) & 0xff);
    }
    return 1 + more;
}

template <class Sink>
void put_head(Sink& out, unsigned major, std::uint64_t number) {
    char head[kMostHeadBytes];
    out.append(head, write_head(head, major, number));
}

template <class Sink>
void put_integer(Sink& out, std::int64_t value) {
    const auto bits = static_cast<std::uint64_t>(value);
    put_head(out, value < 0 ? 1 : 0, value < 0 ? ~bits : bits);
}

template <class Sink>
void put_bytes(Sink& out, std::string_view bytes) {
    put_head(out, 2, bytes.size());
    out.append(bytes.data(), bytes.size());
}

/// A string in UTF-8.
template <class Sink>
void put_text(Sink& out, std::string_view text) {
    put_head(out, 3, text.size());
    out.append(text.data(), text.size());
}

/// The head of an array; `n` items follow.
template <class Sink>
void put_array(Sink& out, std::uint64_t n) {
    put_head(out, 4, n);
}

template <class Sink>
void put_nil(Sink& out) {
    out.append("\xf6", 1);
}

}  // namespace cbor

/// SHA-256 (FIPS 180-4) of the appended bytes. A copy continues from the same bytes.
///
/// Owns: the hash state after the whole blocks so far, and the bytes of the last, incomplete block.
/// Threads: one at a time. Allocates nothing.
/// Cost: O(bytes). Uses the processor's SHA instructions if it has them, unless the environment
/// variable KVCORE_ISA is "baseline".
class Sha256 {
   public:
    using Digest = std::array<std::uint8_t, 32>;
    /// Bytes that `digest_with` overwrites after its input.
    static constexpr std::size_t kPadding = 72;

    [[nodiscard]] static Digest of(const void* data, std::size_t size) noexcept;

    Sha256() noexcept;

    /// Bytes appended so far.
    [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
    void append(const void* data, std::size_t size) noexcept;
    /// The digest of all bytes so far.
    [[nodiscard]] Digest digest() const noexcept;
    /// The digest of all bytes so far, which must be whole blocks of 64 bytes, followed by `bytes`
    /// [size]. Overwrites kPadding bytes after them.
    [[nodiscard]] Digest digest_with(std::uint8_t* bytes, std::size_t size) const noexcept;

   private:
    std::array<std::uint32_t, 8> state_;
    std::array<std::uint8_t, 64> block_{};  // size_ % 64 bytes of it
    std::uint64_t size_ = 0;                // bytes so far
};

namespace keys {
class HashedItems;
}

using PageKey = Sha256::Digest;

/// The version of KeyScheme::kKvcore: another version makes other keys.
constexpr std::int64_t kKeySchemeVersion = 1;

/// The rules for root keys and extras.
enum class KeyScheme {
    kKvcore,  // as defined at the top of this file
    kVllm,    // as vLLM computes them with sha256_cbor, see KeyOptions
};

/// Everything that the keys of a sequence depend on, except its tokens.
///
/// With kVllm the root key is SHA-256 of the seed only. In vLLM the seed is the text of
/// PYTHONHASHSEED, or "vllm-none-hash" if that is not set. The extra of a page is a list of:
/// `extra_key` (the name of a LoRA); [text, start] of each extra key (the identifier of an image);
/// `cache_salt`, for the first page only and unless it is ""; the page's embedding digest, for a
/// prompt with embeddings.
struct KeyOptions {
    KeyScheme scheme = KeyScheme::kKvcore;
    std::string seed = {};  // one CBOR item, see above; "" is nil, or vLLM's default
    std::optional<std::string> extra_key = {};   // UTF-8
    std::optional<std::string> cache_salt = {};  // UTF-8
    /// kVllm: for each page of a prompt with embeddings, SHA-256 of the embeddings of its tokens.
    /// Later pages use the SHA-256 of no bytes. See embedding_digests.
    std::optional<std::vector<PageKey>> embeddings = {};
};

/// An extra key and its place. The bytes are UTF-8 with kVllm.
struct PlacedKey {
    std::int64_t start = 0;   // index of its first token in the sequence
    std::int64_t length = 0;  // tokens, at least 1
    std::string_view bytes;

    /// The order of extra keys in `extra` and for `KeyChain::extend`.
    friend bool operator<(const PlacedKey& a, const PlacedKey& b) noexcept {
        return std::tie(a.start, a.length, a.bytes) < std::tie(b.start, b.length, b.bytes);
    }
};

/// Appends an extra key that overlaps a page, in the form that the page's key uses with kKvcore.
/// `start` counts from the first token of the page.
template <class Sink>
void put_placed_key(Sink& out, const PlacedKey& key) {
    cbor::put_array(out, 3);
    cbor::put_bytes(out, key.bytes);
    cbor::put_integer(out, key.start);
    cbor::put_integer(out, key.length);
}

/// The key that the first page of a sequence follows.
[[nodiscard]] PageKey root_key(const KeyOptions& options);

/// The key of a page that follows `parent`. `extra`: one CBOR item, see above; "" is nil.
[[nodiscard]] PageKey page_key(const PageKey& parent, const TokenId* tokens, std::int64_t n,
                               std::string_view extra = {});

/// Returns SHA-256 of each page's rows of `rows` [n]; the last page may be incomplete.
[[nodiscard]] std::vector<PageKey> embedding_digests(const std::byte* rows, std::int64_t n,
                                                     std::int64_t row_bytes,
                                                     std::int64_t page_size);

/// The keys of a sequence that grows.
///
/// Owns: the keys of its complete pages, the hash of the incomplete page, the extra keys. Hashes
/// tokens when they are appended and does not keep them. A copy, for example for a fork, continues
/// independently.
/// Invariant: keys() has num_tokens() / page_size() keys.
/// Threads: one at a time.
/// Memory: a method that cannot get memory throws std::bad_alloc and changes nothing.
/// Cost: `extend` O(new tokens + bytes of extra keys of the new pages), other methods O(1).
class KeyChain {
   public:
    /// Throws std::invalid_argument for a page size below 1, or for embeddings without kVllm.
    explicit KeyChain(std::int64_t page_size, KeyOptions options = {});

    /// Appends tokens [n], with the extra keys [num_extra] that start in them, sorted by start,
    /// length and bytes, without duplicates; an extra key may end after the tokens. Throws
    /// std::invalid_argument for other extra keys.
    void extend(const TokenId* tokens, std::int64_t n, const PlacedKey* extra = nullptr,
                std::size_t num_extra = 0);

    /// Keeps the first `num_pages` pages and forgets all later tokens. Throws std::invalid_argument
    /// for more pages than there are. O(extra keys).
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
    Sha256 page_;  // of the incomplete page
    std::int64_t num_tokens_ = 0;
    std::vector<Extra> extras_;       // by start
    std::size_t first_ahead_ = 0;     // in extras_: first key that starts after the complete pages
    std::vector<std::size_t> touch_;  // in extras_: keys that cross the end of the complete pages
};

}  // namespace kvcore
