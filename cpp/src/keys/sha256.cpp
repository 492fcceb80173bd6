// SPDX-License-Identifier: Apache-2.0
#include "kvcore/page_keys.hpp"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "keys/kernels.hpp"

namespace kvcore {
namespace {

constexpr std::size_t kBlock = 64;
constexpr std::size_t kLength = 8;  // bytes of the length that ends the last block

void write_big_endian(std::uint8_t* out, std::uint32_t word) noexcept {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap32(word);
    std::memcpy(out, &word, sizeof word);
#else
    for (int i = 0; i < 4; ++i) out[i] = static_cast<std::uint8_t>(word >> (24 - 8 * i));
#endif
}

}  // namespace

Sha256::Sha256() noexcept
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
             0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

Sha256::Digest Sha256::of(const void* data, std::size_t size) noexcept {
    Sha256 hash;
    hash.append(data, size);
    return hash.digest();
}

void Sha256::append(const void* data, std::size_t size) noexcept {
    if (size == 0) return;
    const keys::Compress compress = keys::kernels().compress;
    auto* from = static_cast<const std::uint8_t*>(data);
    const std::size_t held = size_ % kBlock;
    size_ += size;
    if (held > 0) {
        const std::size_t taken = std::min(size, kBlock - held);
        std::memcpy(block_.data() + held, from, taken);
        if (held + taken < kBlock) return;
        compress(state_.data(), block_.data(), 1);
        from += taken;
        size -= taken;
    }
    if (size >= kBlock) compress(state_.data(), from, size / kBlock);
    std::memcpy(block_.data(), from + size / kBlock * kBlock, size % kBlock);
}

Sha256::Digest Sha256::digest() const noexcept {
    Sha256 whole = *this;
    const std::size_t held = size_ % kBlock;
    whole.size_ -= held;
    std::uint8_t last[kBlock + kPadding];
    std::memcpy(last, block_.data(), kBlock);
    return whole.digest_with(last, held);
}

Sha256::Digest Sha256::digest_with(std::uint8_t* bytes, std::size_t size) const noexcept {
    assert(size_ % kBlock == 0);
    const std::uint64_t bits = (size_ + size) * 8;
    bytes[size] = 0x80;
    std::memset(bytes + size + 1, 0, kPadding - 1);
    const std::size_t blocks = (size + 1 + kLength + kBlock - 1) / kBlock;
    std::uint8_t* length = bytes + blocks * kBlock - kLength;
    write_big_endian(length, static_cast<std::uint32_t>(bits >> 32));
    write_big_endian(length + 4, static_cast<std::uint32_t>(bits));
    auto state = state_;
    keys::kernels().compress(state.data(), bytes, blocks);
    Digest digest;
    for (std::size_t i = 0; i < state.size(); ++i) {
        write_big_endian(digest.data() + 4 * i, state[i]);
    }
    return digest;
}

}  // namespace kvcore
