// SPDX-License-Identifier: Apache-2.0
// Loads of prompts from lower stores: which store is called for which columns, and the fate of the
// host tier's pages if a store, another thread or a reset comes in between.
#include "kvcore/store_reader.hpp"

#include <new>
#include <thread>

#include "fakes/lower_scene.hpp"

namespace tests::tiers::store_reader {

using kvcore::GroupKind;
using kvcore::NextColumn;
using kvcore::StoreTask;

namespace {

std::vector<std::size_t> sizes_of(const std::vector<Columns>& batches) {
    std::vector<std::size_t> sizes;
    for (const Columns& each : batches) sizes.push_back(each.size());
    return sizes;
}

// The prompt has `columns` columns and a token more.
Tokens prompt_of(std::int64_t columns) { return count_up(10, 2 * columns + 1); }

TEST(one_column_is_looked_up_first_and_then_more_at_a_time) {
    LowerScene m(256, 256);
    const Tokens prompt = prompt_of(100);
    m.put(Tokens(prompt.begin(), prompt.begin() + 6));
    FakeStore store(m.keys(prompt), columns_with(0, 40));
    m.open({&store});
    kvcore::LowerSearch search = m.search_of(prompt);
    CHECK_EQ(search.found().have, 3);
    CHECK_EQ(m.reader->reach(search), 40);
    CHECK(sizes_of(store.asked) == std::vector<std::size_t>({1, 8, 16, 32}));
    CHECK(store.asked[0] == Columns({3}));
    CHECK_EQ(m.reader->reach(search), 40);
    CHECK_EQ(count(store.asked), 4);  // nothing is looked up twice

    FakeStore empty(m.keys(prompt), {});
    m.open({&empty});
    kvcore::LowerSearch other = m.search_of(prompt);
    CHECK_EQ(m.reader->reach(other), 3);
    CHECK(empty.asked == std::vector<Columns>({{3}}));
}

TEST(a_load_looks_up_each_column_once) {
    LowerScene m(64, 64);
    const Tokens prompt = prompt_of(6);
    FakeStore store(m.keys(prompt), columns_with(0, 4));
    m.open({&store});
    const kvcore::StoreSearch found = m.search(prompt);
    NextColumn next;
    next.keys = {m.keys(prompt)[0]};
    CHECK(m.reader->has(next));
    kvcore::LowerSearch search(m.manager, found, "", prompt.data(), std::move(next));
    m.reader->load(search);
    CHECK(store.asked == std::vector<Columns>({{0}, {1, 2, 3, 4, 5}}));
    CHECK(store.reads == std::vector<Columns>({{0, 1, 2, 3}}));
    CHECK_EQ(m.hit(prompt), 8);
    NextColumn last;
    last.keys = {m.keys(prompt)[4]};
    CHECK(!m.reader->has(last));
}

TEST(each_page_is_read_from_the_first_store_that_has_it) {
    LowerScene m(64, 64);
    const Tokens prompt = prompt_of(6);
    FakeStore upper(m.keys(prompt), {{0, 1}, {1, 1}, {4, 1}});
    FakeStore lower(m.keys(prompt), columns_with(0, 6));
    m.open({&upper, &lower});
    m.load(prompt);
    CHECK(upper.reads == std::vector<Columns>({{0, 1}, {4}}));
    CHECK(lower.reads == std::vector<Columns>({{2, 3}, {5}}));
    CHECK_EQ(m.hit(prompt), 12);
    CHECK_EQ(m.manager.num_waiting_writes(), 6);  // the upper store lacks pages
}

TEST(pages_of_the_first_store_are_not_written_again) {
    LowerScene m(64, 64);
    const Tokens prompt = prompt_of(6);
    FakeStore store(m.keys(prompt), columns_with(0, 6));
    FakeStore empty(m.keys(prompt), {});
    m.open({&store, &empty});
    m.load(prompt);
    CHECK_EQ(m.hit(prompt), 12);
    CHECK_EQ(m.manager.num_waiting_writes(), 0);
}

TEST(reads_come_in_batches) {
    const Tokens prompt = prompt_of(5);
    for (const std::int64_t bytes : {16, 1}) {
        LowerScene m(64, 64);
        FakeStore store(m.keys(prompt), columns_with(0, 5));
        m.open({&store}, bytes);
        m.load(prompt);
        CHECK(store.reads == (bytes == 16 ? std::vector<Columns>({{0, 1}, {2, 3}, {4}})
                                          : std::vector<Columns>({{0}, {1}, {2}, {3}, {4}})));
    }
}

TEST(a_page_that_one_store_loses_is_read_from_another) {
    LowerScene m(64, 64);
    const Tokens prompt = prompt_of(6);
    FakeStore upper(m.keys(prompt), columns_with(0, 6));
    upper.fails_from = 2;
    FakeStore lower(m.keys(prompt), {{2, 1}, {3, 1}});
    m.open({&upper, &lower});
    m.load(prompt);
    CHECK(lower.reads[0] == Columns({2}));
    CHECK(lower.reads[1] == Columns({3}));
    CHECK_EQ(m.hit(prompt), 8);
}

TEST(a_short_fill_is_a_short_hit) {
    LowerScene m(64, 4);
    const Tokens prompt = prompt_of(6);
    FakeStore store(m.keys(prompt), columns_with(0, 6));
    m.open({&store});
    const kvcore::StoreMoves all = m.begin_fill(count_up(900, 8));
    int asked = 0;
    m.hooks.on_room = [&] { return ++asked == 0; };
    m.load(prompt);  // the tier has no room
    CHECK_EQ(asked, 1);
    CHECK(store.reads.empty());
    m.hooks.on_room = [&] {
        m.finish_fill(all, 0);
        return true;
    };
    m.load(prompt);
    CHECK(store.reads == std::vector<Columns>({{0, 1, 2, 3}}));
    CHECK_EQ(m.hit(prompt), 8);
}

TEST(a_write_that_ends_before_the_wait_for_room_makes_room) {
    LowerScene m(64, 4);
    const Tokens prompt = prompt_of(4);
    FakeStore store(m.keys(prompt), columns_with(0, 4));
    m.open({&store});
    m.put(count_up(900, 9));
    CHECK_EQ(m.manager.num_waiting_writes(), 4);
    m.hooks.on_room = [&] {
        CHECK_EQ(m.write_all(), 4);
        return false;
    };
    m.load(prompt);
    CHECK_EQ(m.hit(prompt), 8);
}

const std::vector<kvcore::CacheGroup> kWindow = {{GroupKind::kFull, 0, 1, 0},
                                                 {GroupKind::kSliding, 4, 1, 0}};

TEST(a_hit_ends_where_its_window_is) {
    for (const bool lists_parts : {true, false}) {
        LowerScene m(with_groups(kWindow));
        const Tokens prompt = prompt_of(8);
        auto parts = columns_with(0, 8);
        for (const std::int32_t column : {2, 3, 6}) parts[column] = 3;
        FakeStore store(m.keys(prompt), parts);
        store.lists_parts = lists_parts;
        m.open({&store});
        m.load(prompt);
        CHECK_EQ(m.hit(prompt), 8);
        if (lists_parts) CHECK(store.reads == std::vector<Columns>({{0, 1, 2, 3}}));
    }
}

TEST(nothing_is_read_that_makes_no_hit_longer) {
    LowerScene m(with_groups(kWindow));
    const Tokens prompt = prompt_of(8);
    FakeStore store(m.keys(prompt), columns_with(0, 8));
    m.open({&store});
    m.load(prompt);
    CHECK(store.reads.empty());
}

TEST(a_hit_with_gaps_takes_the_last_window) {
    LowerScene m(with_groups({{GroupKind::kSliding, 4, 1, 0}}));
    const Tokens prompt = prompt_of(8);
    FakeStore store(m.keys(prompt), {{4, 1}, {5, 1}, {7, 1}});
    m.open({&store});
    kvcore::LowerSearch search = m.search_of(prompt);
    CHECK_EQ(m.reader->reach(search), 8);
    m.reader->load(search);
    CHECK_EQ(m.hit(prompt), 12);
    m.manager.check_integrity();
}

// A load whose read exceeded its time limit, and has 3 of the 16 pages of the host tier.
struct LateLoad {
    LateLoad() {
        store.on_read = [&](StoreTask& late) { late = read.task(); };
        m.open({&store});
        m.load(prompt);
        CHECK_EQ(m.room(), 13);
    }

