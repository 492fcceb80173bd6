// SPDX-License-Identifier: Apache-2.0
// Stand-ins when memory runs out: a name has an id or no id, and a release needs no memory.
#include <memory>
#include <string>
#include <string_view>

#include "kvcore/extra_keys.hpp"
#include "support/failing_memory.hpp"

namespace tests::faults::stand_ins {

using failing_memory::allocates_nothing;
using failing_memory::each_site;
using kvcore::ExtraKey;
using kvcore::StandIns;
using kvcore::TokenId;

namespace {

constexpr std::string_view kName = "a name that is longer than what a string keeps in itself";
constexpr std::string_view kOther =
    "a name that is longer than what a string keeps in itself, and another one";

std::unique_ptr<StandIns> table_with_one() {
    auto table = std::make_unique<StandIns>();
    static_cast<void>(table->acquire(kOther));
    return table;
}

std::string text_of(std::unique_ptr<StandIns>& table) {
    table->check_integrity();
    return std::to_string(table->size()) + ": " + std::to_string(table->find(kName)) + ", next " +
           std::to_string(table->acquire("another"));
}

TEST(verbs_leave_no_trace) {
    each_site(
        "acquire", table_with_one, [](auto& table) { static_cast<void>(table->acquire(kName)); },
        text_of);
    each_site(
        "hold", table_with_one,
        [](auto& table) { static_cast<void>(table->hold(table->find(kOther))); },
        [](auto& table) {  // a failed call is not a user of the name
            const TokenId id = table->find(kOther);
            table->release(id);
            table->begin_sweep();
            table->end_sweep(nullptr, 0);
            return text_of(table);
        });
    each_site(
        "name", [] { return std::string(); },
        [](std::string& name) {
            const ExtraKey keys[]{{3, kName}, {4, kOther}};
            name = kvcore::stand_in_name(1, keys, 2);
        },
        [](std::string& name) { return name; });
    allocates_nothing("find and release", table_with_one, [](auto& table) {
        const TokenId id = table->find(kOther);
        CHECK_EQ(table->acquire(kOther), id);
        table->release(id);
        table->release(id);
        table->begin_sweep();
        table->end_sweep(nullptr, 0);
        CHECK_EQ(table->size(), 0);
    });
}

}  // namespace

}  // namespace tests::faults::stand_ins
