// SPDX-License-Identifier: Apache-2.0
// Pools, levels and the table of sequences when memory runs out: a call that fails changes
// nothing, and a call that releases something needs no memory.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/errors.hpp"
#include "level/level.hpp"
#include "request/sequence.hpp"
#include "support/claims.hpp"
#include "support/failing_memory.hpp"
#include "support/plain_level.hpp"

namespace tests::faults::level {

using failing_memory::allocates_nothing;
using failing_memory::each_site;
using kvcore::BlockId;
using kvcore::BlockPool;
using kvcore::InvalidHandleError;
using kvcore::Level;
using kvcore::SequenceHandle;
using kvcore::SequenceTable;
using kvcore::TokenId;
using kvcore::TreeNode;

namespace {

using Tokens = std::vector<TokenId>;
using Ids = std::vector<BlockId>;

const char* const kName = "the namespace of one of many tenants";

// ---- BlockPool
std::unique_ptr<BlockPool> pool_with_pages() {
    auto pool = std::make_unique<BlockPool>(8);
    Ids ids(6);
    CHECK(pool->allocate(6, ids.data()));
    pool->share(ids.data(), 2);
    pool->free(ids.data() + 4, 2);
    return pool;
}

std::string text_of(std::unique_ptr<BlockPool>& pool) {
    if (pool == nullptr) return "none";
    pool->check_integrity();
    Ids refs;
    for (BlockId id = 0; id < 8; ++id) refs.push_back(static_cast<BlockId>(pool->ref_count(id)));
    Ids rest(static_cast<std::size_t>(pool->num_free()));
    CHECK(pool->allocate(pool->num_free(), rest.data()));
    return check::text(refs) + ", free " + check::text(rest);
}

template <class Call>
void is_refused(const char* name, Call&& call) {
    const auto refused = [&](std::unique_ptr<BlockPool>& pool) {
        bool is_refused = false;
        try {
            call(*pool);
        } catch (const InvalidHandleError&) {
            is_refused = true;
        }
        CHECK(is_refused);
    };
    each_site(name, pool_with_pages, refused, text_of);
}

TEST(pools) {
    const auto none = [] { return std::unique_ptr<BlockPool>(); };
    each_site(
        "build a pool", none, [](auto& pool) { pool = std::make_unique<BlockPool>(8); }, text_of);
    const Ids ids{0, 1, 2};
    const Ids twice{0, 2, 2};
    is_refused("free twice", [&](BlockPool& pool) { pool.free(twice.data(), 3); });
    const Ids unknown{0, 7};
    is_refused("free a free page", [&](BlockPool& pool) { pool.free(unknown.data(), 2); });
    is_refused("share a free page", [&](BlockPool& pool) { pool.share(unknown.data(), 2); });
    allocates_nothing("a pool's verbs", pool_with_pages, [&](auto& pool) {
        pool->share(ids.data(), 3);
        pool->free(ids.data(), 3);
        pool->free(ids.data(), 3);
        BlockId more[3];
        CHECK(pool->allocate(3, more));
        CHECK(!pool->allocate(9, more));
    });
}

// ---- SequenceTable
struct Claims {
    explicit Claims(int n) {
        handles.reserve(200);
        for (int i = 0; i < n; ++i) claim();
    }
    void claim() { handles.push_back(table.claim(static_cast<std::int32_t>(handles.size()))); }
    void release(std::size_t i) {
        table.release(handles[i]);
        handles.erase(handles.begin() + static_cast<std::ptrdiff_t>(i));
    }
    std::string text() {
        std::string text = std::to_string(num_claimed(table)) + " claimed:";
        CHECK_EQ(num_claimed(table), handles.size());
        for (const SequenceHandle handle : handles) {
            text += " " + std::to_string(handle.index) + "/" + std::to_string(handle.generation) +
                    "=" + std::to_string(table.at(handle).replica);
        }
        while (!handles.empty()) release(0);
        CHECK_EQ(num_claimed(table), 0);
        return text;
    }

    SequenceTable table;
    std::vector<SequenceHandle> handles;
};

TEST(claims_are_made_or_not) {
    for (const int n : {0, 1, 2, 4, 8, 16, 32}) {  // sizes at which the slots grow
        const auto make = [n] { return std::make_unique<Claims>(n); };
        each_site(
            "claim", make, [](auto& claims) { claims->claim(); },
            [](auto& claims) { return claims->text(); });
    }
    allocates_nothing(
        "release", [] { return std::make_unique<Claims>(100); },
        [](auto& claims) {
            while (!claims->handles.empty()) claims->release(0);
            for (int i = 0; i < 100; ++i) claims->claim();
        });
}

// ---- Level
/// A store with {1 1 2 2 3 3} and {1 1 5 5} in pages of two tokens. Only `place` is held, and two
/// pages are taken.
struct Tier {
    Tier() : store(12, 2) {
        put("", {1, 1, 2, 2, 3, 3});
        put("", {1, 1, 5, 5});
        CHECK_EQ(store.take(2, taken), 2);
        CHECK_EQ(store.take(1, extra), 1);
        place = store.open("");
    }
    void put(const char* name, const Tokens& tokens) {
        BlockId ids[8];
        const auto n = static_cast<std::int32_t>(tokens.size()) / 2;
        CHECK_EQ(store.take(n, ids), n);
        store.release(store.publish(store.open(name), tokens.data(), ids, n));
    }
    void publish(const Tokens& tokens) {
        place = store.publish(place, tokens.data(), taken, 2);
        on_their_way -= 2;
    }
    void advance(const Tokens& tokens) {
        place = store.advance(place, tokens.data(), static_cast<std::int64_t>(tokens.size()));
    }
    std::string prefix(const char* name, const Tokens& tokens) {
        const kvcore::TreePosition at =
            store.find(name, tokens.data(), static_cast<std::int64_t>(tokens.size()));
        Ids ids(static_cast<std::size_t>(at.depth));
        if (at.depth > 0) store.tree.copy_pages(at, 0, ids.data());
        return check::text(ids);
    }
    /// Returns the text of the store, then takes all its pages.
    std::string text() {
        store.check_integrity(on_their_way);
        std::string text = std::to_string(store.num_cached()) + " stored, " +
                           std::to_string(store.num_available()) + " available, at " +
                           std::to_string(kvcore::PrefixTree::depth_of(place)) + ": " +
                           prefix("", {1, 1, 2, 2, 3, 3, 4, 4, 6, 6}) +
                           prefix("", {1, 1, 5, 5, 4, 4}) + prefix("", {1, 1, 2, 2, 8, 8, 9, 9}) +
                           prefix("", {4, 4, 6, 6}) + prefix(kName, {1, 1, 2, 2});
        if (other != nullptr) store.release(other);
        store.release(place);
        Ids rest(12);
        rest.resize(static_cast<std::size_t>(store.take(12, rest.data())));
        text += ", goes " + check::text(rest);
        CHECK_EQ(store.num_cached(), 0);
        return text;
    }

