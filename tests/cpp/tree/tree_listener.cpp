// SPDX-License-Identifier: Apache-2.0
// The events of a tree: a mirror built only from these events has the pages of the tree.
#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvcore/prefix_tree.hpp"
#include "support/random.hpp"
#include "support/tree_fixture.hpp"

namespace tests::tree::tree_listener {

using kvcore::BlockId;
using kvcore::PrefixTree;
using kvcore::TokenId;
using kvcore::TreeNode;
using Ids = TreeFixture::Ids;
using Tokens = TreeFixture::Tokens;

namespace {

/// Pages by namespace and all tokens up to their end. The mirror reads each page from the tree
/// during its event.
class Mirror final : public kvcore::TreeListener {
   public:
    explicit Mirror(PrefixTree& tree) : tree_(tree) { tree_.set_listener(this); }
    Mirror(const Mirror&) = delete;
    Mirror& operator=(const Mirror&) = delete;
    ~Mirror() override { tree_.set_listener(nullptr); }

    void stored(TreeNode* node, std::int32_t first, std::int32_t n) noexcept override {
        ++num_told_;
        const Prefixes prefixes = read(node, first, n);
        CHECK(first == 0 || pages_.count(prefixes.front()) == 1);
        for (std::int32_t i = 0; i < n; ++i) {
            const std::string& prefix = prefixes[static_cast<std::size_t>(i) + 1];
            CHECK(pages_.emplace(prefix, ids_[static_cast<std::size_t>(i)]).second);
            ++followers_[prefixes[static_cast<std::size_t>(i)]];
        }
        check_tree(node, first + n);
    }
    void removed(TreeNode* node, std::int32_t first, std::int32_t n) noexcept override {
        ++num_told_;
        const Prefixes prefixes = read(node, first, n);
        for (auto i = static_cast<std::size_t>(n); i-- > 0;) {
            const std::string& prefix = prefixes[i + 1];
            CHECK_EQ(pages_.at(prefix), ids_[i]);
            CHECK_EQ(followers_[prefix], 0);
            pages_.erase(prefix);
            followers_.erase(prefix);
            --followers_[prefixes[i]];
        }
        check_tree(node, first);
        if (num_told_ % 50 == 0) tree_.check_integrity();
    }

    [[nodiscard]] Ids ids() const {
        Ids ids;
        for (const auto& [prefix, id] : pages_) ids.push_back(id);
        std::sort(ids.begin(), ids.end());
        return ids;
    }
    [[nodiscard]] std::int64_t num_told() const { return num_told_; }

   private:
    using Prefixes = std::vector<std::string>;

    // The prefixes that end with the page before the event's pages, and with each of these pages.
    Prefixes read(TreeNode* node, std::int32_t first, std::int32_t n) {
        CHECK(n >= 1);
        ids_.resize(static_cast<std::size_t>(n));
        tree_.copy_pages({node, first + n}, first, ids_.data());
        const Tokens tokens = tree_.tokens_of({node, first + n}, 0);
        std::string prefix = std::string(PrefixTree::name_of(node)) + '/';
        Prefixes prefixes;
        const auto page = static_cast<std::size_t>(tree_.page_size()) * sizeof(TokenId);
        const char* bytes = reinterpret_cast<const char*>(tokens.data());
        for (std::int32_t i = 0; i < first + n; ++i) {
            if (i >= first) prefixes.push_back(prefix);
            prefix.append(bytes + static_cast<std::size_t>(i) * page, page);
        }
        prefixes.push_back(prefix);
        return prefixes;
    }

    // The change is complete: the tree has the first `depth` pages of the path to `node`.
    void check_tree(TreeNode* node, std::int32_t depth) {
        CHECK_EQ(tree_.num_cached(), pages_.size());
        const Tokens tokens = tree_.tokens_of({node, depth}, 0);
        TreeNode* root = tree_.find_namespace(PrefixTree::name_of(node));
        CHECK(root != nullptr);
        CHECK_EQ(
            tree_.match(root, tokens.data(), static_cast<std::int64_t>(tokens.size())).at.depth,
            depth);
    }

    PrefixTree& tree_;
    std::unordered_map<std::string, BlockId> pages_;
    std::unordered_map<std::string, std::int64_t> followers_;  // pages after a prefix
    Ids ids_;
    std::int64_t num_told_ = 0;
};

// ---- single calls
/// Records the events.
class Notes final : public kvcore::TreeListener {
   public:
    void stored(TreeNode*, std::int32_t first, std::int32_t n) noexcept override {
        add('+', first, n);
    }
    void removed(TreeNode*, std::int32_t first, std::int32_t n) noexcept override {
        add('-', first, n);
    }
    std::string read() { return std::exchange(text_, {}); }

