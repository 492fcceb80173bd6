// SPDX-License-Identifier: Apache-2.0
// Checks page ids and lists of page copies.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "array_args.hpp"

namespace kvcore::python {

using Ids = pybind11::array_t<std::int64_t, pybind11::array::c_style>;

/// IndexError for a page outside the pool.
inline void check_page(std::int64_t page, std::int64_t pages) {
    if (page >= 0 && page < pages) return;
    throw pybind11::index_error(concat("page ", page, " is outside the pool of ", pages, " pages"));
}

/// The pages that a list of copies reads and writes.
class PageUses {
   public:
    explicit PageUses(std::int64_t pages) : uses_(static_cast<std::size_t>(pages)) {}

    void read(std::int64_t page) noexcept {
        std::uint8_t& use = uses_[static_cast<std::size_t>(page)];
        use = static_cast<std::uint8_t>(use | kRead);
    }
    /// ValueError if a page is a destination twice.
    void write(std::int64_t page) {
        std::uint8_t& use = uses_[static_cast<std::size_t>(page)];
        if ((use & kWritten) != 0) {
            throw pybind11::value_error(
                concat("pages are copied to page ", page, " twice; name each destination once"));
        }
        use = static_cast<std::uint8_t>(use | kWritten);
    }
    /// ValueError if a page is a source and a destination.
    void check_apart() const {
        for (std::size_t page = 0; page < uses_.size(); ++page) {
            if (uses_[page] != (kRead | kWritten)) continue;
            throw pybind11::value_error(
                concat("page ", page, " is a source and a destination; copy in two calls"));
        }
    }

   private:
    enum : std::uint8_t { kRead = 1, kWritten = 2 };
    std::vector<std::uint8_t> uses_;
};

}  // namespace kvcore::python
