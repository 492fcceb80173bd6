// SPDX-License-Identifier: Apache-2.0
// Page keys of a path in the tree: the namespace and the tokens, some of which are stand-ins for
// extra keys.
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "keys/path_keys.hpp"
#include "kvcore/extra_keys.hpp"
#include "support/check.hpp"
#include "support/random.hpp"

namespace tests::keys::path_keys {

using kvcore::ExtraKey;
using kvcore::KeyChain;
using kvcore::namespace_name;
using kvcore::PageKey;
using kvcore::PathKeys;
using kvcore::PlacedKey;
using kvcore::read_namespace_name;
using kvcore::StandIns;
using kvcore::TokenId;

namespace {

using Name = std::optional<std::string_view>;
using Keys = std::vector<PageKey>;
using Tokens = std::vector<TokenId>;

TEST(namespaces_are_read_back) {
    const std::string long_name(300, 'x');
    const std::string_view zero("a\0b", 3);
    for (const Name extra : {Name(), Name(""), Name("a"), Name(zero), Name(long_name)}) {
        for (const Name salt : {Name(), Name(""), Name("ab"), Name(long_name)}) {
            const std::string name = namespace_name(extra, salt);
            const kvcore::NamespaceParts parts = read_namespace_name(name);
            CHECK(parts.extra_key == extra);
            CHECK(parts.cache_salt == salt);
        }
    }
}

// A namespace with a name of the program's own has that name as its extra key.
TEST(other_names_are_extra_keys) {
    std::vector<std::string> names{"a", "b", "12345678", "some-name", "another name"};
    std::string made = namespace_name("lora", "salt");
    made[0] = 4;
    names.push_back(made);
    made[0] = 1;  // then the whole name would be the extra key
    names.push_back(made);
    made[0] = 2;  // then there would be no extra key
    names.push_back(made);
    made = namespace_name("lora", "salt");
    made[8] = 1;  // longer than the name
    names.push_back(made);
    names.emplace_back("\x03\xff\xff\xff\xff\xff\xff\xff\xff and more");
    const PathKeys paths(2, "", nullptr);
    for (const std::string& name : names) {
        CHECK(read_namespace_name(name).extra_key == Name(name));
        CHECK(!read_namespace_name(name).cache_salt);
        CHECK(paths.root(name) == kvcore::root_key({kvcore::KeyScheme::kKvcore, "", name, {}}));
    }
}

Keys keys_of(const PathKeys& paths, const std::string& name, const Tokens& tokens,
             std::int32_t first, std::int32_t last, const PageKey& parent) {
    Keys keys(static_cast<std::size_t>(last - first));
    paths.keys_of(name, tokens.data(), first, last, parent, keys.data());
    return keys;
}

void check_every_part(const PathKeys& paths, const std::string& name, const Tokens& shown,
                      const KeyChain& chain) {
    CHECK(paths.root(name) == chain.root());
    const auto n = static_cast<std::int32_t>(chain.keys().size());
    for (std::int32_t first = 0; first <= n; ++first) {
        const PageKey& parent =
            first == 0 ? chain.root() : chain.keys()[static_cast<std::size_t>(first - 1)];
        for (std::int32_t last = first; last <= n; ++last) {
            CHECK(keys_of(paths, name, shown, first, last, parent) ==
                  Keys(chain.keys().begin() + first, chain.keys().begin() + last));
        }
    }
}

TEST(keys_are_those_of_a_chain) {
    const Tokens tokens{5, -3, 7, 0, 1 << 30, 9, 2, 2, 2, 2, 1, 4};
    const std::string seed("\x61s", 2);  // an item of CBOR
    const PathKeys paths(3, seed, nullptr);
    KeyChain chain(3, {kvcore::KeyScheme::kKvcore, seed, "lora", "tenant"});
    chain.extend(tokens.data(), 12);
    check_every_part(paths, namespace_name("lora", "tenant"), tokens, chain);
}

// Keys at random places: some start at the same token, some cover several pages or reach the end.
TEST(stand_ins_are_resolved_by_their_names) {
    Random random(5);
    for (int round = 0; round < 200; ++round) {
        StandIns names;
        Tokens tokens;
        for (int i = 0; i < 12; ++i) tokens.push_back(static_cast<TokenId>(random.below(50)));
        Tokens shown = tokens;
        std::vector<PlacedKey> placed;
        for (std::int64_t start = 0; start < 12; ++start) {
            if (!random.chance(20)) continue;
            std::vector<ExtraKey> keys{{random.between(1, 9), "image"}};
            if (random.chance(40)) keys.push_back({keys[0].length + 1, "other"});
            for (const ExtraKey& key : keys) placed.push_back({start, key.length, key.bytes});
            TokenId& token = shown[static_cast<std::size_t>(start)];
            token = names.acquire(kvcore::stand_in_name(token, keys.data(), keys.size()));
        }
        KeyChain chain(3);
        chain.extend(tokens.data(), 12, placed.data(), placed.size());
        const PathKeys paths(3, "", &names);
        CHECK_EQ(paths.may_have_extras(), !placed.empty());
        check_every_part(paths, "", shown, chain);
    }
}

// Low ids that are not stand-ins are ordinary tokens.
TEST(low_tokens_are_tokens) {
    StandIns names;
    const ExtraKey image{1, "image"};
    static_cast<void>(names.acquire(kvcore::stand_in_name(5, &image, 1)));
    const Tokens tokens{1, StandIns::kHighest, 3, 4};
    KeyChain chain(2);
    chain.extend(tokens.data(), 4);
    check_every_part(PathKeys(2, "", &names), "", tokens, chain);
    check_every_part(PathKeys(2, "", nullptr), "", tokens, chain);
}

}  // namespace

}  // namespace tests::keys::path_keys
