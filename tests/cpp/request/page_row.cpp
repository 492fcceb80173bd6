// SPDX-License-Identifier: Apache-2.0
#include "request/sequence.hpp"

#include <utility>
#include <vector>

#include "support/request.hpp"

namespace tests::request::page_row {

using kvcore::BlockId;
using kvcore::DuplicatePage;
using kvcore::PageRow;
using kvcore::Replica;
using kvcore::TokenId;
using kvcore::TreePin;

namespace {

using Ids = std::vector<BlockId>;

constexpr std::int32_t kPage = 2;

kvcore::CacheConfig config() {
    kvcore::CacheConfig config;
    config.num_pages = 16;
    config.page_size = kPage;
    return config;
}

/// Pages and rows without a sequence. After all rows are cleared, all pages are free.
struct Scene {
    kvcore::Grouping grouping{kPage, {}};
    Replica replica{config(), grouping};
    std::vector<TokenId> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
    std::vector<DuplicatePage> duplicates;

    PageRow row(std::int64_t n) {
        PageRow row;
        row.place_at(TreePin(replica.tree, replica.tree.open_namespace("")));
        row.make_room(static_cast<std::size_t>(n));
        replica.take_pages(n, row.extend(n));
        return row;
    }
    void commit(PageRow& row, std::int32_t end) {
        duplicates.clear();
        row.commit(replica.tree, tokens.data(), end, duplicates);
        row.check_integrity(replica.tree);
    }
    /// Write every page that the row may write. Pages that other rows may read are replaced.
    std::vector<std::int32_t> write(PageRow& row, std::int32_t first, std::int32_t needed) {
        std::vector<std::int32_t> replaced;
        TreePin cut = row.find_cut(replica.tree, first);
        row.copy_on_write(
            replica, first, needed,
            [&](std::int32_t column) {
                return row.is_own(column) && replica.pool.ref_count(row[column]) == 1;
            },
            [&](std::int32_t column, BlockId page) {
                replaced.push_back(column);
                if (row.is_own(column)) replica.pool.free(&page, 1);
            });
        if (cut) row.move_back(first, std::move(cut));
        row.check_integrity(replica.tree);
        return replaced;
    }
    void check_free(std::int64_t n) const { CHECK_EQ(replica.pool.num_free(), n); }
};

TEST(pages_are_own_until_they_are_committed) {
    Scene s;
    PageRow row = s.row(4);
    s.check_free(12);
    s.commit(row, 3);
    CHECK_EQ(row.committed(), 3);
    CHECK_EQ(row.read_only_end(), 3);
    CHECK(!row.is_own(2) && row.is_own(3));
    CHECK_EQ(s.replica.tree.num_evictable(), 0);
    row.clear(s.replica.pool);
    s.check_free(13);
    CHECK_EQ(s.replica.tree.num_evictable(), 3);
}

TEST(equal_pages_are_swapped_or_kept_as_twins) {
    Scene s;
    PageRow first = s.row(3);
    s.commit(first, 3);
    PageRow second = s.row(3);
    const Ids own = second.ids();
    const std::uint32_t version = second.version();
    second.make_room_for_duplicates(3);
    s.duplicates.clear();
    second.commit(s.replica.tree, s.tokens.data(), 2, s.duplicates);
    second.swap_duplicates(s.replica.pool, 0, s.duplicates);
    CHECK_EQ(second.version(), version + 1);
    CHECK_EQ(second[1], first[1]);
    s.duplicates.clear();
    second.commit(s.replica.tree, s.tokens.data(), 3, s.duplicates);
    for (const auto& each : s.duplicates) second.keep_own_duplicate(2 + each.index);
    second.check_integrity(s.replica.tree);
    CHECK(second.is_own(2) && !second.is_own(1));
    CHECK_EQ(second[2], own[2]);
    CHECK_EQ(second.num_cached(), 2);
    s.check_free(12);
    second.clear(s.replica.pool);
    s.check_free(13);
    first.clear(s.replica.pool);
}

TEST(what_others_may_read_is_replaced) {
    Scene s;
    PageRow parent = s.row(4);
    s.commit(parent, 2);
    PageRow child;
    child.make_room_to_share(parent, 4);
    child.share(s.replica.pool, parent, 4, TreePin(s.replica.tree, parent.node()));
    CHECK_EQ(parent.read_only_end(), 4);
    CHECK(s.write(child, 3, 4) == std::vector<std::int32_t>{3});
    CHECK_EQ(child.read_only_end(), 3);
    CHECK(s.write(parent, 3, 4).empty());  // the only row that has the page now
    // Write to committed pages: the tree keeps its page, and the parent keeps the page that both
    // rows shared.
    CHECK(s.write(child, 1, 4) == (std::vector<std::int32_t>{1, 2}));
    CHECK_EQ(child.committed(), 1);
    CHECK_EQ(child[0], parent[0]);
    CHECK(child[1] != parent[1] && child[2] != parent[2]);
    s.commit(parent, 4);
    child.clear(s.replica.pool);
    parent.clear(s.replica.pool);
    CHECK_EQ(s.replica.num_available(), 16);
}

TEST(columns_that_are_dropped_are_given_back) {
    Scene s;
    PageRow row = s.row(4);
    s.commit(row, 2);
    const std::uint32_t version = row.version();
    row.drop(s.replica.pool, 3);
    CHECK_EQ(row.size(), 3);
    CHECK_EQ(row.version(), version + 1);
    s.check_free(13);
    TreePin cut = row.find_cut(s.replica.tree, 1);
    row.drop(s.replica.pool, 1);
    row.move_back(1, std::move(cut));
    row.make_writable(1);
    row.check_integrity(s.replica.tree);
    s.check_free(14);
    CHECK_EQ(s.replica.tree.num_evictable(), 1);
    row.clear(s.replica.pool);
}

TEST(a_hit_takes_the_place_of_own_pages) {
    Scene s;
    PageRow first = s.row(3);
    s.commit(first, 3);
    PageRow second = s.row(2);
    s.check_free(11);
    second.make_room(2);
    second.take_hit(s.replica, TreePin(s.replica.tree, first.node()), 3);
    CHECK(second.ids() == first.ids());
    CHECK_EQ(second.committed(), 3);
    s.check_free(13);
    second.check_integrity(s.replica.tree);
    first.clear(s.replica.pool);
    CHECK_EQ(s.replica.tree.num_evictable(), 0);
    second.clear(s.replica.pool);
    CHECK_EQ(s.replica.tree.num_evictable(), 3);
}

// The tree gets the last committed page. The rows that share the page before it keep that page.
TEST(a_page_of_forks_is_entrusted_to_the_tree) {
    Scene s;
    PageRow parent = s.row(2);
    PageRow child;
    child.make_room_to_share(parent, 2);
    child.share(s.replica.pool, parent, 2, TreePin(s.replica.tree, parent.node()));
    CHECK(s.write(child, 0, 1) == std::vector<std::int32_t>{0});  // the child drops column 1
    CHECK_EQ(child.size(), 1);
    PageRow heir;
    heir.make_room_to_share(parent, 2);
    heir.share(s.replica.pool, parent, 2, TreePin(s.replica.tree, parent.node()));
    heir.make_room_for_duplicates(1);
    CHECK_EQ(parent.find_shared(s.replica.pool, 2), 0);
    s.commit(parent, 1);
    heir.entrust(s.replica.pool, 0, TreePin(s.replica.tree, parent.node()));
    heir.check_integrity(s.replica.tree);
    CHECK_EQ(heir.committed(), 1);
    CHECK_EQ(s.replica.pool.ref_count(heir[0]), 1);
    CHECK_EQ(s.replica.pool.ref_count(heir[1]), 2);
    for (PageRow* row : {&parent, &child, &heir}) row->clear(s.replica.pool);
    CHECK_EQ(s.replica.num_available(), 16);
}

}  // namespace

}  // namespace tests::request::page_row
