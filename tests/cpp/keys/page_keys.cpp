// SPDX-License-Identifier: Apache-2.0
#include "kvcore/page_keys.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/check.hpp"
#include "support/random.hpp"

namespace tests::keys::page_keys {

using kvcore::KeyChain;
using kvcore::KeyOptions;
using kvcore::KeyScheme;
using kvcore::PageKey;
using kvcore::PlacedKey;
using kvcore::TokenId;

namespace cbor = kvcore::cbor;

namespace {

std::string hex(const PageKey& key) {
    std::string text;
    for (const std::uint8_t byte : key) {
        text += "0123456789abcdef"[byte >> 4];
        text += "0123456789abcdef"[byte & 15];
    }
    return text;
}

std::vector<std::string> hex(const std::vector<PageKey>& keys) {
    std::vector<std::string> out;
    for (const PageKey& key : keys) out.push_back(hex(key));
    return out;
}

std::string_view bytes_of(const PageKey& key) {
    return {reinterpret_cast<const char*>(key.data()), key.size()};
}

// Returns the extra item of one page in kvcore's scheme.
std::string extra_of(const std::vector<PlacedKey>& extra, std::int64_t first, std::int64_t end) {
    std::string items;
    std::uint64_t n = 0;
    for (const PlacedKey& each : extra) {
        if (each.start >= end || each.length <= first - each.start) continue;
        cbor::put_array(items, 3);
        cbor::put_bytes(items, each.bytes);
        cbor::put_integer(items, each.start - first);
        cbor::put_integer(items, each.length);
        ++n;
    }
    if (n == 0) return {};
    std::string out;
    cbor::put_array(out, n);
    return out + items;
}

// Computes the keys of a sequence. The items of each page are put together as text.
std::vector<PageKey> slow_keys(const std::vector<TokenId>& tokens, std::int64_t page_size,
                               const KeyOptions& options, const std::vector<PlacedKey>& extra) {
    std::vector<PageKey> keys;
    PageKey parent = kvcore::root_key(options);
    const auto n = static_cast<std::int64_t>(tokens.size());
    for (std::int64_t first = 0; first + page_size <= n; first += page_size) {
        std::string page;
        cbor::put_array(page, 3);
        cbor::put_bytes(page, bytes_of(parent));
        cbor::put_array(page, static_cast<std::uint64_t>(page_size));
        for (std::int64_t i = 0; i < page_size; ++i) {
            cbor::put_integer(page, tokens[static_cast<std::size_t>(first + i)]);
        }
        const std::string item = extra_of(extra, first, first + page_size);
        page += item.empty() ? "\xf6" : item;
        parent = kvcore::Sha256::of(page.data(), page.size());
        CHECK_EQ(hex(parent),
                 hex(kvcore::page_key(keys.empty() ? kvcore::root_key(options) : keys.back(),
                                      tokens.data() + first, page_size, item)));
        keys.push_back(parent);
    }
    return keys;
}

TEST(page_keys_are_those_of_vllm) {
    std::vector<TokenId> tokens(16);
    for (int i = 0; i < 16; ++i) tokens[static_cast<std::size_t>(i)] = i;
    CHECK_EQ(hex(kvcore::page_key({}, tokens.data(), 16)),
             std::string("2464a2d934d06889ea9ce93b71642eaf2348923006a6214c1d6b1340eb482213"));
}

TokenId any_token(Random& random) {
    const std::int64_t limits[] = {24, 256, 65536, std::int64_t{1} << 31};
    const std::int64_t below = limits[random.below(4)];
    const std::int64_t token =
        random.chance(30) ? below - 1 - random.below(3) : random.below(below);
    return static_cast<TokenId>(random.chance(20) ? -1 - token : token);
}

std::vector<PlacedKey> any_extra(Random& random, std::int64_t n) {
    std::vector<PlacedKey> extra;
    for (std::int64_t i = n == 0 ? 0 : random.below(6); i > 0; --i) {
        const std::int64_t length =
            random.chance(5) ? std::numeric_limits<std::int64_t>::max() : random.between(1, 30);
        extra.push_back({random.below(n), length, random.chance(50) ? "image" : ""});
    }
    std::sort(extra.begin(), extra.end());
    const auto is_same = [](const auto& a, const auto& b) { return !(a < b) && !(b < a); };
    extra.erase(std::unique(extra.begin(), extra.end(), is_same), extra.end());
    return extra;
}

// Extends a chain in pieces. Copies and truncated chains are also extended.
TEST(a_chain_has_the_keys_of_its_pages) {
    Random random(check::seed_or(1));
    for (int round = 0; round < 3000; ++round) {
        check::note = "round " + std::to_string(round);
        const std::int64_t page_size = random.between(1, 40);
        std::vector<TokenId> tokens(static_cast<std::size_t>(random.below(300)));
        for (TokenId& token : tokens) token = any_token(random);
        const auto n = static_cast<std::int64_t>(tokens.size());
        const std::vector<PlacedKey> extra = any_extra(random, n);
        KeyOptions options;
        if (random.chance(50)) options.cache_salt = random.chance(50) ? "salt" : "";
        if (random.chance(50)) options.extra_key = "lora";
        if (random.chance(50)) cbor::put_integer(options.seed, random.below(1000));
        KeyChain chain(page_size, options);
        while (chain.num_tokens() < n) {
            const std::int64_t from = chain.num_tokens();
            const std::int64_t more = random.between(1, n - from);
            std::vector<PlacedKey> now;
            for (const PlacedKey& each : extra) {
                if (each.start >= from && each.start < from + more) now.push_back(each);
            }
            KeyChain copy = chain;
            copy.extend(tokens.data() + from, more, now.data(), now.size());
            if (random.chance(50)) chain = copy;
            if (random.chance(20)) {
                chain.truncate(random.between(0, static_cast<std::int64_t>(chain.keys().size())));
            }
        }
        CHECK_EQ(hex(chain.keys()), hex(slow_keys(tokens, page_size, options, extra)));
        CHECK_EQ(chain.keys().size(), n / page_size);
    }
    check::note.clear();
}

TEST(invalid_options_and_tokens_are_refused) {
    const TokenId tokens[] = {1, 2, 3, 4};
    CHECK_THROWS(std::invalid_argument, KeyChain(0));
    KeyOptions options;
    options.embeddings.emplace();
    CHECK_THROWS(std::invalid_argument, KeyChain(4, options));
    KeyChain chain(2);
    chain.extend(tokens, 3);
    const PlacedKey early{2, 1, "a"}, late{5, 1, "a"}, empty{3, 0, "a"};
    const PlacedKey unsorted[] = {{4, 1, "a"}, {3, 1, "a"}};
    const PlacedKey by_length[] = {{3, 2, "a"}, {3, 1, "a"}}, twice[] = {{3, 1, "a"}, {3, 1, "a"}};
    CHECK_THROWS(std::invalid_argument, chain.extend(tokens, 2, &early, 1));
    CHECK_THROWS(std::invalid_argument, chain.extend(tokens, 2, &late, 1));
    CHECK_THROWS(std::invalid_argument, chain.extend(tokens, 2, &empty, 1));
    CHECK_THROWS(std::invalid_argument, chain.extend(tokens, 2, unsorted, 2));
    CHECK_THROWS(std::invalid_argument, chain.extend(tokens, 2, by_length, 2));
    CHECK_THROWS(std::invalid_argument, chain.extend(tokens, 2, twice, 2));
    CHECK_THROWS(std::invalid_argument, chain.truncate(2));
    CHECK_THROWS(std::invalid_argument, chain.truncate(-1));
    CHECK_EQ(chain.num_tokens(), 3);
    chain.extend(tokens + 3, 1);
    KeyChain other(2);
    other.extend(tokens, 4);
    CHECK_EQ(hex(chain.keys()), hex(other.keys()));
}

// Computes the third item of each page as vLLM does.
TEST(extra_items_are_those_of_vllm) {
    std::vector<TokenId> tokens(48);
    KeyOptions options;
    options.scheme = KeyScheme::kVllm;
    CHECK_EQ(hex(kvcore::root_key(options)), hex(kvcore::Sha256::of("\x6evllm-none-hash", 15)));
    cbor::put_text(options.seed, "0");
    CHECK_EQ(hex(kvcore::root_key(options)), hex(kvcore::Sha256::of("\x61"
                                                                    "0",
                                                                    2)));
    options.extra_key = "sql";
    options.cache_salt = "s";
    const std::byte rows[40] = {};
    options.embeddings = kvcore::embedding_digests(rows, 20, 2, 16);
    CHECK_EQ(options.embeddings->size(), 2);
    KeyChain chain(16, options);
    const PlacedKey image{11, 10, "img"};
    chain.extend(tokens.data(), 48, &image, 1);
    PageKey parent = chain.root();
    for (std::size_t page = 0; page < 3; ++page) {
        std::string extra;
        cbor::put_array(extra, page == 0 ? 4 : page == 1 ? 3 : 2);
        cbor::put_text(extra, "sql");
        if (page < 2) {
            cbor::put_array(extra, 2);
            cbor::put_text(extra, "img");
            cbor::put_integer(extra, page == 0 ? 11 : -5);
        }
        if (page == 0) cbor::put_text(extra, "s");
        const std::size_t held = page == 0 ? 32 : page == 1 ? 8 : 0;
        const PageKey digest = kvcore::Sha256::of(rows, held);
        cbor::put_bytes(extra, bytes_of(digest));
        parent = kvcore::page_key(parent, tokens.data(), 16, extra);
        CHECK_EQ(hex(chain.keys()[page]), hex(parent));
    }
}

}  // namespace

}  // namespace tests::keys::page_keys
