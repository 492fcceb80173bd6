// SPDX-License-Identifier: Apache-2.0
// The prefix tree when memory runs out: a call that fails changes nothing, and a call that gives
// pages up needs no memory.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/errors.hpp"
#include "kvcore/prefix_tree.hpp"
#include "support/failing_memory.hpp"
#include "support/random.hpp"
#include "support/tree_text.hpp"
#include "tree/pins.hpp"

namespace tests::faults::prefix_tree {

using failing_memory::allocates_nothing;
using failing_memory::any_site;
using failing_memory::each_site;
using kvcore::BlockId;
using kvcore::PrefixTree;
using kvcore::TokenId;
using kvcore::TreeNode;
using kvcore::TreePin;

namespace {

using Tokens = std::vector<TokenId>;
using Ids = std::vector<BlockId>;

constexpr std::int32_t kPageSize = 2;

// The second name is too long for a string without an allocation.
const std::vector<std::string> kAllNames{"", "the namespace of one of many tenants", "b"};

/// A tree, its pins, and room for the results of a call. Only the tree asks for memory.
struct Scene {
    Scene() : tree(kPageSize) { held.reserve(64); }

    void insert(TreeNode* at, const Tokens& tokens) {
        const auto n = static_cast<std::int32_t>(tokens.size()) / kPageSize;
        TreeNode* end = tree.insert(at, tokens.data(), ids(n), n, duplicates);
        next_id += n;
        last = TreePin(tree, end);
    }
    BlockId* ids(std::int32_t n) {
        for (std::int32_t i = 0; i < n; ++i) fresh[static_cast<std::size_t>(i)] = next_id + i;
        return fresh.data();
    }
    /// Caches a prompt in the default namespace.
    void put(const Tokens& tokens) {
        insert(tree.open_namespace(""), tokens);
        tree.unpin(last.release(), true);
    }
    /// Returns the text of the tree, then evicts all pages that can be evicted.
    std::string text() {
        std::string text = TreeText(tree).of(kAllNames);
        for (const auto& [index, cached] : duplicates) {
            text += std::to_string(index) + " is " + std::to_string(cached) + "\n";
        }
        tree.check_integrity();
        text += std::to_string(tree.num_evictable()) + " can go:";
        Ids gone(static_cast<std::size_t>(tree.num_cached()));
        gone.resize(static_cast<std::size_t>(
            tree.evict(static_cast<std::int64_t>(gone.size()), gone.data())));
        text += check::text(gone);
        tree.check_integrity();
        return text;
    }

    PrefixTree tree;
    std::vector<kvcore::DuplicatePage> duplicates;
    std::vector<TreeNode*> held;
    TreePin last;
    Ids fresh = Ids(64);
    BlockId next_id = 0;
};

// ---- large trees: each table grows at some number of siblings
// Siblings are in ascending order, so chunks of the order are left half full.
Tokens sibling(std::int32_t i) { return {i, i}; }

/// `n` runs of one page, and one run of four pages that starts with {-1, 0}.
std::unique_ptr<Scene> family(std::int32_t n) {
    auto scene = std::make_unique<Scene>();
    for (std::int32_t i = 0; i < n; ++i) scene->put(sibling(i));
    scene->put({-1, 0, -1, 1, -1, 2, -1, 3});
    return scene;
}

void a_family_of_any_size_grows(std::int32_t n) {
    const auto make = [n] { return family(n); };
    const auto text = [](auto& scene) { return scene->text(); };
    const Tokens one_more = sibling(n);
    each_site("insert a sibling", make, [&](auto& scene) { scene->put(one_more); }, text);
    const Tokens branch{-1, 0, -1, 1, 5, 5};
    each_site("insert a branch", make, [&](auto& scene) { scene->put(branch); }, text);
    const Tokens start{-1, 0};
    each_site("insert a cached page", make, [&](auto& scene) { scene->put(start); }, text);
    const Tokens three{-1, 0, -1, 1, -1, 2};
    const auto split = [&](auto& scene) {
        TreeNode* root = scene->tree.find_namespace("");
        const kvcore::PrefixMatch match = scene->tree.match(root, three.data(), 6);
        scene->last = TreePin(scene->tree, scene->tree.split(match.at));
    };
    each_site("split", make, split, text);
}

TEST(families_of_any_size_grow) {
    const auto try_sizes = [](std::int32_t first, std::int32_t last) {
        for (std::int32_t n = first; n <= last; ++n) a_family_of_any_size_grows(n);
    };
    try_sizes(0, 50);       // the list is sorted, chunks of the order split, its directory grows
    try_sizes(59, 65);      // the policy's array grows
    try_sizes(302, 308);    // the nodes need a second block
    try_sizes(735, 753);    // the chunks need a second block
    try_sizes(1019, 1027);  // the index needs a second segment
}

// ---- small steps on trees of every shape
struct Step {
    std::int64_t dice = 0;
    std::size_t holder = 0;
    std::size_t name = 0;
    Tokens tokens;
    std::int32_t n = 1;
};

std::vector<Step> random_steps(std::uint64_t seed, int n) {
    Random random(seed);
    std::vector<Step> steps;
    for (int i = 0; i < n; ++i) {
        Step step;
        step.dice = random.below(100);
        step.holder = static_cast<std::size_t>(random.below(1 << 20));
        step.name = static_cast<std::size_t>(random.chance(70) ? 0 : random.below(3));
        step.n = static_cast<std::int32_t>(random.between(1, 5));
        for (int t = 0; t < 12; ++t) {
            step.tokens.push_back(static_cast<TokenId>(random.below(random.chance(30) ? 9 : 2)));
        }
        steps.push_back(std::move(step));
    }
    return steps;
}

/// A scene is built from the steps before it. Each step asks for memory in only one call of the
/// tree.
class Traffic {
   public:
    explicit Traffic(std::uint64_t seed) : steps_(random_steps(seed, 260)) {}

