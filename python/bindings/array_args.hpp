// SPDX-License-Identifier: Apache-2.0
// Checks input arrays and makes output arrays.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kvcore/errors.hpp"
#include "kvcore/types.hpp"
#include "memory_args.hpp"

namespace kvcore::python {

using detail::concat;

/// Returns the int64 nearest to an object with `__index__`.
[[nodiscard]] inline std::int64_t nearest_int64(pybind11::handle value) {
    namespace py = pybind11;
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!index) throw py::error_already_set();
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow == 0) return number;
    return overflow > 0 ? std::numeric_limits<std::int64_t>::max()
                        : std::numeric_limits<std::int64_t>::min();
}

/// Returns the value of an int argument, or the nearest int64 for a value out of range. Throws
/// TypeError for anything else, bool included.
[[nodiscard]] inline std::int64_t integer_arg(pybind11::handle value, const char* name) {
    if (PyIndex_Check(value.ptr()) == 0 || PyBool_Check(value.ptr())) {
        throw pybind11::type_error(std::string(name) + " is a " + Py_TYPE(value.ptr())->tp_name +
                                   ", must be an int");
    }
    return nearest_int64(value);
}

/// A 1-D int32 argument: tokens or page ids. Takes a list, an int32 or an int64 array, with any
/// stride.
class Int32Arg {
   public:
    /// `name`: the name in error texts. Throws TypeError for other dtypes, ValueError for other
    /// ranks and for numbers beyond int32.
    Int32Arg(const pybind11::object& value, const char* name) {
        namespace py = pybind11;
        if (py::isinstance<py::array>(value)) {
            const auto array = py::reinterpret_borrow<py::array>(value);
            check_array(array, name);
            from_array(array, name);
        } else if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
            for (const py::handle item : value) append(integer(item, name), name);
        } else {
            throw py::type_error(std::string(name) + " is a " + Py_TYPE(value.ptr())->tp_name +
                                 ", must be a list or an int32 or int64 array");
        }
    }

    [[nodiscard]] const std::int32_t* data() const noexcept { return values_.data(); }
    [[nodiscard]] std::int64_t size() const noexcept {
        return static_cast<std::int64_t>(values_.size());
    }

   private:
    static bool is_int32(const pybind11::array& array) {
        return pybind11::isinstance<pybind11::array_t<std::int32_t>>(array);
    }

    static void check_array(const pybind11::array& array, const char* name) {
        namespace py = pybind11;
        if (array.ndim() != 1) {
            throw py::value_error(std::string(name) + " has " + std::to_string(array.ndim()) +
                                  " dimensions, must have 1; pass one row at a time");
        }
        if (!is_int32(array) && !py::isinstance<py::array_t<std::int64_t>>(array)) {
            throw py::type_error(std::string(name) + " has dtype " +
                                 py::str(array.dtype()).cast<std::string>() +
                                 ", must be int32 or int64; convert it with astype(np.int32)");
        }
    }

    void from_array(const pybind11::array& array, const char* name) {
        namespace py = pybind11;
        const bool is_narrow = is_int32(array);
        const char* at = static_cast<const char*>(array.data());
        for (py::ssize_t i = 0; i < array.shape(0); ++i, at += array.strides(0)) {
            if (is_narrow) {
                std::int32_t value;
                std::memcpy(&value, at, sizeof value);
                values_.push_back(value);
            } else {
                std::int64_t value;
                std::memcpy(&value, at, sizeof value);
                append(value, name);
            }
        }
    }

    [[nodiscard]] std::int64_t integer(pybind11::handle item, const char* name) const {
        namespace py = pybind11;
        if (PyIndex_Check(item.ptr()) == 0 || PyBool_Check(item.ptr())) {
            throw py::type_error(std::string(name) + "[" + std::to_string(values_.size()) +
                                 "] is a " + Py_TYPE(item.ptr())->tp_name + ", must be an int");
        }
        return nearest_int64(item);
    }

    void append(std::int64_t value, const char* name) {
        if (value < std::numeric_limits<std::int32_t>::min() ||
            value > std::numeric_limits<std::int32_t>::max()) {
            throw pybind11::value_error(std::string(name) + "[" + std::to_string(values_.size()) +
                                        "] is " + std::to_string(value) + ", must fit in int32");
        }
        values_.push_back(static_cast<std::int32_t>(value));
    }

    std::vector<std::int32_t> values_;
};

