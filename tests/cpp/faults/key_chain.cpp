// SPDX-License-Identifier: Apache-2.0
// A chain of keys when memory runs out: it has the keys of all its tokens, or its old keys.
#include <memory>
#include <string>

#include "kvcore/page_keys.hpp"
#include "support/failing_memory.hpp"

namespace tests::faults::key_chain {

using failing_memory::each_site;
using kvcore::KeyChain;
using kvcore::PlacedKey;
using kvcore::TokenId;

namespace {

constexpr std::string_view kImage = "bytes that are longer than what a string keeps in itself";
constexpr TokenId kTokens[100] = {7};

std::unique_ptr<KeyChain> chain_of_some() {
    auto chain = std::make_unique<KeyChain>(8);
    const PlacedKey images[]{{1, 2, kImage}, {3, 50, kImage}};
    chain->extend(kTokens, 20, images, 2);
    return std::make_unique<KeyChain>(*chain);  // a copy has no spare capacity
}

std::string text_of(std::unique_ptr<KeyChain>& chain) {
    std::string text = std::to_string(chain->num_tokens());
    chain->extend(kTokens, 16);
    for (const kvcore::PageKey& key : chain->keys()) text += " " + std::to_string(key[0]);
    return text;
}

TEST(verbs_leave_no_trace) {
    each_site(
        "extend", chain_of_some,
        [](auto& chain) {
            const PlacedKey images[]{{25, 5, kImage}, {40, 70, kImage}};
            chain->extend(kTokens, 100, images, 2);
        },
        text_of);
    each_site("truncate", chain_of_some, [](auto& chain) { chain->truncate(1); }, text_of);
}

}  // namespace

}  // namespace tests::faults::key_chain
