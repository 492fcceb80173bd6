// SPDX-License-Identifier: Apache-2.0
// Checks the page table and the row offsets of a batch.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "array_args.hpp"
#include "kvcore/paged_batch.hpp"

namespace kvcore::python {

/// TypeError for another dtype, ValueError for rows that are not contiguous or not aligned.
inline void check_uint32(const pybind11::array& array, const char* name) {
    if (!pybind11::isinstance<pybind11::array_t<std::uint32_t>>(array)) {
        throw pybind11::type_error(concat(name, " has dtype ", text(array.dtype()),
                                          ", must be uint32; convert it with astype(np.uint32)"));
    }
    if (!has_dense_rows(array)) {
        throw pybind11::value_error(concat(name, " is strided within a row; make it contiguous"));
    }
    check_aligned(array, name);
}

/// The page table and row offsets of a call, checked against each other.
class BatchArgs {
   public:
    /// For offsets on a GPU, which are not readable, only the shape is checked.
    BatchArgs(const pybind11::array& table, const pybind11::array& offsets,
              bool are_readable = true)
        : table_(table), offsets_(offsets) {
        check_rank(table, "lookup_table", "(rows, columns)", 2);
        check_rank(offsets, "row_offsets", "(rows + 1,)", 1);
        check_uint32(table, "lookup_table");
        check_uint32(offsets, "row_offsets");
        if (offsets.shape(0) != table.shape(0) + 1) {
            throw pybind11::value_error(concat("row_offsets has ", offsets.shape(0),
                                               " entries for ", table.shape(0),
                                               " rows, must be one more than the rows"));
        }
        if (are_readable) check_offsets();
    }

    [[nodiscard]] PageTable table() const {
        return {static_cast<const std::uint32_t*>(table_.data()),
                table_.strides(0) / static_cast<pybind11::ssize_t>(sizeof(std::uint32_t)),
                table_.shape(1), table_.shape(0)};
    }
    [[nodiscard]] TokenRanges ranges(const std::uint32_t* begin) const {
        return {begin, offsets_data()};
    }
    [[nodiscard]] const std::uint32_t* offsets_data() const {
        return static_cast<const std::uint32_t*>(offsets_.data());
    }
    [[nodiscard]] std::int64_t total() const { return offsets_data()[table_.shape(0)]; }

    /// Returns the data of cache_lengths, which has an entry for each row.
    [[nodiscard]] const std::uint32_t* cached(const pybind11::array& lengths) const {
        check_rank(lengths, "cache_lengths", "(rows,)", 1);
        check_uint32(lengths, "cache_lengths");
        if (lengths.shape(0) != table_.shape(0)) {
            throw pybind11::value_error(concat("cache_lengths has ", lengths.shape(0),
                                               " entries for ", table_.shape(0), " rows"));
        }
        return static_cast<const std::uint32_t*>(lengths.data());
    }

    /// Returns the arrays of numbers that the kernels of a call read and must not write; `cached`
    /// may be empty.
    [[nodiscard]] std::vector<std::pair<pybind11::array, const char*>> numbers(
        const pybind11::array& cached = {}) const {
        return {{table_, "lookup_table"}, {offsets_, "row_offsets"}, {cached, "cache_lengths"}};
    }

    void check_pages(const TokenRanges& ranges, const pybind11::array& pool) const {
        refuse(find_missing_page(table(), ranges, pool.shape(1), pool.shape(0)), pool);
    }
    /// The same for tokens [first[b], cached[b]) of each row b. Their sum may exceed 2^32.
    void check_cached_pages(const std::vector<std::uint32_t>& first, const std::uint32_t* cached,
                            const pybind11::array& pool) const {
        PageTable row = table();
        row.batch = 1;
        for (std::int64_t b = 0; b < table_.shape(0); ++b, row.pages += row.row_stride) {
            const std::uint32_t* begin = &first[static_cast<std::size_t>(b)];
            const std::uint32_t ends[] = {0, cached[b] - *begin};
            MissingPage missing =
                find_missing_page(row, {begin, ends}, pool.shape(1), pool.shape(0));
            if (missing.row == 0) missing.row = b;
            refuse(missing, pool);
        }
    }

   private:
    void check_offsets() const {
        const auto* values = offsets_data();
        if (values[0] != 0) {
            throw pybind11::value_error(concat("row_offsets[0] is ", values[0], ", must be 0"));
        }
        for (pybind11::ssize_t row = 0; row < table_.shape(0); ++row) {
            if (values[row + 1] >= values[row]) continue;
            throw pybind11::value_error(concat("row_offsets[", row + 1, "] is ", values[row + 1],
                                               ", must not be below the one before, ",
                                               values[row]));
        }
    }
    void refuse(const MissingPage& missing, const pybind11::array& pool) const {
        if (missing.row < 0) return;
        const std::int64_t column = missing.token / pool.shape(1);
        throw pybind11::index_error(
            concat("position ", missing.token, " of row ", missing.row, " has no page: column ",
                   column, " of the lookup table ",
                   column < table_.shape(1)
                       ? concat("is ", missing.entry, ", the pool has ", pool.shape(0), " pages")
                       : concat("does not exist, it has ", table_.shape(1)),
                   "; reserve the position first"));
    }

    const pybind11::array& table_;
    const pybind11::array& offsets_;
};

}  // namespace kvcore::python