    void run() {
        for (std::size_t n = 0; n < steps_.size(); ++n) {
            const auto make = [&] {
                auto scene = std::make_unique<Scene>();
                for (std::size_t i = 0; i < n; ++i) act(*scene, steps_[i]);
                scene->duplicates.clear();
                return scene;
            };
            any_site(
                "a random step", make, [&](auto& scene) { act(*scene, steps_[n]); },
                [](auto& scene) { return scene->text(); });
        }
    }

   private:
    static void act(Scene& scene, const Step& step) {
        if (scene.held.empty() || (step.dice < 30 && scene.held.size() < 6)) {
            return begin(scene, step);
        }
        TreeNode*& node = scene.held[step.holder % scene.held.size()];
        if (step.dice < 65) return grow(scene, node, step);
        if (step.dice < 80) {
            BlockId gone[5];
            scene.tree.evict(step.n, gone);
            return;
        }
        scene.tree.unpin(node, true);
        scene.tree.shrink(node);
        std::swap(node, scene.held.back());
        scene.held.pop_back();
    }
    static void begin(Scene& scene, const Step& step) {
        PrefixTree& tree = scene.tree;
        const TreePin root(tree, tree.open_namespace(kAllNames[step.name]));
        const auto n = static_cast<std::int64_t>(step.tokens.size());
        TreeNode* end = tree.split(tree.match(root.node(), step.tokens.data(), n).at);
        tree.pin(end);
        scene.held.push_back(end);
    }
    static void grow(Scene& scene, TreeNode*& node, const Step& step) {
        TreeNode* end = scene.tree.insert(node, step.tokens.data(), scene.ids(step.n), step.n,
                                          scene.duplicates);
        scene.next_id += step.n;
        scene.tree.pin(end);
        scene.tree.unpin(node, false);
        node = end;
    }

