// SPDX-License-Identifier: Apache-2.0
#include "kvcore/page_keys.hpp"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "keys/kernels.hpp"
#include "support/check.hpp"
#include "support/random.hpp"

namespace tests::keys::sha256 {

using kvcore::Sha256;

namespace {

std::string hex(const Sha256::Digest& digest) {
    std::string text;
    for (const std::uint8_t byte : digest) {
        text += "0123456789abcdef"[byte >> 4];
        text += "0123456789abcdef"[byte & 15];
    }
    return text;
}

// FIPS 180-4 and its examples from NIST.
TEST(known_messages_have_their_digests) {
    const struct {
        std::string message;
        std::string_view digest;
    } known[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrl"
         "m"
         "nopqrsmnopqrstnopqrstu",
         "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
        {std::string(1'000'000, 'a'),
         "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
    };
    for (const auto& each : known) {
        Sha256 hash;
        hash.append(each.message.data(), each.message.size());
        CHECK_EQ(hex(hash.digest()), std::string(each.digest));
        CHECK_EQ(hex(hash.digest()), std::string(each.digest));  // digest() changes nothing
    }
}

// The hash takes the bytes in pieces of any size. Copies of the hash continue independently.
TEST(bytes_may_come_in_pieces) {
    Random random(check::seed_or(1));
    for (int round = 0; round < 2000; ++round) {
        std::vector<std::uint8_t> bytes(static_cast<std::size_t>(random.below(400)));
        for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.next());
        const std::string whole = hex(Sha256::of(bytes.data(), bytes.size()));
        Sha256 hash;
        for (std::size_t i = 0; i < bytes.size();) {
            std::vector<std::uint8_t> rest(bytes.begin() + static_cast<std::ptrdiff_t>(i),
                                           bytes.end());
            rest.resize(rest.size() + Sha256::kPadding);
            if (i % 64 == 0) CHECK_EQ(hex(hash.digest_with(rest.data(), bytes.size() - i)), whole);
            const auto most = static_cast<std::int64_t>(bytes.size() - i);
            const auto size = static_cast<std::size_t>(random.between(0, most));
            hash.append(bytes.data() + i, size);
            Sha256 other = hash;
            other.append("x", 1);
            i += size;
        }
        CHECK_EQ(hash.size(), bytes.size());
        CHECK_EQ(hex(hash.digest()), whole);
    }
}

// Compares the fastest kernels of this processor with the portable kernels.
TEST(kernels_agree_with_the_portable_ones) {
    Random random(check::seed_or(1));
    const kvcore::keys::Kernels& fastest = kvcore::keys::kernels();
    for (int round = 0; round < 2000; ++round) {
        std::vector<std::uint32_t> state(8), other;
        for (std::uint32_t& word : state) word = static_cast<std::uint32_t>(random.next());
        std::vector<std::uint8_t> blocks(static_cast<std::size_t>(64 * random.below(5)));
        for (std::uint8_t& byte : blocks) byte = static_cast<std::uint8_t>(random.next());
        other = state;
        fastest.compress(state.data(), blocks.data(), blocks.size() / 64);
        kvcore::keys::compress_portable(other.data(), blocks.data(), blocks.size() / 64);
        CHECK_EQ(state, other);
    }
}

TEST(all_token_encoders_write_the_same_bytes) {
    Random random(check::seed_or(1));
    const std::int64_t near[] = {0, 23, 24, 255, 256, 65535, 65536, INT32_MAX};
    for (int round = 0; round < 2000; ++round) {
        std::vector<std::int32_t> tokens(static_cast<std::size_t>(random.below(40)));
        for (std::int32_t& token : tokens) {
            const std::int64_t value =
                random.chance(50) ? near[random.below(8)] : random.below(std::int64_t{1} << 31);
            token = static_cast<std::int32_t>(random.chance(30) ? -1 - value : value);
        }
        std::string expected;
        for (const std::int32_t token : tokens) kvcore::cbor::put_integer(expected, token);
        for (const auto write :
             {kvcore::keys::kernels().write_tokens, &kvcore::keys::write_tokens_portable}) {
            std::string out(kvcore::keys::kTokenRoom * tokens.size(), '\0');
            auto* bytes = reinterpret_cast<std::uint8_t*>(out.data());
            out.resize(write(bytes, tokens.data(), tokens.size()));
            CHECK_EQ(out, expected);
        }
    }
}

std::string integer(std::int64_t value) {
    std::string out;
    kvcore::cbor::put_integer(out, value);
    return out;
}

// Examples of RFC 8949, appendix A.
TEST(items_take_the_fewest_bytes) {
    using namespace std::string_literals;
    CHECK_EQ(integer(0), "\x00"s);
    CHECK_EQ(integer(23), "\x17"s);
    CHECK_EQ(integer(24), "\x18\x18"s);
    CHECK_EQ(integer(255), "\x18\xff"s);
    CHECK_EQ(integer(1000), "\x19\x03\xe8"s);
    CHECK_EQ(integer(1'000'000), "\x1a\x00\x0f\x42\x40"s);
    CHECK_EQ(integer(1'000'000'000'000), "\x1b\x00\x00\x00\xe8\xd4\xa5\x10\x00"s);
    CHECK_EQ(integer(-1), "\x20"s);
    CHECK_EQ(integer(-1000), "\x39\x03\xe7"s);
    CHECK_EQ(integer(INT64_MIN), "\x3b\x7f\xff\xff\xff\xff\xff\xff\xff"s);
    std::string out;
    kvcore::cbor::put_array(out, 3);
    kvcore::cbor::put_bytes(out, "\x01\x02");
    kvcore::cbor::put_text(out, "IETF");
    kvcore::cbor::put_nil(out);
    CHECK_EQ(out, "\x83\x42\x01\x02\x64IETF\xf6"s);
}

}  // namespace

}  // namespace tests::keys::sha256
