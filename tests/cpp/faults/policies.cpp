// SPDX-License-Identifier: Apache-2.0
// Trees and managers with each policy when memory runs out in the tree or in the policy: a call
// that fails changes nothing, not even the order of eviction.
#include <array>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/eviction.hpp"
#include "support/eviction_orders.hpp"
#include "support/failing_memory.hpp"
#include "support/random.hpp"
#include "support/tree_text.hpp"
#include "tree/pins.hpp"

namespace tests::faults::policies {

using failing_memory::allocates_nothing;
using failing_memory::any_site;
using failing_memory::each_site;
using kvcore::BlockId;
using kvcore::EvictionOrder;
using kvcore::NodeId;
using kvcore::PrefixTree;
using kvcore::TokenId;
using kvcore::TreeNode;
using kvcore::TreePin;
using Tokens = std::vector<TokenId>;
using Ids = std::vector<BlockId>;

namespace {

/// A tree with runs of one page or four pages, in pages of one token. Only the tree asks for
/// memory.
struct Scene {
    explicit Scene(std::unique_ptr<kvcore::EvictionPolicy> policy) : tree(1, std::move(policy)) {}

    void put(const Tokens& tokens, const kvcore::Retention& retention = {}) {
        const auto n = static_cast<std::int32_t>(tokens.size());
        TreeNode* root = tree.find_namespace("");
        last = TreePin(tree, tree.insert(root, tokens.data(), tokens.data(), n, found, retention));
        last.end_use();
    }
    void touch(const Tokens& tokens) {
        tree.touch(tree.match(tree.find_namespace(""), tokens.data(),
                              static_cast<std::int64_t>(tokens.size()))
                       .at);
    }
    /// Returns the text of the tree, then evicts all pages one by one in the order of the policy.
    std::string text() {
        std::string text = TreeText(tree).of({""});
        tree.check_integrity();
        Ids gone(static_cast<std::size_t>(tree.num_cached()));
        for (BlockId& id : gone) CHECK_EQ(tree.evict(1, &id), 1);
        return text + check::text(gone);
    }

    PrefixTree tree;
    std::vector<kvcore::DuplicatePage> found;
    TreePin last;
};

std::unique_ptr<Scene> family(EvictionOrder order, std::int32_t n) {
    auto scene = std::make_unique<Scene>(kvcore::make_policy({order}, 1));
    for (std::int32_t i = 0; i < n; ++i) scene->put({i + 10}, {i % 5, 100 + i % 7});
    scene->put({1, 2, 3, 4});
    std::array<BlockId, 4> gone{};
    if (n > 12) CHECK_EQ(scene->tree.evict(4, gone.data()), 4);  // leaves ghosts and free ids
    return scene;
}

void trees_grow_or_do_not(EvictionOrder order, std::int32_t n) {
    const auto make = [&] { return family(order, n); };
    const auto text = [](auto& scene) { return scene->text(); };
    any_site("insert a sibling", make, [&](auto& scene) { scene->put({5}); }, text);
    any_site("insert a branch", make, [&](auto& scene) { scene->put({1, 2, 9}, {90, 50}); }, text);
    any_site("insert a cached page", make, [](auto& scene) { scene->put({1}, {80}); }, text);
    any_site("touch", make, [](auto& scene) { scene->touch({1, 2}); }, text);
}

void policies_need_no_memory_but_for_room(EvictionOrder order) {
    const auto make = [&] { return family(order, 300); };
    const Tokens one = {11};
    allocates_nothing("use", make, [&](auto& scene) {
        scene->touch(one);
        scene->tree.advance(103);
        std::array<BlockId, 290> gone{};
        CHECK_EQ(scene->tree.evict(290, gone.data()), 290);
    });
    allocates_nothing("take it down", make, [](auto& scene) { scene.reset(); });
}

// ---- a policy without room
/// A FIFO policy whose make_room throws while `is_full` is true.
class Cramped final : public kvcore::EvictionPolicy {
   public:
    explicit Cramped(const bool& is_full) : is_full_(is_full) {}
    void make_room(NodeId last) override {
        if (is_full_) throw std::bad_alloc();
        CHECK_EQ(last, next_++);
        inner_->make_room(last);
    }
    void insert(NodeId node, std::int32_t depth, std::int32_t pages,
                std::int32_t priority) noexcept override {
        inner_->insert(node, depth, pages, priority);
    }
    void hit(NodeId node) noexcept override { inner_->hit(node); }
    void release(NodeId node, std::uint64_t time) noexcept override { inner_->release(node, time); }
    void split(NodeId upper, NodeId lower) noexcept override { inner_->split(upper, lower); }
    void erase(NodeId node) noexcept override { inner_->erase(node); }
    void offer(NodeId node) noexcept override { inner_->offer(node); }
    void withdraw(NodeId node) noexcept override { inner_->withdraw(node); }
    [[nodiscard]] NodeId victim() noexcept override { return inner_->victim(); }

