// SPDX-License-Identifier: Apache-2.0
// Keys and buffers of pages that are written to a store or read from it.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/disk_lower_store.hpp"
#include "kvcore/disk_store.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/store_moves.hpp"

namespace kvcore::python {

/// Returns a key. TypeError for anything but bytes, ValueError for another length.
[[nodiscard]] inline StoreKey key_arg(pybind11::handle given, const std::string& name) {
    namespace py = pybind11;
    if (!PyBytes_Check(given.ptr())) {
        throw py::type_error(
            detail::concat(name, " is a ", Py_TYPE(given.ptr())->tp_name, ", must be bytes"));
    }
    StoreKey key;
    const auto size = static_cast<std::size_t>(PyBytes_GET_SIZE(given.ptr()));
    if (size != key.bytes.size()) {
        throw py::value_error(
            detail::concat(name, " has ", size, " bytes, must have ", key.bytes.size()));
    }
    std::memcpy(key.bytes.data(), PyBytes_AS_STRING(given.ptr()), size);
    return key;
}

[[nodiscard]] inline std::vector<StoreKey> keys_arg(const pybind11::sequence& given) {
    std::vector<StoreKey> keys;
    const auto n = static_cast<std::size_t>(pybind11::len(given));
    for (std::size_t i = 0; i < n; ++i) {
        keys.push_back(key_arg(given[i], detail::concat("keys[", i, "]")));
    }
    return keys;
}

/// Memory of a Python object, which stays in place for the lifetime of this object.
///
/// Threads: with the GIL.
class HeldBuffer {
   public:
    /// TypeError for an object without memory, for memory that is not contiguous, and for read-only
    /// memory that is written.
    HeldBuffer(pybind11::handle given, bool is_written, const std::string& name) {
        const int flags = is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(given.ptr(), &view_, flags) == 0) return;
        pybind11::error_already_set cause;
        throw pybind11::type_error(detail::concat(
            name, ": ", pybind11::str(cause.value()).cast<std::string>(), "; pass a contiguous ",
            is_written ? "writable " : "", "array of bytes, such as array.view(np.uint8)"));
    }
    HeldBuffer(HeldBuffer&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
    HeldBuffer& operator=(HeldBuffer&& other) noexcept {
        std::swap(view_, other.view_);
        return *this;
    }
    ~HeldBuffer() {
        if (view_.obj != nullptr) PyBuffer_Release(&view_);
    }
    [[nodiscard]] std::byte* data() const noexcept { return static_cast<std::byte*>(view_.buf); }
    [[nodiscard]] std::int64_t bytes() const noexcept { return view_.len; }

   private:
    Py_buffer view_{};
};

/// Returns the rows of an array uint8 [n, bytes], and adds its memory to `held`.
[[nodiscard]] inline TierRows rows_arg(const pybind11::object& given, const char* name,
                                       std::vector<HeldBuffer>& held) {
    namespace py = pybind11;
    if (!py::isinstance<py::array_t<std::uint8_t>>(given) || given.attr("ndim").cast<int>() != 2) {
        throw py::type_error(detail::concat(name, " must be an array uint8 [n, bytes]"));
    }
    const auto array = py::reinterpret_borrow<py::array>(given);
    held.emplace_back(given, true, name);
    return {held.back().data(), array.shape(0), array.shape(1)};
}

/// The pages of a batch and the memory of their parts.
template <class Byte>
class BatchArg {
   public:
    /// `buffers`: for each key a buffer, which is part 0, or a list of buffers by part, with None
    /// for absent parts.
    BatchArg(const pybind11::sequence& keys, const pybind11::sequence& buffers) {
        namespace py = pybind11;
        const std::vector<StoreKey> all = keys_arg(keys);
        if (py::len(buffers) != all.size()) {
            throw py::value_error(detail::concat(all.size(), " keys and ", py::len(buffers),
                                                 " buffers; give one buffer for each key"));
        }
        for (std::size_t i = 0; i < all.size(); ++i) {
            pages.push_back({all[i], {}});
            add(buffers[i], detail::concat("buffers[", i, "]"));
        }
        if constexpr (!std::is_const_v<Byte>) check_apart();
    }

