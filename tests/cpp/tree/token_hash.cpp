// SPDX-License-Identifier: Apache-2.0
#include "tree/token_hash.hpp"

#include <limits>
#include <vector>

#include "support/check.hpp"
#include "support/random.hpp"
#include "tree/sum_chunks.hpp"

namespace tests::tree::token_hash {
namespace {

using kvcore::TokenId;

// The sum of products as its definition states it.
std::uint64_t plain_sum(const std::vector<TokenId>& tokens, std::uint32_t s) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < tokens.size(); i += 2) {
        const auto number = [&](std::size_t at) {
            return static_cast<std::uint32_t>(tokens[at]) + kvcore::detail::kHashKeys[at] + s;
        };
        sum += std::uint64_t{number(i)} * number(i + 1);
    }
    return sum;
}

std::vector<TokenId> random_tokens(Random& random, std::size_t n) {
    std::vector<TokenId> tokens(n);
    for (TokenId& token : tokens) {
        token = random.chance(10) ? std::numeric_limits<TokenId>::min()
                                  : static_cast<TokenId>(random.next());
    }
    return tokens;
}

TEST(each_kernel_sums_the_products_of_chunks) {
    Random random(check::seed_or(17));
    for (std::size_t n = 0; n < 40; ++n) {
        const auto s = static_cast<std::uint32_t>(random.next());
        const std::vector<TokenId> tokens = random_tokens(random, 16 * n + 1);
        const TokenId* const first = tokens.data() + 1;  // not at the start of a cache line
        for (const auto sum :
             {kvcore::detail::sum_chunks(), &kvcore::detail::sum_chunks_portable}) {
            std::vector<std::uint64_t> sums(n + 1, 7);
            sum(sums.data(), first, n, s);
            for (std::size_t i = 0; i < n; ++i) {
                CHECK_EQ(sums[i], plain_sum({first + 16 * i, first + 16 * (i + 1)}, s));
            }
            CHECK_EQ(sums[n], std::uint64_t{7});
        }
    }
}

TEST(pages_have_the_hashes_of_their_tokens) {
    Random random(check::seed_or(18));
    for (const std::int32_t size : {1, 2, 3, 4, 15, 16, 17, 20, 32, 48, 64, 512, 528, 1040}) {
        for (std::int32_t n = 0; n < 20; ++n) {
            const std::uint64_t seed = random.next();
            const std::vector<TokenId> tokens =
                random_tokens(random, static_cast<std::size_t>(size) * static_cast<std::size_t>(n));
            std::vector<std::uint64_t> hashes(static_cast<std::size_t>(n) + 1, 7);
            kvcore::hash_pages(hashes.data(), seed, tokens.data(), size, n);
            for (std::int32_t i = 0; i < n; ++i) {
                const TokenId* const page = tokens.data() + std::ptrdiff_t{i} * size;
                CHECK_EQ(hashes[static_cast<std::size_t>(i)],
                         kvcore::hash_tokens(seed, page, size));
            }
            CHECK_EQ(hashes.back(), std::uint64_t{7});
        }
    }
}

TEST(each_token_changes_the_hash) {
    Random random(check::seed_or(19));
    std::vector<TokenId> tokens = random_tokens(random, 64);
    const std::uint64_t hash = kvcore::hash_tokens(5, tokens.data(), 64);
    for (TokenId& token : tokens) {
        token ^= 1;
        std::uint64_t other = 0;
        kvcore::hash_pages(&other, 5, tokens.data(), 64, 1);
        CHECK(other != hash);
        token ^= 1;
    }
}

}  // namespace
}  // namespace tests::tree::token_hash
