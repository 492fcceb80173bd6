// SPDX-License-Identifier: Apache-2.0
// Writes of the host tier's columns to lower stores, and resets in between.
#include "kvcore/store_writer.hpp"

#include <new>
#include <utility>

#include "fakes/lower_scene.hpp"

namespace tests::tiers::store_writer {

using kvcore::StoreWriter;
using Batch = StoreWriter::Batch;

namespace {

/// A manager whose host tier has the columns of a prompt, which wait to be written.
struct Scene {
    explicit Scene(std::int64_t event_pages = 0) : m(config(event_pages)) {
        m.put(Tokens(prompt.begin(), prompt.end() - 1));
        CHECK_EQ(m.manager.num_waiting_writes(), 4);
    }
    static kvcore::CacheConfig config(std::int64_t event_pages) {
        kvcore::CacheConfig config = HostFixture::config(16, 16);
        config.event_pages = event_pages;
        return config;
    }
    /// The number of columns in stores, according to the events.
    std::int64_t reported() {
        std::int64_t n = 0;
        for (const kvcore::CacheEvent& event : m.manager.take_events()) {
            if (event.medium == kvcore::CacheMedium::kStorage) n += count(event.keys);
        }
        return n;
    }

    Tokens prompt = count_up(10, 9);
    LowerScene m;
    FakeStore upper{m.keys(prompt), {}};
    FakeStore lower{m.keys(prompt), {}};
    StoreWriter writer{m.manager, {&upper, &lower}};
    Batch batch;
};

TEST(each_store_gets_the_columns) {
    Scene s;
    CHECK(s.writer.take(3, s.batch));
    CHECK_EQ(s.writer.write(s.batch), 0);
    CHECK(s.upper.writes == std::vector<Columns>({{0, 1, 2}}));
    CHECK(s.lower.writes == s.upper.writes);
    CHECK_EQ(s.m.manager.num_waiting_writes(), 4);
    s.writer.finish(s.batch);
    s.writer.finish(s.batch);  // a second call does nothing
    CHECK_EQ(s.m.manager.num_waiting_writes(), 1);
    CHECK(s.writer.take(3, s.batch));
    CHECK_EQ(s.writer.write(s.batch), 0);
    s.writer.finish(s.batch);
    CHECK(!s.writer.take(3, s.batch));
    s.m.manager.check_integrity();
}

TEST(columns_that_a_store_refuses_are_lost) {
    Scene s;
    s.lower.fails_from = 1;
    CHECK(s.writer.take(10, s.batch));
    CHECK_EQ(s.writer.write(s.batch), 3);
    s.writer.finish(s.batch);
    CHECK_EQ(s.upper.parts.size(), 4U);
    CHECK_EQ(s.lower.parts.size(), 1U);
}

TEST(a_reset_removes_the_columns_in_flight) {
    Scene s;
    CHECK(s.writer.take(10, s.batch));
    s.upper.on_write = [&] { s.writer.forget(); };
    CHECK_EQ(s.writer.write(s.batch), 0);
    CHECK(s.upper.parts.empty());
    CHECK(s.lower.parts.empty());
    s.writer.finish(s.batch);
    s.m.manager.check_integrity();
}

TEST(columns_are_reported_if_a_store_has_all_of_them) {
    for (const std::int32_t fails_from : {1000, 1}) {
        for (const bool is_reset : {false, true}) {
            Scene s(100);
            s.lower.fails_from = fails_from;
            CHECK(s.writer.take(10, s.batch));
            if (is_reset) s.writer.forget();
            static_cast<void>(s.writer.write(s.batch));
            s.writer.finish(s.batch);
            CHECK_EQ(s.reported(), is_reset ? 0 : 4);
        }
    }
    Scene s(100);
    s.upper.fails_from = s.lower.fails_from = 3;
    CHECK(s.writer.take(10, s.batch));
    CHECK_EQ(s.writer.write(s.batch), 1);
    s.writer.finish(s.batch);
    CHECK_EQ(s.reported(), 0);
}

TEST(an_error_keeps_the_columns_until_the_end) {
    Scene s;
    CHECK(s.writer.take(10, s.batch));
    s.lower.on_write = [] { throw std::bad_alloc(); };
    CHECK_THROWS(std::bad_alloc, static_cast<void>(s.writer.write(s.batch)));
    CHECK_EQ(s.m.manager.num_waiting_writes(), 4);
    s.writer.finish(s.batch);
    CHECK_EQ(s.m.manager.num_waiting_writes(), 0);
    s.m.manager.check_integrity();
}

TEST(a_page_that_is_twice_in_a_batch_is_written_once) {
    Scene s;
    CHECK(s.writer.take(10, s.batch));
    kvcore::StoreMoves& moves = s.batch.moves;
    moves.keys.push_back(moves.keys[1]);
    moves.parts.push_back(moves.parts[1]);
    moves.ends.push_back(static_cast<std::int32_t>(moves.parts.size()));
    CHECK_EQ(s.writer.write(s.batch), 0);
    CHECK(s.upper.writes == std::vector<Columns>({{0, 2, 3, 1}}));
    s.writer.finish(s.batch);
}

}  // namespace

}  // namespace tests::tiers::store_writer