   private:
    const bool& is_full_;
    NodeId next_ = 0;
    std::unique_ptr<kvcore::EvictionPolicy> inner_ = kvcore::make_policy({EvictionOrder::kFifo}, 1);
};

template <class Call>
bool has_no_room(const Call& call) {
    try {
        call();
    } catch (const std::bad_alloc&) {
        return true;
    }
    return false;
}

TEST(calls_fail_without_room_in_the_policy) {
    bool is_full = false;
    const auto make = [&] {
        is_full = false;
        auto scene = std::make_unique<Scene>(std::make_unique<Cramped>(is_full));
        scene->put({1, 2, 3, 4});
        scene->put({5, 6});
        return scene;
    };
    const std::string before = make()->text();
    for (const Tokens& tokens : {Tokens{7}, Tokens{1, 2}, Tokens{1, 2, 9}, Tokens{5, 6, 7}}) {
        auto scene = make();
        is_full = true;
        CHECK(has_no_room([&] { scene->put(tokens); }));
        is_full = false;
        CHECK_EQ(scene->text(), before);
    }
    auto scene = make();
    is_full = true;
    CHECK(has_no_room([&] { scene->touch({1, 2}); }));
    scene->touch({1, 2, 3, 4});  // needs no room
    is_full = false;
    scene->put({7});
    CHECK_EQ(scene->tree.num_cached(), 7);
}

TEST(a_manager_keeps_pages_without_room_in_the_policy) {
    bool is_full = false;
    kvcore::CacheConfig config;
    config.page_size = 1;
    config.num_pages = 16;
    config.max_sequences = 4;
    config.max_seq_len = 16;
    kvcore::CacheManager manager(config, [&] { return std::make_unique<Cramped>(is_full); });
    const Tokens tokens = {1, 2, 3, 4};
    kvcore::RequestView view;
    view.sequence = manager.claim();
    view.tokens = tokens.data();
    view.active = view.end = 4;
    CHECK(manager.reserve(view) == kvcore::ReserveStatus::kOk);
    view.start = 3;
    std::vector<kvcore::PageSwap> swaps;
    is_full = true;
    manager.commit({&view, 1}, swaps);  // a later commit stores the pages
    manager.check_integrity();
    CHECK_EQ(manager.match(0, "", tokens.data(), 4), 0);
    is_full = false;
    manager.commit({&view, 1}, swaps);
    CHECK_EQ(manager.match(0, "", tokens.data(), 4), 3);
    kvcore::RequestView other = view;
    other.start = 0;
    other.active = other.end = 3;
    other.sequence = manager.claim();
    is_full = true;  // the hit ends inside a run, so the run must be split
    CHECK(has_no_room([&] { static_cast<void>(manager.reserve(other)); }));
    CHECK(has_no_room([&] { manager.touch(0, "", tokens.data(), 2); }));
    is_full = false;
    manager.check_integrity();
    CHECK_EQ(manager.stats(0).cached_pages, 3);
    CHECK(manager.reserve(other) == kvcore::ReserveStatus::kOk);
    CHECK_EQ(other.start, 2);
}

TEST(terms_are_taken_or_not) {
    struct Claimed {
        std::unique_ptr<kvcore::CacheManager> manager;
        kvcore::SequenceHandle sequence;
    };
    const auto make = [] {
        kvcore::CacheConfig config;
        config.num_pages = config.max_sequences = config.max_seq_len = 16;
        config.eviction.order = EvictionOrder::kPriority;
        Claimed claimed{std::make_unique<kvcore::CacheManager>(config), {}};
        claimed.sequence = claimed.manager->claim();
        return claimed;
    };
    const kvcore::RequestPriority terms{80, 10, {{0, 5, 20, 7}}};
    const auto set = [&](Claimed& scene) { scene.manager->set_priority(scene.sequence, terms); };
    const auto text = [](Claimed& scene) {
        scene.manager->check_integrity();
        return std::to_string(scene.manager->stats(0).num_sequences);
    };
    each_site("set_priority", make, set, text);
    Claimed scene = make();
    const auto refuses = [&](const kvcore::RequestPriority& wrong) {
        CHECK_THROWS(std::invalid_argument, scene.manager->set_priority(scene.sequence, wrong));
    };
    refuses({101, 1, {}});
    refuses({-1, 1, {}});
    refuses({50, 0, {}});
    refuses({50, 1, {{0, 0}}});
    refuses({50, 1, {{0, 5}, {4, 6}}});
    refuses({50, 1, {{0, 5, 101}}});
    scene.manager->release(scene.sequence);
    CHECK_THROWS(kvcore::RequestNotFoundError, scene.manager->set_priority(scene.sequence, terms));
}

TEST(trees_of_every_policy_grow_or_do_not) {
    for (const EvictionOrder order : eviction_orders::kAll) {
        for (const std::int32_t n : {0, 1, 60, 61, 62, 63, 64, 124, 125, 126, 127}) {
            trees_grow_or_do_not(order, n);
        }
        policies_need_no_memory_but_for_room(order);
    }
}

}  // namespace

}  // namespace tests::faults::policies
