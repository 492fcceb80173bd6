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

/// Groups as `shared_prefixes` returns them. With wrong groups a row would read pages of another
/// row, so each property that the kernel relies on is checked against the table.
class SharedArgs {
   public:
    /// Takes the groups of a replica. The caller has checked the pages of tokens [first[b],
    /// cached[b]) of each row b; the queries of the row read no other pages.
    SharedArgs(const pybind11::object& groups, std::int64_t replica, const PageTable& table,
               const std::vector<std::uint32_t>& first, const std::uint32_t* cached,
               std::int64_t page_size) {
        std::int64_t index = 0;
        for (const pybind11::handle group : groups) {
            const std::string name = concat("shared[", index++, "]");
            for (const char* field : {"rows", "num_tokens", "replica"}) {
                if (pybind11::hasattr(group, field)) continue;
                throw pybind11::type_error(concat(name, " is a ", Py_TYPE(group.ptr())->tp_name,
                                                  ", must be a SharedPrefix"));
            }
            if (integer_arg(group.attr("replica"), "replica") != replica) continue;
            add(group, name, table.batch, cached);
        }
        for (const Group& group : groups_) check_pages(group, table, first, page_size);
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

    void add(pybind11::handle source, const std::string& name, std::int64_t batch,
             const std::uint32_t* cached) {
        Group group{name, {}, integer_arg(source.attr("num_tokens"), "num_tokens")};
        if (group.tokens < 1) {
            throw pybind11::value_error(
                concat(name, ".num_tokens is ", group.tokens, ", must be at least 1"));
        }
        for (const pybind11::handle item : source.attr("rows")) {
            const std::int64_t row = integer_arg(item, "a row of shared");
            const std::int64_t least = group.rows.empty() ? 0 : group.rows.back() + 1;
            if (row < least || row >= batch) {
                throw pybind11::index_error(concat(name, ".rows holds ", row,
                                                   ", must be ascending and below the ", batch,
                                                   " rows of the batch"));
            }
            group.rows.push_back(row);
            if (group.tokens <= cached[row]) continue;
            throw pybind11::value_error(concat(name, ".num_tokens is ", group.tokens, ", but row ",
                                               row, " has ", cached[row], " cached tokens"));
        }
        if (!group.rows.empty()) groups_.push_back(std::move(group));
    }

    // Each row must have the same pages for its shared tokens as the row that reads the most.
    static void check_pages(const Group& group, const PageTable& table,
                            const std::vector<std::uint32_t>& first, std::int64_t page_size) {
        const auto first_of = [&](std::int64_t row) {
            return std::int64_t{first[static_cast<std::size_t>(row)]};
        };
        const std::int64_t reader = *std::min_element(
            group.rows.begin(), group.rows.end(),
            [&](std::int64_t a, std::int64_t b) { return first_of(a) < first_of(b); });
        const std::uint32_t* read = table.pages + reader * table.row_stride;
        const std::int64_t columns = (group.tokens - 1) / page_size + 1;
        for (const std::int64_t row : group.rows) {
            if (first_of(row) >= group.tokens) continue;
            const std::int64_t column = first_of(row) / page_size;
            const std::uint32_t* held = table.pages + row * table.row_stride + column;
            const auto [page, other] = std::mismatch(read + column, read + columns, held);
            if (page == read + columns) continue;
            throw pybind11::value_error(
                concat(group.name, ": rows ", reader, " and ", row, " hold pages ", *page, " and ",
                       *other, " in column ", page - read, "; call shared_prefixes after fetch"));
        }
    }

    // Sorts the groups, the longest first. If two groups have a common row, the rows of the longer
    // group must all be rows of the shorter group.
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
