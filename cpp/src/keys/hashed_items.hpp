// SPDX-License-Identifier: Apache-2.0
// The items of a page on their way into its hash.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "keys/kernels.hpp"
#include "kvcore/page_keys.hpp"
#include "kvcore/types.hpp"

namespace kvcore::keys {

/// A sink of items. It gathers some hundred bytes, so that the hash gets whole blocks. A page of a
/// few dozen tokens is hashed where its items are written.
///
/// Invariant: the hash has all bytes but the last filled_.
class HashedItems {
   public:
    explicit HashedItems(Sha256& hash) noexcept : hash_(hash), write_(kernels().write_tokens) {}

    void append(const char* data, std::size_t size) noexcept {
        if (filled_ + size > kRoom) flush();
        if (size > kRoom) {
            hash_.append(data, size);
            return;
        }
        std::memcpy(bytes_ + filled_, data, size);
        filled_ += size;
    }

    /// Writes the items of a page before its `n` tokens: heads of arrays, and the digest of
    /// `parent`.
    void begin_page(const Sha256::Digest& parent, std::int64_t n) noexcept {
        if (filled_ + parent.size() + 3 * cbor::kMostHeadBytes > kRoom) flush();
        put_head(4, 3);
        put_head(2, parent.size());
        std::memcpy(bytes_ + filled_, parent.data(), parent.size());
        filled_ += parent.size();
        put_head(4, static_cast<std::uint64_t>(n));
    }

    void put_tokens(const TokenId* tokens, std::int64_t n) noexcept {
        for (auto left = static_cast<std::size_t>(n); left > 0;) {
            if (filled_ + kTokenRoom > kRoom) flush();
            const std::size_t taken = std::min(left, (kRoom - filled_) / kTokenRoom);
            filled_ += write_(bytes_ + filled_, tokens, taken);
            tokens += taken;
            left -= taken;
        }
    }

    /// Gives the hash all bytes.
    void flush() noexcept {
        hash_.append(bytes_, filled_);
        filled_ = 0;
    }

    /// Returns the digest of all bytes, and resets the hash.
    [[nodiscard]] Sha256::Digest finish() noexcept {
        if (hash_.size() == 0) {
            const std::size_t size = filled_;
            filled_ = 0;
            return hash_.digest_with(bytes_, size);
        }
        flush();
        const Sha256::Digest digest = hash_.digest();
        hash_ = Sha256();
        return digest;
    }

   private:
    static constexpr std::size_t kRoom = 640;

    void put_head(unsigned major, std::uint64_t number) noexcept {
        auto* out = reinterpret_cast<char*>(bytes_ + filled_);
        filled_ += cbor::write_head(out, major, number);
    }

    Sha256& hash_;
    const WriteTokens write_;
    std::size_t filled_ = 0;
    std::uint8_t bytes_[kRoom + Sha256::kPadding];
};

}  // namespace kvcore::keys