    std::vector<StorePage<Byte>> pages;
    std::vector<HeldBuffer> held;

   private:
    void add(const pybind11::object& given, const std::string& name) {
        namespace py = pybind11;
        if (!py::isinstance<py::list>(given) && !py::isinstance<py::tuple>(given)) {
            add_part(0, given, name);
            return;
        }
        const auto parts = py::reinterpret_borrow<py::sequence>(given);
        const auto n = static_cast<std::int32_t>(
            std::min<std::size_t>(py::len(parts), static_cast<std::size_t>(kMaxStoreParts) + 1));
        for (std::int32_t part = 0; part < n; ++part) {
            const py::object buffer = parts[static_cast<std::size_t>(part)];
            if (!buffer.is_none()) add_part(part, buffer, detail::concat(name, "[", part, "]"));
        }
    }
    void add_part(std::int32_t part, const pybind11::object& buffer, const std::string& name) {
        held.emplace_back(buffer, !std::is_const_v<Byte>, name);
        pages.back().parts.push_back({part, held.back().data(), held.back().bytes()});
    }
    // Checks that no buffer overlaps another: a page would overwrite a page that was checked
    // before.
    void check_apart() const {
        std::vector<std::pair<const std::byte*, const std::byte*>> extents;
        for (const HeldBuffer& each : held) {
            extents.emplace_back(each.data(), each.data() + each.bytes());
        }
        std::sort(extents.begin(), extents.end());
        for (std::size_t i = 1; i < extents.size(); ++i) {
            if (extents[i].first >= extents[i - 1].second) continue;
            throw pybind11::value_error(
                "buffers share memory, so that pages would overwrite each other; pass separate "
                "memory for each buffer");
        }
    }
};

/// Pages that are read into rows of arrays: the pages of a host tier, and the slots of its states.
class PlacedBatchArg {
   public:
    /// `places`: for each key a list of (part, row). Part `kStatePart` is a row of `slots`, which
    /// may be None; other parts are rows of `rows`. Both arrays are uint8 [n, bytes].
    PlacedBatchArg(const pybind11::sequence& keys, const pybind11::sequence& places,
                   const pybind11::object& rows, const pybind11::object& slots) {
        namespace py = pybind11;
        const std::vector<StoreKey> all = keys_arg(keys);
        if (py::len(places) != all.size()) {
            throw py::value_error(detail::concat(all.size(), " keys and ", py::len(places),
                                                 " places; give a list for each key"));
        }
        held.reserve(2);
        const TierRows pages = rows_arg(rows, "rows", held);
        const TierRows states = slots.is_none() ? TierRows{} : rows_arg(slots, "slots", held);
        for (std::size_t i = 0; i < all.size(); ++i) {
            this->pages.push_back({all[i], {}});
            for (const py::handle place : py::list(places[i])) {
                const auto [part, row] = place_of(place, i);
                add(part, part == kStatePart ? states : pages, row);
            }
        }
        check_apart();
    }

    std::vector<PageToRead> pages;
    std::vector<HeldBuffer> held;

   private:
    static std::pair<std::int32_t, std::int64_t> place_of(pybind11::handle given, std::size_t i) {
        try {
            return given.cast<std::pair<std::int32_t, std::int64_t>>();
        } catch (const pybind11::cast_error&) {
            throw pybind11::type_error(
                detail::concat("places[", i, "] must be a list of (part, row), two int each"));
        }
    }
    void add(std::int32_t part, const TierRows& rows, std::int64_t row) {
        if (row < 0 || row >= rows.n) {
            throw pybind11::index_error(
                detail::concat("part ", part, " goes to row ", row, ", must be 0 to ", rows.n - 1));
        }
        pages.back().parts.push_back({part, rows.data + row * rows.bytes, rows.bytes});
    }
    void check_apart() const {
        std::vector<const std::byte*> begins;
        for (const PageToRead& page : pages) {
            for (const auto& part : page.parts) begins.push_back(part.data);
        }
        std::sort(begins.begin(), begins.end());
        if (std::adjacent_find(begins.begin(), begins.end()) == begins.end()) return;
        throw pybind11::value_error(
            "two parts go to the same row and would overwrite each other; use a row per part");
    }
};

}  // namespace kvcore::python
