// SPDX-License-Identifier: Apache-2.0
// Checks the groups of rows that share the beginning of their pages.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "array_args.hpp"
#include "kvcore/attention.hpp"
#include "kvcore/paged_batch.hpp"

namespace kvcore::python {

/// Groups as `shared_prefixes` returns them. Wrong ones would have rows read what is not theirs,
/// so everything that the kernel relies on is checked against the table.
class SharedArgs {
   public:
    /// Takes the groups of one replica. The pages of all cached tokens have been checked.
    SharedArgs(const pybind11::object& groups, std::int64_t replica, const PageTable& table,
               const std::uint32_t* cached, std::int64_t page_size) {
        std::int64_t index = 0;
        for (const pybind11::handle group : groups) {
            const std::string name = concat("shared[", index++, "]");
            for (const char* field : {"rows", "num_tokens", "replica"}) {
                if (pybind11::hasattr(group, field)) continue;
                throw pybind11::type_error(concat(name, " is a ", Py_TYPE(group.ptr())->tp_name,
                                                  ", must be a SharedPrefix"));
            }
            if (integer_arg(group.attr("replica"), "replica") != replica) continue;
            add(group, name, table, cached, page_size);
        }
        check_nesting(table.batch);
        for (const Group& group : groups_) {
            views_.push_back(
                {group.rows.data(), static_cast<std::int64_t>(group.rows.size()), group.tokens});
        }
    }

    [[nodiscard]] const SharedRows* data() const noexcept { return views_.data(); }
    [[nodiscard]] std::int64_t size() const noexcept {
        return static_cast<std::int64_t>(views_.size());
    }

   private:
    struct Group {
        std::string name;
        std::vector<std::int64_t> rows;
        std::int64_t tokens;
    };

    void add(pybind11::handle source, const std::string& name, const PageTable& table,
             const std::uint32_t* cached, std::int64_t page_size) {
        Group group{name, {}, integer_arg(source.attr("num_tokens"), "num_tokens")};
        if (group.tokens < 1) {
            throw pybind11::value_error(
                concat(name, ".num_tokens is ", group.tokens, ", must be at least 1"));
        }
        for (const pybind11::handle item : source.attr("rows")) {
            const std::int64_t row = integer_arg(item, "a row of shared");
            const std::int64_t least = group.rows.empty() ? 0 : group.rows.back() + 1;
            if (row < least || row >= table.batch) {
                throw pybind11::index_error(concat(name, ".rows holds ", row,
                                                   ", must be ascending and below the ",
                                                   table.batch, " rows of the batch"));
            }
            group.rows.push_back(row);
            check_row(group, table, cached, page_size);
        }
        if (!group.rows.empty()) groups_.push_back(std::move(group));
    }

    // The row that came last holds the tokens, in the pages of the first.
    static void check_row(const Group& group, const PageTable& table, const std::uint32_t* cached,
                          std::int64_t page_size) {
        const std::int64_t row = group.rows.back();
        if (group.tokens > cached[row]) {
            throw pybind11::value_error(concat(group.name, ".num_tokens is ", group.tokens,
                                               ", but row ", row, " has ", cached[row],
                                               " cached tokens"));
        }
        const std::int64_t columns = (group.tokens - 1) / page_size + 1;
        const std::uint32_t* first = table.pages + group.rows.front() * table.row_stride;
        const std::uint32_t* other = table.pages + row * table.row_stride;
        const std::uint32_t* end = first + columns;
        const auto [mine, differs] = std::mismatch(first, end, other);
        if (mine == end) return;
        throw pybind11::value_error(concat(group.name, ": rows ", group.rows.front(), " and ", row,
                                           " hold pages ", *mine, " and ", *differs, " in column ",
                                           mine - first, "; call shared_prefixes after fetch"));
    }

    // Sorts the longest to the front. Of two groups with a common row, the rows of the longer are
    // all rows of the shorter.
    void check_nesting(std::int64_t batch) {
        std::stable_sort(groups_.begin(), groups_.end(),
                         [](const Group& a, const Group& b) { return a.tokens > b.tokens; });
        std::vector<std::int64_t> inner(static_cast<std::size_t>(batch), -1);  // by row
        for (std::size_t g = 0; g < groups_.size(); ++g) {
            std::vector<std::size_t> found(g);  // rows in common with each group before
            for (const std::int64_t row : groups_[g].rows) {
                std::int64_t& last = inner[static_cast<std::size_t>(row)];
                if (last >= 0) ++found[static_cast<std::size_t>(last)];
                last = static_cast<std::int64_t>(g);
            }
            for (std::size_t other = 0; other < g; ++other) {
                const Group& longer = groups_[other];
                if (found[other] == 0) continue;
                if (found[other] == longer.rows.size() && longer.tokens > groups_[g].tokens) {
                    continue;
                }
                throw pybind11::value_error(concat(longer.name, " and ", groups_[g].name,
                                                   " have rows in common; the rows of the longer "
                                                   "must all be rows of the shorter"));
            }
        }
    }

    std::vector<Group> groups_;
    std::vector<SharedRows> views_;
};

}  // namespace kvcore::python