    PlainLevel store;
    BlockId taken[2] = {};
    BlockId extra[1] = {};
    std::int64_t on_their_way = 3;
    TreeNode* place = nullptr;
    TreeNode* other = nullptr;
};

template <class Call>
void store_call(const char* name, Call&& call) {
    each_site(
        name, [] { return std::make_unique<Tier>(); },
        [&](std::unique_ptr<Tier>& tier) { call(*tier); },
        [](std::unique_ptr<Tier>& tier) { return tier->text(); });
}

TEST(stores) {
    each_site(
        "build a store", [] { return std::unique_ptr<PlainLevel>(); },
        [](auto& store) { store = std::make_unique<PlainLevel>(4, 2); },
        [](auto& store) { return store == nullptr ? "none" : "there"; });
    store_call("open", [](Tier& tier) { tier.other = tier.store.open(kName); });
    const Tokens one{1, 1};
    const Tokens two{1, 1, 2, 2};
    store_call("hold", [&](Tier& tier) {
        tier.other = tier.store.hold(tier.store.find("", two.data(), 4));
    });
    store_call("advance", [&](Tier& tier) { tier.advance(two); });
    const Tokens fresh{4, 4, 6, 6};
    store_call("publish", [&](Tier& tier) { tier.publish(fresh); });
    const Tokens half_known{1, 1, 9, 9};
    store_call("publish a half-stored run", [&](Tier& tier) { tier.publish(half_known); });
    store_call("publish a stored run", [&](Tier& tier) { tier.publish(two); });
    const Tokens all{1, 1, 2, 2, 3, 3};
    const auto make_deep = [&] {
        auto tier = std::make_unique<Tier>();
        tier->advance(all);
        return tier;
    };
    const auto retreat = [](auto& tier) { tier->place = tier->store.retreat(tier->place, 2); };
    const auto text = [](auto& tier) { return tier->text(); };
    each_site("retreat", make_deep, retreat, text);
}

TEST(a_free_page_is_not_published) {
    const auto make = [] {
        auto tier = std::make_unique<Tier>();
        tier->store.give_back(tier->taken + 1, 1);
        tier->on_their_way -= 1;
        return tier;
    };
    const Tokens tokens{4, 4, 6, 6};
    const auto publish = [&](auto& tier) {
        bool is_refused = false;
        try {
            tier->publish(tokens);
        } catch (const InvalidHandleError&) {
            is_refused = true;
        }
        CHECK(is_refused);
    };
    each_site("publish a free page", make, publish, [](auto& tier) { return tier->text(); });
}

TEST(giving_up_needs_no_memory) {
    const auto make = [] { return std::make_unique<Tier>(); };
    static_assert(noexcept(std::declval<Level&>().release(nullptr)));
    static_assert(noexcept(std::declval<Level&>().give_back(nullptr, 0)));
    static_assert(noexcept(std::declval<Level&>().evict_all()));
    allocates_nothing("let go", make, [](auto& tier) { tier->store.release(tier->place); });
    allocates_nothing("give back", make, [](auto& tier) { tier->store.give_back(tier->taken, 2); });
    allocates_nothing("take", make, [](auto& tier) {
        BlockId ids[12];
        CHECK_EQ(tier->store.take(12, ids), 9);
    });
    const auto make_large = [] {
        auto store = std::make_unique<PlainLevel>(5000, 1);
        Ids ids(5000);
        Tokens tokens(5000);
        CHECK_EQ(store->take(5000, ids.data()), 5000);
        for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>(i);
        store->release(store->publish(store->open(kName), tokens.data(), ids.data(), 4096));
        store->give_back(ids.data() + 4096, 904);
        return store;
    };
    // A run is cut where a call of the tree ends. The rest of the run may move to a smaller block.
    each_site(
        "reset", make_large, [](auto& store) { store->evict_all(); },
        [](auto& store) {
            store->check_integrity(0);
            return std::to_string(store->num_cached());
        });
}

}  // namespace

}  // namespace tests::faults::level
