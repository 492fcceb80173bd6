// SPDX-License-Identifier: Apache-2.0
// Streams, and arrays on GPUs in the form that the checks of the other bindings take.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>

#include "array_args.hpp"
#include "kvcore/cuda.hpp"
#include "kvcore/errors.hpp"
#include "page_ids.hpp"

namespace kvcore::python {

/// KVCacheError for a status other than success. `what`: the call, for the error text.
template <class... Parts>
void check_status(cuda::Status status, const Parts&... what) {
    if (status == cuda::kSuccess) return;
    throw Error(concat(what..., ": ", cuda::status_text(status)));
}

/// Returns the pointer of an address that Python passes.
[[nodiscard]] inline void* pointer_of(std::uintptr_t address) noexcept {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): that is how libraries hand addresses to each other
    return reinterpret_cast<void*>(address);
}

/// Calls a function without the GIL and returns its result. No driver call is made under the GIL: a
/// full queue, or the wait of another thread, would stop all Python threads. Never throws, so that
/// destructors can use it.
template <class Call>
auto without_gil(const Call& call) noexcept {
    struct Unlocked {
        PyThreadState* state = PyEval_SaveThread();
        Unlocked() = default;
        Unlocked(const Unlocked&) = delete;
        Unlocked& operator=(const Unlocked&) = delete;
        ~Unlocked() { PyEval_RestoreThread(state); }
    };
    const Unlocked unlocked;
    return call();
}

/// The process that made an object. After a fork the child has a copy of the object, but the handle
/// in it belongs to the parent: a destructor frees nothing in another process.
class Maker {
   public:
    [[nodiscard]] bool is_this_process() const noexcept { return ::getpid() == process_; }

   private:
    pid_t process_ = ::getpid();
};

/// A stream of a device by CUDA's handle, 0 for the device's legacy default stream.
[[nodiscard]] inline cuda::Stream stream_of(int device, std::uintptr_t handle) noexcept {
    return {device, pointer_of(handle)};
}

/// Returns a cupy array as a numpy array at the same addresses. The checks read its shape, strides
/// and dtype, never its memory. Read-only arrays of `kvcore.cuda` stay read-only, and numpy arrays
/// (over pinned memory) are returned unchanged.
[[nodiscard]] inline pybind11::array seen(const pybind11::handle& given) {
    namespace py = pybind11;
    if (py::isinstance<py::array>(given)) return py::reinterpret_borrow<py::array>(given);
    const auto shape = py::tuple(given.attr("shape"));
    const auto strides = py::tuple(given.attr("strides"));
    std::vector<py::ssize_t> sizes;
    std::vector<py::ssize_t> steps;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
        sizes.push_back(shape[axis].cast<py::ssize_t>());
        steps.push_back(strides[axis].cast<py::ssize_t>());
    }
    const auto address = given.attr("data").attr("ptr").cast<std::uintptr_t>();
    py::array array(py::dtype(py::reinterpret_borrow<py::object>(given.attr("dtype"))), sizes,
                    steps, pointer_of(address), given);
    if (py::hasattr(given, "is_read_only")) {
        py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    }
    return array;
}

/// The same for arrays in lists and tuples, of any depth. Other objects are returned unchanged.
[[nodiscard]] inline pybind11::object seen_all(const pybind11::handle& given) {
    namespace py = pybind11;
    if (given.is_none() || py::isinstance<py::str>(given) || py::isinstance<py::float_>(given)) {
        return py::reinterpret_borrow<py::object>(given);
    }
    const bool is_tuple = py::isinstance<py::tuple>(given);
    if (!is_tuple && !py::isinstance<py::list>(given)) return seen(given);
    py::list found;
    for (const py::handle item : given) found.append(seen_all(item));
    if (is_tuple) return py::tuple(found);
    return std::move(found);
}

/// Numbers that kernels read from the device: a cupy array, whose values are not checked, or a pair
/// of a numpy array, whose values are checked, and its copy on the device.
class DeviceNumbers {
   public:
    explicit DeviceNumbers(const pybind11::object& given)
        : is_readable_(pybind11::isinstance<pybind11::tuple>(given)) {
        if (!is_readable_) {
            checked_ = seen(given);
            device_ = checked_;
            return;
        }
        const auto pair = given.cast<pybind11::tuple>();
        checked_ = pair[0].cast<pybind11::array>();
        device_ = seen(pair[1]);
        if (checked_.nbytes() != device_.nbytes() || !checked_.dtype().equal(device_.dtype())) {
            throw pybind11::value_error("a host array and its copy differ in dtype or size");
        }
    }

    /// The array for the checks of shapes and, if it is readable, of values.
    [[nodiscard]] const pybind11::array& checked() const noexcept { return checked_; }
    [[nodiscard]] bool is_readable() const noexcept { return is_readable_; }
    template <class T>
    [[nodiscard]] const T* data() const {
        return static_cast<const T*>(device_.data());
    }

    /// Returns page ids. TypeError unless they are contiguous int64: a conversion would copy them.
    [[nodiscard]] Ids ids(const char* name) const {
        if (pybind11::isinstance<Ids>(checked_)) return checked_;
        throw pybind11::type_error(concat(name, " has dtype ", text(checked_.dtype()),
                                          ", must be int64 and contiguous on a GPU"));
    }

   private:
    bool is_readable_;
    pybind11::array checked_;
    pybind11::array device_;
};

}  // namespace kvcore::python
