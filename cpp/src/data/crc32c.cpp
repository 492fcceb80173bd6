// SPDX-License-Identifier: Apache-2.0
#include "kvcore/page_bytes.hpp"

#include <array>
#include <cstring>

#include "data/crc32c_paths.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace kvcore {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie in memory");

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // Castagnoli's, bits reversed
constexpr std::size_t kWord = 8;
constexpr std::size_t kStream = 2048;  // bytes of each of three parallel streams

using ByteTable = std::array<std::uint32_t, 256>;

std::uint32_t step_zero_byte(std::uint32_t state) noexcept {
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) * kPolynomial);
    return state;
}

/// The effect of a byte on the state if `i` bytes follow it in its word, for each i.
struct WordTables {
    WordTables() noexcept {
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            std::uint32_t state = byte;
            for (ByteTable& table : by_distance) {
                state = step_zero_byte(state);
                table[byte] = state;
            }
        }
    }
    std::array<ByteTable, kWord> by_distance{};
};

/// The effect of kStream zero bytes on each byte of the state. The operator is linear over bits.
struct StreamTables {
    StreamTables() noexcept {
        for (std::size_t place = 0; place < by_place.size(); ++place) {
            for (std::uint32_t bit = 0; bit < 8; ++bit) {
                std::uint32_t state = 1U << (8 * place + bit);
                for (std::size_t i = 0; i < kStream; ++i) state = step_zero_byte(state);
                by_place[place][1U << bit] = state;
            }
            for (std::uint32_t byte = 1; byte < 256; ++byte) {
                const std::uint32_t rest = byte & (byte - 1);  // without its lowest bit
                by_place[place][byte] = by_place[place][rest] ^ by_place[place][byte ^ rest];
            }
        }
    }
    [[nodiscard]] std::uint32_t behind_zeros(std::uint32_t state) const noexcept {
        return by_place[0][state & 255] ^ by_place[1][(state >> 8) & 255] ^
               by_place[2][(state >> 16) & 255] ^ by_place[3][state >> 24];
    }
    std::array<ByteTable, 4> by_place{};
};

std::uint64_t word_at(const unsigned char* at) noexcept {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

}  // namespace

std::uint32_t crc32c_by_tables(const void* data, std::size_t bytes, std::uint32_t before) noexcept {
    static const WordTables tables;
    const auto& by_distance = tables.by_distance;
    const auto* at = static_cast<const unsigned char*>(data);
    std::uint32_t state = ~before;
    for (; bytes >= kWord; at += kWord, bytes -= kWord) {
        const std::uint64_t word = word_at(at) ^ state;
        state = 0;
        for (std::size_t i = 0; i < kWord; ++i) {
            state ^= by_distance[kWord - 1 - i][(word >> (8 * i)) & 255];
        }
    }
    for (; bytes > 0; ++at, --bytes) {
        state = (state >> 8) ^ by_distance[0][(state ^ *at) & 255];
    }
    return ~state;
}

#if defined(__x86_64__)

bool has_crc32c_instruction() noexcept { return __builtin_cpu_supports("sse4.2") != 0; }

// The instruction takes three cycles, and one can start in each cycle: three streams keep the unit
// busy.
__attribute__((target("sse4.2"))) std::uint32_t crc32c_by_instruction(
    const void* data, std::size_t bytes, std::uint32_t before) noexcept {
    static const StreamTables tables;
    const auto* at = static_cast<const unsigned char*>(data);
    std::uint64_t state = ~before;
    for (; bytes >= 3 * kStream; at += 3 * kStream, bytes -= 3 * kStream) {
        std::uint64_t second = 0;
        std::uint64_t third = 0;
        for (std::size_t i = 0; i < kStream; i += kWord) {
            state = _mm_crc32_u64(state, word_at(at + i));
            second = _mm_crc32_u64(second, word_at(at + kStream + i));
            third = _mm_crc32_u64(third, word_at(at + 2 * kStream + i));
        }
        const auto first = static_cast<std::uint32_t>(state);
        const std::uint32_t both = tables.behind_zeros(first) ^ static_cast<std::uint32_t>(second);
        state = tables.behind_zeros(both) ^ static_cast<std::uint32_t>(third);
    }
    for (; bytes >= kWord; at += kWord, bytes -= kWord) state = _mm_crc32_u64(state, word_at(at));
    auto last = static_cast<std::uint32_t>(state);
    for (; bytes > 0; ++at, --bytes) last = _mm_crc32_u8(last, *at);
    return ~last;
}

#else

bool has_crc32c_instruction() noexcept { return false; }

std::uint32_t crc32c_by_instruction(const void* data, std::size_t bytes,
                                    std::uint32_t before) noexcept {
    return crc32c_by_tables(data, bytes, before);
}

#endif

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t before) noexcept {
    static const bool has_instruction = has_crc32c_instruction();
    return has_instruction ? crc32c_by_instruction(data, bytes, before)
                           : crc32c_by_tables(data, bytes, before);
}

}  // namespace kvcore