    std::vector<Step> steps_;
};

// ---- calls without memory
TEST(pins_need_no_memory) {
    const auto all = [](std::unique_ptr<Scene>& scene, auto&& act) {
        TreeNode* root = scene->tree.find_namespace("");
        for (std::int32_t i = 0; i < 2000; ++i) {
            const TokenId page[] = {i, i};
            act(scene->tree.match(root, page, kPageSize).at.node);
        }
    };
    const auto pin_all = [&](std::unique_ptr<Scene>& scene) {
        all(scene, [&](TreeNode* node) { scene->tree.pin(node); });
    };
    const auto unpin_all = [&](std::unique_ptr<Scene>& scene) {
        all(scene, [&](TreeNode* node) { scene->tree.unpin(node, true); });
    };
    const auto make = [] { return family(2000); };
    const auto make_pinned = [&] {
        auto scene = family(2000);
        pin_all(scene);
        return scene;
    };
    allocates_nothing("pin", make, pin_all);
    allocates_nothing("unpin", make_pinned, unpin_all);
    allocates_nothing("count", make_pinned,
                      [](auto& scene) { CHECK_EQ(scene->tree.num_evictable(), 4); });
}

TEST(reading_needs_no_memory) {
    const auto make = [] {
        auto scene = family(40);
        scene->tree.pin(scene->tree.open_namespace(kAllNames[1]));
        return scene;
    };
    const Tokens tokens{-1, 0, -1, 1, -1, 9};
    allocates_nothing("match", make, [&](auto& scene) {
        CHECK(scene->tree.find_namespace(kAllNames[1]) != nullptr);
        TreeNode* root = scene->tree.find_namespace("");
        const kvcore::PrefixMatch match = scene->tree.match(root, tokens.data(), 6, true);
        CHECK_EQ(match.at.depth, 2);
        CHECK_EQ(match.partial_tokens, 1);
        CHECK(!scene->tree.is_protected(match.at));
        CHECK_EQ(scene->tree.num_unprotected(match.at), 2);
        BlockId ids[2];
        scene->tree.copy_pages(match.at, 0, ids);
        CHECK_EQ(ids[1], 41);
        CHECK_EQ(scene->tree.resolve(scene->tree.handle(match.at)).depth, 2);
    });
}

// Eviction of a whole run does not call the allocator. The rest of a run moves to a smaller block
// if there is memory for it, and otherwise stays in place.
TEST(eviction_needs_no_memory) {
    Ids gone(2000);
    const auto make = [] { return family(1500); };
    allocates_nothing("evict", make,
                      [&](auto& scene) { CHECK_EQ(scene->tree.evict(2000, gone.data()), 1504); });
    const auto make_one = [] { return family(0); };
    const auto text = [](auto& scene) { return scene->text(); };
    each_site(
        "evict a tail", make_one,
        [&](auto& scene) { CHECK_EQ(scene->tree.evict(3, gone.data()), 3); }, text);
    const auto make_grown = [] {
        auto scene = family(0);
        scene->insert(scene->tree.find_namespace(""), {7, 7});
        TreeNode* above = scene->last.release();
        scene->insert(above, {8, 8});
        scene->tree.unpin(above, false);
        return scene;
    };
    const auto shrink = [](auto& scene) {
        TreeNode* end = scene->last.release();
        scene->tree.unpin(end, true);
        scene->tree.shrink(end);
    };
    each_site("shrink", make_grown, shrink, text);
    allocates_nothing("take the tree down", make, [](auto& scene) { scene.reset(); });
}

// ---- single calls
TEST(namespaces_are_opened_or_absent) {
    const auto make = [] { return std::make_unique<Scene>(); };
    const auto open = [](auto& scene) {
        scene->last = TreePin(scene->tree, scene->tree.open_namespace(kAllNames[1]));
    };
    CHECK(each_site("open a namespace", make, open, [](auto& s) { return s->text(); }) >= 3);
}

// The text of the error may itself need the missing memory.
TEST(a_refusal_changes_nothing) {
    const auto make = [] { return family(3); };
    const auto unpin = [](auto& scene) {
        try {
            scene->tree.unpin(
                scene->tree.match(scene->tree.find_namespace(""), sibling(1).data(), kPageSize)
                    .at.node,
                true);
            CHECK(false);
        } catch (const kvcore::InvalidHandleError& error) {
            CHECK(*error.what() != '\0');
        }
    };
    each_site("unpin an unpinned run", make, unpin, [](auto& s) { return s->text(); });
}

TEST(trees_are_built_or_not) {
    const auto make = [] { return std::unique_ptr<PrefixTree>(); };
    each_site(
        "build a tree", make, [](auto& tree) { tree = std::make_unique<PrefixTree>(kPageSize); },
        [](auto& tree) { return tree == nullptr ? "none" : "there"; });
}

TEST(random_calls_leave_no_trace) {
    const std::uint64_t seed = check::seed_or(16);
    for (std::uint64_t i = 0; i < 3; ++i) Traffic(seed + i).run();
}

}  // namespace

}  // namespace tests::faults::prefix_tree
