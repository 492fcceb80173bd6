// SPDX-License-Identifier: Apache-2.0
// Checks slots, the tokens that are written to them, and the lengths of a batch.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "array_args.hpp"
#include "batch_args.hpp"
#include "kvcore/paged_batch.hpp"

namespace kvcore::python {

/// Checks a vector of slots. Returns true if the slots are int64.
inline bool check_slots(const pybind11::array& slots, const char* name) {
    check_rank(slots, name, "(tokens,)", 1);
    const bool is_wide = pybind11::isinstance<pybind11::array_t<std::int64_t>>(slots);
    if (!is_wide && !pybind11::isinstance<pybind11::array_t<std::int32_t>>(slots)) {
        throw pybind11::type_error(
            concat(name, " has dtype ", text(slots.dtype()), ", must be int64 or int32"));
    }
    if (!has_dense_rows(slots)) {
        throw pybind11::value_error(concat(name, " is strided; make it contiguous"));
    }
    check_aligned(slots, name);
    return is_wide;
}

/// ValueError for too few entries, or if their dtype cannot hold the slots of all pages.
inline void check_room(const pybind11::array& out, bool is_wide, std::int64_t tokens,
                       std::int64_t pages, std::int64_t page_size) {
    if (out.size() < tokens) {
        throw pybind11::value_error(
            concat("out has ", out.size(), " entries for ", tokens, " tokens"));
    }
    if (!is_wide && pages > (std::int64_t{1} << 31) / page_size) {
        throw pybind11::value_error(concat("out has dtype int32, which does not hold the slots of ",
                                           pages, " pages of ", page_size, " tokens; pass int64"));
    }
}

/// ValueError for a slot of the pool that is named twice. Uses a set with room for twice the slots.
template <class Slot>
void check_named_once(const Slot* slots, std::int64_t n, std::int64_t capacity) {
    std::size_t size = 4;
    while (size < 2 * static_cast<std::size_t>(n)) size *= 2;
    std::vector<Slot> seen(size, Slot{-1});
    for (std::int64_t i = 0; i < n; ++i) {
        const Slot slot = slots[i];
        if (slot < 0 || slot >= capacity) continue;
        std::size_t at = static_cast<std::uint64_t>(slot) * 0x9e3779b97f4a7c15ULL >> 20;
        for (at %= size; seen[at] != -1; at = (at + 1) % size) {
            if (seen[at] != slot) continue;
            throw pybind11::value_error(
                concat("slots[", i, "] is ", slot, ", which is named twice; name each slot once"));
        }
        seen[at] = slot;
    }
}

/// Tokens [tokens, heads, dim] and the pool [pages, page_size, heads, dim] that they go to.
struct SlotTarget {
    pybind11::array pool;
    pybind11::array tokens;

