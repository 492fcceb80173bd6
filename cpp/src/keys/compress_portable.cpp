// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "keys/kernels.hpp"

namespace kvcore::keys {

const std::uint32_t kRoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

namespace {

using Word = std::uint32_t;

constexpr Word rotate(Word x, int by) noexcept { return x >> by | x << (32 - by); }

Word read_big_endian(const std::uint8_t* from) noexcept {
    return Word{from[0]} << 24 | Word{from[1]} << 16 | Word{from[2]} << 8 | Word{from[3]};
}

// The words of the message, 16 at a time: each is computed from the 16 words before it.
Word next_word(const std::array<Word, 16>& w, std::size_t t) noexcept {
    const Word before = w[(t + 1) % 16], last = w[(t + 14) % 16];
    const Word small = rotate(before, 7) ^ rotate(before, 18) ^ before >> 3;
    const Word large = rotate(last, 17) ^ rotate(last, 19) ^ last >> 10;
    return w[t % 16] + small + w[(t + 9) % 16] + large;
}

void compress_block(Word* state, const std::uint8_t* block) noexcept {
    std::array<Word, 16> w;
    for (std::size_t t = 0; t < 16; ++t) w[t] = read_big_endian(block + 4 * t);
    Word a = state[0], b = state[1], c = state[2], d = state[3];
    Word e = state[4], f = state[5], g = state[6], h = state[7];
    for (std::size_t t = 0; t < 64; ++t) {
        if (t >= 16) w[t % 16] = next_word(w, t);
        const Word choice = g ^ (e & (f ^ g));
        const Word majority = (a & b) | (c & (a | b));
        const Word one = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + choice +
                         kRoundConstants[t] + w[t % 16];
        const Word two = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + majority;
        h = g, g = f, f = e, e = d + one;
        d = c, c = b, b = a, a = one + two;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

}  // namespace

void compress_portable(std::uint32_t* state, const std::uint8_t* blocks, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) compress_block(state, blocks + 64 * i);
}

}  // namespace kvcore::keys