/// Returns a new int32 array [n] with the ids.
[[nodiscard]] inline pybind11::array_t<std::int32_t> id_array(const std::vector<BlockId>& ids) {
    return pybind11::array_t<std::int32_t>(static_cast<pybind11::ssize_t>(ids.size()), ids.data());
}

/// Returns str() of an object, for error texts.
[[nodiscard]] inline std::string text(const pybind11::handle& value) {
    return pybind11::str(value).cast<std::string>();
}

[[nodiscard]] inline std::string shape_text(const pybind11::array& array) {
    return text(array.attr("shape"));
}

/// ValueError unless the array has `rank` axes; `axes` lists them: "(rows, columns)".
inline void check_rank(const pybind11::array& array, const char* name, const char* axes,
                       pybind11::ssize_t rank) {
    if (array.ndim() == rank) return;
    throw pybind11::value_error(concat(name, " has shape ", shape_text(array), ", must be ", axes));
}

/// TypeError for another dtype.
inline void check_int32(const pybind11::array& array, const char* name) {
    if (pybind11::isinstance<pybind11::array_t<std::int32_t>>(array)) return;
    throw pybind11::type_error(concat(name, " has dtype ", text(array.dtype()),
                                      ", must be int32; convert it with astype(np.int32)"));
}

/// Returns a new array with the same elements in C order.
[[nodiscard]] inline pybind11::array copy_of(const pybind11::array& array) {
    return array.attr("copy")("C");
}

/// Returns the number of threads that a kernel may use. TypeError for a non-int, ValueError below 1
/// or beyond int32.
[[nodiscard]] inline int threads_of(pybind11::handle given) {
    constexpr int kMost = std::numeric_limits<int>::max();
    const std::int64_t threads = integer_arg(given, "threads");
    if (threads >= 1 && threads <= kMost) return static_cast<int>(threads);
    const std::string bound = threads < 1 ? "at least 1" : concat("at most ", kMost);
    throw pybind11::value_error(
        concat("threads is ", pybind11::str(given).cast<std::string>(), ", must be ", bound));
}

/// Returns a flag. TypeError for a value that is neither a bool nor a numpy bool.
[[nodiscard]] inline bool flag_arg(pybind11::handle given, const char* name) {
    if (PyBool_Check(given.ptr())) return given.ptr() == Py_True;
    const std::string kind = Py_TYPE(given.ptr())->tp_name;
    if (kind == "numpy.bool" || kind == "numpy.bool_") return PyObject_IsTrue(given.ptr()) == 1;
    throw pybind11::type_error(concat(name, " is a ", kind, ", must be a bool"));
}

/// Returns true if the elements of the last axis follow each other without gaps.
[[nodiscard]] inline bool has_dense_rows(const pybind11::array& array) {
    const pybind11::ssize_t last = array.ndim() - 1;
    return array.size() == 0 || array.shape(last) <= 1 || array.strides(last) == array.itemsize();
}

/// TypeError for elements that are Python objects, because the bindings count no references to
/// them.
inline void check_numbers(const pybind11::array& array, const std::string& name) {
    constexpr std::uint64_t kHoldsObjects = 1;  // NPY_ITEM_REFCOUNT
    if ((array.dtype().flags() & kHoldsObjects) == 0) return;
    throw pybind11::type_error(
        concat(name, " has dtype ", text(array.dtype()), ", must be a dtype of numbers"));
}

/// ValueError if elements are not aligned to their size.
inline void check_aligned(const pybind11::array& array, const char* name) {
    if ((array.flags() & pybind11::detail::npy_api::NPY_ARRAY_ALIGNED_) != 0) return;
    throw pybind11::value_error(concat(name, " is not aligned in memory; pass a copy"));
}

}  // namespace kvcore::python