   private:
    void add(char sign, std::int32_t first, std::int32_t n) {
        text_ += sign + std::to_string(first) + ".." + std::to_string(first + n - 1) + " ";
    }
    std::string text_;
};

TEST(only_what_changes_is_told) {
    TreeFixture t(1);
    Notes notes;
    t.put({9});
    t.tree.set_listener(&notes);
    TreeNode* end = t.hold({1, 2, 3});
    CHECK_EQ(notes.read(), "+0..2 ");
    end = t.extend(end, {4});     // a leaf with room to grow
    end = t.extend(end, {5, 6});  // grows in place
    CHECK_EQ(notes.read(), "+3..3 +4..5 ");
    t.tree.unpin(end, true);
    t.put({1, 2, 3, 4});                // already cached
    t.tree.unpin(t.pin({1, 2}), true);  // splits a run
    CHECK_EQ(notes.read(), "");
    t.put({1, 2, 7});
    CHECK_EQ(notes.read(), "+2..2 ");
    CHECK_EQ(t.evict_at_once(4).size(), 4);
    CHECK_EQ(notes.read(), "-0..0 -4..5 -3..3 ");
    t.tree.set_listener(nullptr);
    CHECK_EQ(t.evict_at_once(9).size(), 4);
    CHECK_EQ(notes.read(), "");
}

// ---- random traffic
class Traffic {
   public:
    Traffic(std::int32_t page_size, std::uint64_t seed)
        : random_(seed), tree_(page_size), mirror_(tree_.tree) {}

    void run(int steps) {
        for (int step = 0; step < steps; ++step) {
            const std::int64_t dice = random_.below(1000);
            if (held_.empty() || (dice < 300 && held_.size() < 8)) {
                begin();
            } else if (dice < 600) {
                TreeNode*& end = random_.pick(held_);
                end = tree_.extend(end, tokens(random_.between(1, 4)));
            } else if (dice < 800) {
                let_go();
            } else if (dice < 990) {
                evict(random_.between(1, 12));
            } else if (dice < 998) {
                evict(tree_.tree.num_cached());  // a reset: evict every page without a holder
            } else {
                while (!held_.empty()) let_go();  // each namespace is removed with its last page
                evict(tree_.tree.num_cached());
                CHECK(tree_.tree.find_namespace("x") == nullptr);
            }
            if (tree_.tree.num_cached() > 400) evict(100);
            if (step % 200 == 0) check();
        }
        check();
        CHECK(mirror_.num_told() > steps / 4);
    }

   private:
    Tokens tokens(std::int64_t pages) {
        Tokens tokens;
        for (std::int64_t i = 0; i < pages * tree_.tree.page_size(); ++i) {
            tokens.push_back(static_cast<TokenId>(random_.below(random_.chance(50) ? 2 : 40)));
        }
        return tokens;
    }
    // Hold the cached part of a prompt. If it ends inside a run, the run is split.
    void begin() {
        const Tokens prompt = tokens(random_.between(0, 6));
        TreeNode* root = tree_.tree.open_namespace(random_.chance(30) ? "x" : "");
        TreeNode* end = tree_.tree.split(
            tree_.tree.match(root, prompt.data(), static_cast<std::int64_t>(prompt.size())).at);
        if (end == root)
            end = tree_.extend(root, tokens(1));
        else
            tree_.tree.pin(end);
        held_.push_back(end);
    }
    void let_go() {
        std::swap(random_.pick(held_), held_.back());
        tree_.tree.unpin(held_.back(), random_.chance(50));
        if (random_.chance(50)) tree_.tree.shrink(held_.back());
        held_.pop_back();
    }
    void evict(std::int64_t n) {
        Ids gone(static_cast<std::size_t>(n));
        tree_.tree.evict(n, gone.data());
    }
    void check() {
        tree_.tree.check_integrity();
        Ids ids;
        tree_.tree.for_each_run(
            [&](const BlockId* run, std::int32_t n) { ids.insert(ids.end(), run, run + n); });
        std::sort(ids.begin(), ids.end());
        CHECK_EQ(mirror_.ids(), ids);
    }

    Random random_;
    TreeFixture tree_;
    Mirror mirror_;
    std::vector<TreeNode*> held_;
};

TEST(random_calls_are_told) {
    const std::uint64_t seed = check::seed_or(22);
    for (const std::int32_t page_size : {1, 3}) Traffic(page_size, seed).run(100'000);
}

}  // namespace

}  // namespace tests::tree::tree_listener