    void check(std::int64_t n) const {
        check_rank(pool, "pool", "(pages, page_size, heads, dim)", 4);
        check_numbers(pool, "the pool");
        check_rank(tokens, "tokens", "(tokens, heads, dim)", 3);
        if (tokens.shape(0) < n || tokens.shape(1) != pool.shape(2) ||
            tokens.shape(2) != pool.shape(3)) {
            throw pybind11::value_error(concat("tokens have shape ", shape_text(tokens),
                                               ", must be at least (", n, ", ", pool.shape(2), ", ",
                                               pool.shape(3), ")"));
        }
        if (!tokens.dtype().equal(pool.dtype())) {
            throw pybind11::type_error(concat("tokens have dtype ", text(tokens.dtype()),
                                              ", the pool has ", text(pool.dtype()),
                                              "; convert them first"));
        }
        if (pool.shape(1) < 1) throw pybind11::value_error("the pool's pages have no tokens");
        if (!has_dense_rows(pool) || !has_dense_rows(tokens)) {
            throw pybind11::value_error("the last axis of pool and tokens must be contiguous");
        }
        if (!pool.writeable()) {
            throw pybind11::value_error("the pool is read-only; pass a writable array");
        }
        check_own_memory(pool, "the pool");
        if (is_overlapping(pool, tokens)) {
            throw pybind11::value_error(
                "pool and tokens overlap in memory; pass a copy of the tokens");
        }
    }
    /// The tensor as one-byte elements.
    [[nodiscard]] PagedTensor<std::byte> tensor() {
        return {static_cast<std::byte*>(pool.mutable_data()),
                DType::kInt8,
                pool.shape(3) * pool.itemsize(),
                pool.strides(0),
                pool.strides(1),
                pool.strides(2),
                {}};
    }
    [[nodiscard]] TokenRows<const std::byte> rows() const {
        return {static_cast<const std::byte*>(tokens.data()), tokens.strides(0), tokens.strides(1)};
    }
};

/// The slot targets of K, or of K and V, for at least `n` tokens.
[[nodiscard]] inline std::vector<SlotTarget> slot_targets(const pybind11::list& pools,
                                                          const pybind11::list& tokens,
                                                          std::int64_t n) {
    if (pools.empty() || pools.size() > 2 || pools.size() != tokens.size()) {
        throw pybind11::value_error("pools and tokens must be lists with K, or with K and V");
    }
    std::vector<SlotTarget> targets;
    for (std::size_t i = 0; i < pools.size(); ++i) {
        targets.push_back({pools[i].cast<pybind11::array>(), tokens[i].cast<pybind11::array>()});
        targets.back().check(n);
        const pybind11::array& pool = targets.back().pool;
        const pybind11::array& first = targets.front().pool;
        if (!std::equal(pool.shape(), pool.shape() + 3, first.shape())) {
            throw pybind11::value_error("the pools of K and V differ in pages, page size or heads");
        }
        if (i > 0) check_no_common_memory(pool, "the pool of V", first, "the pool of K");
    }
    return targets;
}

inline const std::uint32_t* uint32_data(const pybind11::array& array, const char* name,
                                        pybind11::ssize_t size) {
    check_rank(array, name, "(rows,)", 1);
    check_uint32(array, name);
    if (array.size() == size) return static_cast<const std::uint32_t*>(array.data());
    throw pybind11::value_error(concat(name, " has ", array.size(), " entries, must have ", size));
}

/// Returns the flags of rows that grow, or nullptr if all rows grow.
[[nodiscard]] inline const std::uint8_t* active_rows(const pybind11::object& active,
                                                     pybind11::ssize_t batch) {
    if (active.is_none()) return nullptr;
    const auto flags = active.cast<pybind11::array>();
    if (!pybind11::isinstance<pybind11::array_t<bool>>(flags) || flags.ndim() != 1 ||
        flags.size() != batch || !has_dense_rows(flags)) {
        throw pybind11::value_error(concat("active is ", text(flags.dtype()), " ",
                                           shape_text(flags), ", must be bool (", batch,
                                           ",) and contiguous"));
    }
    return static_cast<const std::uint8_t*>(flags.data());
}

/// ValueError if the new lengths would overwrite arrays that are read.
inline void check_apart(const pybind11::array& lengths, const pybind11::array& offsets,
                        const pybind11::array& out) {
    const bool is_shifted = out.data() != lengths.data() && is_overlapping(out, lengths);
    if (is_shifted || is_overlapping(out, offsets)) {
        throw pybind11::value_error(
            "out overlaps lengths or row_offsets; pass lengths itself or a separate array");
    }
}

/// A table uint32 [rows, columns] and the arrays with an entry for each of its rows.
/// `compact_table` writes to them; lengths and row offsets may be None.
class BatchRowsArgs {
   public:
    BatchRowsArgs(const pybind11::array& table, const pybind11::object& lengths,
                  const pybind11::object& offsets)
        : written_{{table, "lookup_table"}} {
        check_rank(table, "lookup_table", "(rows, columns)", 2);
        check_uint32(table, "lookup_table");
        check_own_memory(table, "lookup_table");
        add(lengths, "cache_lengths", table.shape(0));
        add(offsets, "row_offsets", table.shape(0) + 1);
        rows_ = {static_cast<std::uint32_t*>(written_[0].first.mutable_data()),
                 table.strides(0) / static_cast<pybind11::ssize_t>(sizeof(std::uint32_t)),
                 table.shape(1),
                 table.shape(0),
                 lengths.is_none() ? nullptr : data_of(1),
                 offsets.is_none() ? nullptr : data_of(written_.size() - 1)};
    }
    [[nodiscard]] const BatchRows& rows() const noexcept { return rows_; }

    /// Returns the number of rows that are kept. Checks the rows if they are readable; rows on a
    /// GPU are not readable.
    [[nodiscard]] std::int64_t check_kept(const pybind11::array& kept, bool are_readable) const {
        check_rank(kept, "kept", "(rows,)", 1);
        check_uint32(kept, "kept");
        for (const auto& [array, name] : written_) {
            check_no_common_memory(array, name, kept, "kept");
        }
        const std::int64_t n = kept.shape(0);
        if (n > rows_.rows) {
            throw pybind11::value_error(concat("kept names ", n, " rows, the table has ",
                                               rows_.rows, "; name each kept row once"));
        }
        if (are_readable) check_named(static_cast<const std::uint32_t*>(kept.data()), n);
        return n;
    }

   private:
    void add(const pybind11::object& given, const char* name, pybind11::ssize_t size) {
        if (given.is_none()) return;
        const auto array = given.cast<pybind11::array>();
        uint32_data(array, name, size);
        for (const auto& [other, its_name] : written_) {
            check_no_common_memory(array, name, other, its_name);
        }
        written_.emplace_back(array, name);
    }
    [[nodiscard]] std::uint32_t* data_of(std::size_t i) {
        return static_cast<std::uint32_t*>(written_[i].first.mutable_data());
    }
    void check_named(const std::uint32_t* kept, std::int64_t n) const {
        for (std::int64_t i = 0; i < n && kept[i] != kNoPage; ++i) {
            if (kept[i] >= rows_.rows) {
                throw pybind11::index_error(
                    concat("kept[", i, "] is ", kept[i], ", the table has ", rows_.rows, " rows"));
            }
            if (i > 0 && kept[i] <= kept[i - 1]) {
                throw pybind11::value_error(concat("kept[", i, "] is ", kept[i],
                                                   ", must be above the entry before, ",
                                                   kept[i - 1], "; sort the rows that stay"));
            }
        }
    }

    std::vector<std::pair<pybind11::array, const char*>> written_;
    BatchRows rows_{};
};

}  // namespace kvcore::python