    LowerScene m{64, 16};
    const Tokens prompt = prompt_of(3);
    FakeStore store{m.keys(prompt), columns_with(0, 3)};
    LongRead read;
};

TEST(memory_is_not_given_back_while_a_store_has_it) {
    LateLoad late;
    CHECK(!late.m.reader->close(0));
    int interrupts = 0;
    late.m.hooks.on_interrupt = [&] {
        ++interrupts;
        throw Interrupted();
    };
    CHECK_THROWS(Interrupted, static_cast<void>(late.m.reader->close(60)));
    CHECK_EQ(interrupts, 1);
    late.m.hooks.on_interrupt = {};
    late.read.door.open();
    CHECK(late.m.reader->close(60));
    CHECK_EQ(late.m.room(), 16);
    CHECK_EQ(late.m.hit(late.prompt), 0);
}

TEST(a_later_call_gives_back_the_memory_of_a_late_read) {
    LateLoad late;
    late.read.door.open();
    late.read.task().wait();
    kvcore::LowerSearch search = late.m.search_of(late.prompt);
    CHECK_EQ(late.m.reader->reach(search), 3);
    CHECK_EQ(late.m.room(), 16);
}

TEST(an_interrupt_does_not_give_memory_back_either) {
    LowerScene m(64, 16);
    const Tokens prompt = prompt_of(3);
    FakeStore store(m.keys(prompt), columns_with(0, 3));
    LongRead read;
    store.on_read = [&](StoreTask& late) {
        late = read.task();
        throw Interrupted();
    };
    m.open({&store});
    CHECK_THROWS(Interrupted, m.load(prompt));
    CHECK_EQ(m.room(), 13);
    read.door.open();
    CHECK(m.reader->close(60));
    CHECK_EQ(m.room(), 16);
}

TEST(a_reader_waits_for_its_late_reads_when_it_is_destroyed) {
    LowerScene m(64, 16);
    const Tokens prompt = prompt_of(3);
    FakeStore store(m.keys(prompt), columns_with(0, 3));
    LongRead read;
    store.on_read = [&](StoreTask& late) { late = read.task(); };
    m.open({&store});
    m.load(prompt);
    std::thread opens([&] { read.door.open(); });
    m.reader.reset();
    opens.join();
    CHECK_EQ(m.room(), 16);
}

TEST(pages_that_arrive_after_a_reset_are_not_found) {
    LowerScene m(64, 16);
    const Tokens prompt = prompt_of(3);
    FakeStore store(m.keys(prompt), columns_with(0, 3));
    m.open({&store});
    store.on_read = [&](StoreTask&) { m.reader->forget(); };
    m.load(prompt);
    CHECK_EQ(count(store.reads), 1);
    CHECK_EQ(m.hit(prompt), 0);
    CHECK_EQ(m.room(), 16);
}

TEST(a_request_that_is_reset_meanwhile_finds_nothing) {
    LowerScene m(64, 16);
    const Tokens prompt = prompt_of(3);
    FakeStore store(m.keys(prompt), columns_with(0, 3));
    m.open({&store});
    store.on_read = [&](StoreTask&) {
        m.reader->forget();
        m.manager.reset_prefix_cache();
    };
    m.load(prompt);
    CHECK_EQ(m.stored(), 0);
    m.manager.check_integrity();
}

TEST(an_error_gives_all_pages_back) {
    LowerScene m(64, 16);
    const Tokens prompt = prompt_of(3);
    FakeStore store(m.keys(prompt), columns_with(0, 3));
    m.open({&store});
    store.on_read = [](StoreTask&) { throw std::bad_alloc(); };
    CHECK_THROWS(std::bad_alloc, m.load(prompt));
    CHECK_EQ(m.room(), 16);
    m.hooks.on_prepare = [](const kvcore::StoreMoves&) { throw Interrupted(); };
    CHECK_THROWS(Interrupted, m.load(prompt));
    CHECK_EQ(m.room(), 16);
    m.hooks.on_prepare = {};
    store.on_read = {};
    m.load(prompt);
    CHECK_EQ(m.hit(prompt), 6);
}

TEST(a_reader_that_is_off_calls_no_store) {
    LowerScene m(64, 16);
    const Tokens prompt = prompt_of(3);
    FakeStore store(m.keys(prompt), columns_with(0, 3));
    m.open({&store});
    CHECK(m.reader->close(-1));
    CHECK(m.reader->is_off());
    m.load(prompt);
    kvcore::LowerSearch search = m.search_of(prompt);
    CHECK_EQ(m.reader->reach(search), 0);
    NextColumn next;
    next.keys = {m.keys(prompt)[0]};
    CHECK(!m.reader->has(next));
    CHECK(store.asked.empty());
}

// Two threads load the same prompt: the second thread waits, and reads no page.
TEST(one_thread_reads_a_page_at_a_time) {
    LowerScene m(64, 64);
    const Tokens prompt = prompt_of(4);
    FakeStore store(m.keys(prompt), columns_with(0, 4));
    Door is_reading;
    Door may_go;
    store.on_read = [&](StoreTask&) {
        is_reading.open();
        may_go.pass();
    };
    m.open({&store});
    kvcore::LowerSearch search = m.search_of(prompt);
    std::thread first([&] { m.reader->load(search); });
    is_reading.pass();
    m.hooks.on_interrupt = [] { throw Interrupted(); };
    CHECK_THROWS(Interrupted, m.load(prompt));  // it waits, and can be interrupted
    m.hooks.on_interrupt = [&] { may_go.open(); };
    m.load(prompt);
    first.join();
    CHECK_EQ(count(store.reads), 1);
    CHECK_EQ(m.hit(prompt), 8);
}

TEST(a_wait_for_another_thread_has_a_limit) {
    LowerScene m(64, 64);
    const Tokens prompt = prompt_of(4);
    FakeStore store(m.keys(prompt), columns_with(0, 4));
    Door is_reading;
    Door may_go;
    store.on_read = [&](StoreTask&) {
        is_reading.open();
        may_go.pass();
    };
    m.open({&store}, 1 << 20, 0.001);
    kvcore::LowerSearch search = m.search_of(prompt);
    std::thread first([&] { m.reader->load(search); });
    is_reading.pass();
    m.load(prompt);
    CHECK_EQ(m.hit(prompt), 0);
    may_go.open();
    first.join();
    CHECK_EQ(m.hit(prompt), 8);
    CHECK_EQ(count(store.reads), 1);
}

}  // namespace

}  // namespace tests::tiers::store_reader
