// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <utility>
#include <vector>

#include "support/page_nodes.hpp"
#include "tree/tree_node.hpp"

namespace tests::tree::child_index {

using kvcore::ChildIndex;
using kvcore::TreeNode;

namespace {

/// A ChildIndex and the map that it must agree with.
class CheckedIndex {
   public:
    CheckedIndex(std::int32_t page_size, std::int64_t vocabulary, std::uint64_t seed)
        : page_size_(page_size), vocabulary_(vocabulary), random_(seed), index_(page_size) {
        for (int i = 0; i < 3; ++i) parents_.push_back(nodes_.make(nullptr, {}));
    }

    void grow_to(std::size_t size) {
        while (known_.size() < size) {
            insert();
            if (random_.chance(10)) erase();
            if (random_.chance(10)) replace();
            if (random_.chance(10)) index_.reserve(2);
            if (random_.chance(20)) look_up();
        }
        check_all();
    }
    void shrink_to(std::size_t size) {
        while (known_.size() > size) {
            erase();
            if (random_.chance(10)) insert();
            if (random_.chance(10)) replace();
            if (random_.chance(20)) look_up();
        }
        check_all();
    }

   private:
    using Key = std::pair<TreeNode*, Page>;

    Key random_key() {
        return {random_.pick(parents_), random_page(random_, page_size_, vocabulary_)};
    }
    void insert() {
        const Key key = random_key();
        if (known_.count(key) > 0) return;
        TreeNode* node = nodes_.make(key.first, key.second);
        index_.insert(node);
        CHECK(node->is_indexed);
        known_[key] = node;
        CHECK_EQ(index_.size(), known_.size());
    }
    // Simulate a split: another node represents the same page.
    void replace() {
        if (known_.empty()) return;
        auto found = known_.lower_bound(random_key());
        if (found == known_.end()) found = known_.begin();
        TreeNode* node = nodes_.make(found->first.first, found->first.second);
        index_.replace(found->second, node);
        CHECK(node->is_indexed && !found->second->is_indexed);
        found->second = node;
        CHECK_EQ(index_.size(), known_.size());
    }
    void erase() {
        if (known_.empty()) return;
        auto victim = known_.lower_bound(random_key());
        if (victim == known_.end()) victim = known_.begin();
        index_.erase(victim->second);
        CHECK(!victim->second->is_indexed);
        CHECK(index_.find(victim->first.first, victim->first.second.data()) == nullptr);
        known_.erase(victim);
        CHECK_EQ(index_.size(), known_.size());
    }
    void look_up() {
        const Key key = random_key();
        const auto found = known_.find(key);
        CHECK_EQ(index_.find(key.first, key.second.data()),
                 found == known_.end() ? nullptr : found->second);
    }
    void check_all() {
        for (const auto& [key, node] : known_) {
            CHECK_EQ(index_.find(key.first, key.second.data()), node);
        }
        for (int i = 0; i < 1000; ++i) look_up();
    }

    std::int32_t page_size_;
    std::int64_t vocabulary_;
    Random random_;
    PageNodes nodes_;
    std::vector<TreeNode*> parents_;
    ChildIndex index_;
    std::map<Key, TreeNode*> known_;
};

// The table starts with 1024 buckets and later has a bucket for every two nodes. The test covers
// several segments of the table, and doublings in both directions.
void agrees_with_a_map(std::int32_t page_size, std::int64_t vocabulary, std::uint64_t seed) {
    check::note = "page size " + std::to_string(page_size);
    CheckedIndex index(page_size, vocabulary, seed);
    for (const std::size_t size : {600U, 9000U}) {
        index.grow_to(size);
        index.shrink_to(size / 3);
        index.grow_to(size);
        index.shrink_to(0);
    }
    index.grow_to(3000);
}

// Nodes of different parents with the same page, and pages that differ in only one token.
TEST(parents_and_every_token_count) {
    for (const std::int32_t page_size : {1, 2, 3, 4, 5, 16, 17}) {
        PageNodes nodes;
        ChildIndex index(page_size);
        TreeNode* one = nodes.make(nullptr, {});
        TreeNode* other = nodes.make(nullptr, {});
        const Page page(static_cast<std::size_t>(page_size), 5);
        TreeNode* child = nodes.make(one, page);
        index.insert(child);
        CHECK_EQ(index.find(one, page.data()), child);
        CHECK(index.find(other, page.data()) == nullptr);
        for (std::size_t i = 0; i < page.size(); ++i) {
            Page changed = page;
            changed[i] = -5;
            CHECK(index.find(one, changed.data()) == nullptr);
        }
    }
}

TEST(agrees_with_a_map) {
    const std::uint64_t seed = check::seed_or(12);
    agrees_with_a_map(1, 30000, seed);
    agrees_with_a_map(2, 200, seed);
    agrees_with_a_map(3, 40, seed);
    agrees_with_a_map(16, 3, seed);
}

}  // namespace

}  // namespace tests::tree::child_index
