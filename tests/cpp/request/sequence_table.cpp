// SPDX-License-Identifier: Apache-2.0
#include "request/sequence.hpp"

#include <limits>
#include <vector>

#include "kvcore/errors.hpp"
#include "support/check.hpp"
#include "support/claims.hpp"

namespace tests::request::sequence_table {

using kvcore::RequestNotFoundError;
using kvcore::SequenceHandle;
using kvcore::SequenceTable;

namespace {

constexpr std::uint32_t kLast = std::numeric_limits<std::uint32_t>::max();

TEST(a_handle_is_good_until_release) {
    SequenceTable table;
    const SequenceHandle a = table.claim(3);
    const SequenceHandle b = table.claim(0);
    CHECK_EQ(num_claimed(table), 2);
    CHECK_EQ(table.at(a).replica, 3);
    CHECK_EQ(table.at(b).replica, 0);
    table.release(a);
    CHECK_EQ(num_claimed(table), 1);
    CHECK(table.find(a) == nullptr);
    CHECK_THROWS(RequestNotFoundError, table.at(a));
    const SequenceHandle again = table.claim(1);
    CHECK_EQ(again.index, a.index);
    CHECK(table.find(a) == nullptr);
    CHECK_EQ(table.at(again).replica, 1);
}

// The next generation would match an old handle that a caller may still have.
TEST(an_entry_that_is_used_up_serves_no_more) {
    SequenceTable table;
    const SequenceHandle first = table.claim(0);
    const SequenceHandle other = table.claim(0);
    table.at(first).generation = kLast - 1;
    table.release({first.index, kLast - 1});
    const SequenceHandle last = table.claim(0);
    CHECK_EQ(last.index, first.index);
    CHECK_EQ(last.generation, kLast);
    table.at(last).pages.make_room(100);
    table.release(last);
    CHECK(table.find(last) == nullptr);
    CHECK(table.find(first) == nullptr);
    CHECK_EQ(num_claimed(table), 1);
    CHECK_EQ(table.entries()[last.index].pages.ids().capacity(), 0);
    for (int i = 0; i < 5; ++i) {
        const SequenceHandle next = table.claim(0);
        CHECK(next.index != first.index);
        CHECK_EQ(num_claimed(table), i + 2);
    }
    CHECK(table.find(first) == nullptr);
    CHECK_EQ(table.at(other).replica, 0);
}

}  // namespace

}  // namespace tests::request::sequence_table
