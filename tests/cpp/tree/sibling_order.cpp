// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <vector>

#include "support/page_nodes.hpp"
#include "tree/tree_node.hpp"

namespace tests::tree::sibling_order {

using kvcore::SiblingOrder;
using kvcore::TreeNode;

namespace {

/// A SiblingOrder and the map that it must agree with.
class CheckedOrder {
   public:
    CheckedOrder(std::int32_t page_size, std::int64_t vocabulary, std::uint64_t seed)
        : page_size_(page_size),
          vocabulary_(vocabulary),
          random_(seed),
          order_(page_size, arena_) {}

    void grow_to(std::size_t size) {
        while (known_.size() < size) {
            insert(random_page(random_, page_size_, vocabulary_));
            if (random_.chance(10)) erase();
            if (random_.chance(10)) replace();
            look_up();
        }
        check_order();
    }
    void shrink_to(std::size_t size) {
        while (known_.size() > size) {
            erase();
            if (random_.chance(10)) insert(random_page(random_, page_size_, vocabulary_));
            look_up();
        }
        check_order();
    }
    // Ascending and descending inserts fill chunks from one end only.
    void insert_in_turn(bool ascending, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i) {
            Page page(static_cast<std::size_t>(page_size_), 0);
            page[0] = static_cast<kvcore::TokenId>(ascending ? i : n - i);
            insert(page);
            look_up();
        }
        check_order();
    }

   private:
    using Key = std::vector<std::uint32_t>;  // tokens sort as unsigned numbers

    static Key key_of(const Page& page) { return {page.begin(), page.end()}; }

    void insert(const Page& page) {
        TreeNode*& node = known_[key_of(page)];
        if (node != nullptr) return;
        node = nodes_.make(nullptr, page);
        order_.insert(node);
    }
    auto any() {
        auto found = known_.lower_bound(key_of(random_page(random_, page_size_, vocabulary_)));
        return found == known_.end() ? known_.begin() : found;
    }
    void erase() {
        if (known_.empty()) return;
        const auto victim = any();
        order_.erase(victim->second);
        known_.erase(victim);
    }
    void replace() {
        if (known_.empty()) return;
        const auto place = any();
        TreeNode* node = nodes_.make(nullptr, Page(place->first.begin(), place->first.end()));
        order_.replace(place->second, node);
        place->second = node;
    }

    // The longest start of `page` that a child has.
    std::int32_t longest(const Key& page, std::int32_t limit) const {
        for (std::int32_t n = limit; n > 0; --n) {
            const Key start(page.begin(), page.begin() + n);
            const auto at = known_.lower_bound(start);
            if (at != known_.end() && std::equal(start.begin(), start.end(), at->first.begin())) {
                return n;
            }
        }
        return 0;
    }
    void look_up() {
        if (known_.empty()) return;  // a small family has no order
        const Page page = random_page(random_, page_size_, vocabulary_);
        const auto limit = static_cast<std::int32_t>(random_.between(1, page_size_));
        std::int32_t common = -1;
        const TreeNode* best = order_.longest_common_start(page.data(), limit, &common);
        const std::int32_t expected = longest(key_of(page), limit);
        CHECK_EQ(common, expected);
        CHECK_EQ(best != nullptr, expected > 0);
        if (best == nullptr) return;
        CHECK(known_.at(key_of(Page(best->tokens, best->tokens + page_size_))) == best);
        CHECK_EQ(kvcore::common_tokens(best->tokens, page.data(), limit), expected);
    }
    void check_order() {
        auto expected = known_.begin();
        order_.for_each([&](const TreeNode* child) {
            CHECK(expected != known_.end() && expected->second == child);
            ++expected;
        });
        CHECK(expected == known_.end());
    }

    std::int32_t page_size_;
    std::int64_t vocabulary_;
    Random random_;
    PageNodes nodes_;
    kvcore::OrderArena arena_;
    SiblingOrder order_;
    std::map<Key, TreeNode*> known_;
};

void agrees_with_a_map(std::int32_t page_size, std::int64_t vocabulary, std::uint64_t seed) {
    check::note =
        "page size " + std::to_string(page_size) + ", vocabulary " + std::to_string(vocabulary);
    const std::int64_t most = std::min<std::int64_t>(3000, most_pages(page_size, vocabulary) / 2);
    CheckedOrder order(page_size, vocabulary, seed);
    for (int round = 0; round < 2; ++round) {
        order.grow_to(static_cast<std::size_t>(most));
        order.shrink_to(static_cast<std::size_t>(most / 5));
        order.grow_to(static_cast<std::size_t>(most / 2));
        order.shrink_to(0);
    }
}

TEST(agrees_with_a_map) {
    const std::uint64_t seed = check::seed_or(13);
    for (const std::int32_t page_size : {1, 2, 3, 16}) {
        for (const std::int64_t vocabulary : {2, 5, 80, 10000}) {
            agrees_with_a_map(page_size, vocabulary, seed);
        }
    }
}

TEST(tokens_may_come_in_turn) {
    const std::uint64_t seed = check::seed_or(13);
    for (const std::int32_t page_size : {1, 2, 3, 16}) {
        for (const bool ascending : {true, false}) {
            CheckedOrder order(page_size, 10000, seed);
            order.insert_in_turn(ascending, 1000);
            order.shrink_to(10);
        }
    }
}

}  // namespace

}  // namespace tests::tree::sibling_order
