// SPDX-License-Identifier: Apache-2.0
#include "kvcore/page_bytes.hpp"

#include <cstring>
#include <vector>

#include "data/crc32c_paths.hpp"
#include "support/check.hpp"
#include "support/random.hpp"

namespace tests::data::crc32c {

namespace {

using Bytes = std::vector<unsigned char>;

std::uint32_t bit_by_bit(const unsigned char* at, std::size_t bytes, std::uint32_t before) {
    std::uint32_t state = ~before;
    for (std::size_t i = 0; i < bytes; ++i) {
        state ^= at[i];
        for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) * 0x82f63b78U);
    }
    return ~state;
}

// Vectors of RFC 3720, B.4, and the common check value.
TEST(known_values) {
    CHECK_EQ(kvcore::crc32c("123456789", 9), 0xe3069283U);
    const Bytes zeros(32, 0);
    CHECK_EQ(kvcore::crc32c(zeros.data(), 32), 0x8a9136aaU);
    const Bytes ones(32, 0xff);
    CHECK_EQ(kvcore::crc32c(ones.data(), 32), 0x62a8ab43U);
    Bytes rising(32);
    for (std::size_t i = 0; i < 32; ++i) rising[i] = static_cast<unsigned char>(i);
    CHECK_EQ(kvcore::crc32c(rising.data(), 32), 0x46dd794eU);
    CHECK_EQ(kvcore::crc32c(nullptr, 0), 0U);
    CHECK_EQ(kvcore::crc32c(nullptr, 0, 7), 7U);
}

TEST(all_paths_agree) {
    Random random(check::seed_or(41));
    Bytes bytes(40'000);
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random.below(256));
    for (int i = 0; i < 300; ++i) {
        const auto begin = static_cast<std::size_t>(random.below(64));
        const std::int64_t most = i % 3 == 0 ? 39'000 : 200;
        const auto length = static_cast<std::size_t>(random.below(most));
        const auto before = static_cast<std::uint32_t>(random.next());
        const unsigned char* at = bytes.data() + begin;
        const std::uint32_t expected = bit_by_bit(at, length, before);
        CHECK_EQ(kvcore::crc32c(at, length, before), expected);
        CHECK_EQ(kvcore::crc32c_by_tables(at, length, before), expected);
        if (kvcore::has_crc32c_instruction()) {
            CHECK_EQ(kvcore::crc32c_by_instruction(at, length, before), expected);
        }
    }
}

TEST(continues) {
    Random random(check::seed_or(41));
    Bytes bytes(20'000);
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random.below(256));
    const std::uint32_t whole = kvcore::crc32c(bytes.data(), bytes.size());
    for (int i = 0; i < 50; ++i) {
        const auto cut = static_cast<std::size_t>(random.below(20'001));
        const std::uint32_t first = kvcore::crc32c(bytes.data(), cut);
        CHECK_EQ(kvcore::crc32c(bytes.data() + cut, bytes.size() - cut, first), whole);
    }
}

}  // namespace

}  // namespace tests::data::crc32c
