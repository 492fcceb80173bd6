// SPDX-License-Identifier: Apache-2.0
// The order of the sampled pages, against a list that is searched from its start.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "observe/shadow_index.hpp"
#include "support/check.hpp"
#include "support/random.hpp"

namespace tests::observe::shadow_index {

using kvcore::ShadowIndex;

namespace {

/// Held pages, and pages without a holder with the last released page first.
struct SlowOrder {
    struct Held {
        std::uint64_t hash;
        int holders;
    };
    std::vector<Held> held;
    std::vector<std::uint64_t> idle;

    [[nodiscard]] std::vector<Held>::iterator find_held(std::uint64_t hash) {
        return std::find_if(held.begin(), held.end(),
                            [&](const Held& each) { return each.hash == hash; });
    }
    [[nodiscard]] bool has(std::uint64_t hash) {
        return find_held(hash) != held.end() ||
               std::find(idle.begin(), idle.end(), hash) != idle.end();
    }
    [[nodiscard]] std::int64_t distance(std::uint64_t hash) {
        if (find_held(hash) != held.end()) return 0;
        const auto at = std::find(idle.begin(), idle.end(), hash);
        return static_cast<std::int64_t>(held.size()) + (at - idle.begin());
    }
    void erase(std::uint64_t hash) {
        idle.erase(std::remove(idle.begin(), idle.end(), hash), idle.end());
        const auto at = find_held(hash);
        if (at != held.end()) held.erase(at);
    }
    void place_first(std::uint64_t hash) {
        erase(hash);
        idle.insert(idle.begin(), hash);
    }
    void hold(std::uint64_t hash) {
        const auto at = find_held(hash);
        if (at != held.end()) {
            ++at->holders;
            return;
        }
        erase(hash);
        held.push_back({hash, 1});
    }
    void release(std::uint64_t hash) {
        if (--find_held(hash)->holders == 0) place_first(hash);
    }
};

// Hashes with few different homes in the table, so that entries are moved.
std::uint64_t hash_of(std::int64_t page) {
    return static_cast<std::uint64_t>(page % 5) << 32 | static_cast<std::uint64_t>(page);
}

TEST(random_verbs_keep_the_order_of_a_slow_list) {
    Random random(check::seed_or(1));
    for (const std::int64_t most : {1, 2, 7, 16}) {
        ShadowIndex index(most);
        SlowOrder slow;
        std::vector<ShadowIndex::Entry> holders;
        for (int step = 0; step < 4000; ++step) {
            const std::uint64_t hash = hash_of(random.below(24));
            const ShadowIndex::Entry entry = index.find(hash);
            CHECK_EQ(entry != ShadowIndex::kNone, slow.has(hash));
            switch (random.below(8)) {
                case 0:
                    if (entry == ShadowIndex::kNone) break;
                    index.remove(entry);
                    slow.erase(hash);
                    break;
                case 1:
                    if (entry == ShadowIndex::kNone || index.is_held(entry)) break;
                    index.touch(entry);
                    slow.place_first(hash);
                    break;
                case 2:
                case 3:
                    if (entry == ShadowIndex::kNone) break;
                    index.hold(entry);
                    slow.hold(hash);
                    holders.push_back(entry);
                    break;
                case 4:
                case 5: {
                    if (holders.empty()) break;
                    std::swap(random.pick(holders), holders.back());
                    const ShadowIndex::Entry left = holders.back();
                    holders.pop_back();
                    const std::uint64_t of_left = index.hash(left);
                    const bool is_found = index.find(of_left) == left;
                    const bool is_last = index.release(left);
                    if (is_found) slow.release(of_left);
                    CHECK_EQ(is_last, is_found && !index.is_held(left));
                    break;
                }
                default: {
                    if (entry != ShadowIndex::kNone) break;
                    const bool is_full = index.num_pages() == most && slow.idle.empty();
                    const ShadowIndex::Entry added = index.add(hash);
                    if (added == ShadowIndex::kNone) {
                        CHECK(slow.idle.empty());
                        break;
                    }
                    CHECK(!is_full);
                    slow.place_first(hash);
                    // The last page may have left for it.
                    if (index.num_pages() <
                        static_cast<std::int64_t>(slow.held.size() + slow.idle.size())) {
                        slow.idle.pop_back();
                    }
                }
            }
            CHECK_EQ(index.num_held(), static_cast<std::int64_t>(slow.held.size()));
            CHECK_EQ(index.num_pages(),
                     static_cast<std::int64_t>(slow.held.size() + slow.idle.size()));
            for (std::int64_t page = 0; page < 24; ++page) {
                const ShadowIndex::Entry other = index.find(hash_of(page));
                CHECK_EQ(other != ShadowIndex::kNone, slow.has(hash_of(page)));
                if (other == ShadowIndex::kNone) continue;
                CHECK_EQ(index.distance(other), slow.distance(hash_of(page)));
            }
            if (step % 64 == 0) index.check_integrity();
        }
    }
}

TEST(a_page_that_enters_again_keeps_its_last_distance) {
    ShadowIndex index(4);
    for (const std::uint64_t page : {1, 2, 3}) {
        index.note_distance(page);
        CHECK_EQ(index.distance_before(index.enter(page)), std::int64_t{ShadowIndex::kNew});
    }
    index.note_distance(1);
    const ShadowIndex::Entry first = index.enter(1);
    CHECK_EQ(index.distance_before(first), 2);
    CHECK_EQ(index.distance(first), 0);
    index.hold(first);
    index.note_distance(1);
    CHECK_EQ(index.enter(1), first);
    CHECK(index.is_held(first));
    CHECK_EQ(index.distance_before(first), 0);
}

TEST(the_last_page_leaves_for_a_new_page) {
    ShadowIndex index(2);
    CHECK(index.add(1) != ShadowIndex::kNone);
    CHECK(index.add(2) != ShadowIndex::kNone);
    index.touch(index.find(1));
    CHECK(index.add(3) != ShadowIndex::kNone);
    CHECK_EQ(index.find(2), ShadowIndex::kNone);
    CHECK_EQ(index.distance(index.find(1)), 1);
}

TEST(no_page_enters_while_all_are_held) {
    ShadowIndex index(1);
    const ShadowIndex::Entry held = index.add(1);
    index.hold(held);
    CHECK_EQ(index.add(2), ShadowIndex::kNone);
    CHECK(index.release(held));
    CHECK(index.add(2) != ShadowIndex::kNone);
    CHECK_EQ(index.find(1), ShadowIndex::kNone);
}

TEST(a_page_that_was_taken_out_frees_its_entry_with_its_last_holder) {
    ShadowIndex index(1);
    const ShadowIndex::Entry held = index.add(1);
    index.hold(held);
    index.clear();
    CHECK_EQ(index.find(1), ShadowIndex::kNone);
    CHECK_EQ(index.num_held(), 0);
    index.check_integrity();
    CHECK_EQ(index.add(2), ShadowIndex::kNone);
    CHECK(!index.release(held));
    CHECK(index.add(2) != ShadowIndex::kNone);
    index.check_integrity();
}

}  // namespace

}  // namespace tests::observe::shadow_index
