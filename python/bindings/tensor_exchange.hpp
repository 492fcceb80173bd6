// SPDX-License-Identifier: Apache-2.0
// DLPack's C exchange: the table of functions by which a class of tensors shows its memory, without
// a call of Python code. The structs are those of its ABI, version 1.
#pragma once

#include <Python.h>

#include <cstdint>

namespace kvcore::python {

/// Valid for as long as the tensor is there and nobody gives it other memory.
struct ExchangedTensor {
    enum Code : std::uint8_t {
        kInt = 0,
        kUInt = 1,
        kFloat = 2,
        kBFloat = 4,
        kBool = 6,
        kFloat8E4M3FN = 10,
        kFloat8E5M2 = 12
    };

    void* data;
    std::int32_t device_type;
    std::int32_t device_id;
    std::int32_t ndim;
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
    std::int64_t* shape;
    std::int64_t* strides;  // in elements; null: in C order
    std::uint64_t byte_offset;
};

struct TensorExchange {
    static constexpr std::uint32_t kMajor = 1;

    std::uint32_t major;
    std::uint32_t minor;
    TensorExchange* older;
    void* allocate;
    void* take;
    void* to_object;
    int (*view)(void* object, ExchangedTensor* out);  // may be null
    void* stream;
};

/// The table of a class; null, without an error, where it has none of this version that views.
[[nodiscard]] inline const TensorExchange* tensor_exchange(PyObject* type) {
    PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    void* found =
        capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule);  // the table lives as long as the process
    PyErr_Clear();
    const auto* table = static_cast<const TensorExchange*>(found);
    while (table != nullptr && table->major != TensorExchange::kMajor) table = table->older;
    return table != nullptr && table->view != nullptr ? table : nullptr;
}

/// Whether a tensor has host memory, and where; false, without an error, where that cannot be told
/// this way.
[[nodiscard]] inline bool view_host_memory(const TensorExchange& table, PyObject* tensor,
                                           ExchangedTensor& out) {
    constexpr std::int32_t kHost = 1;
    if (table.view(tensor, &out) != 0) {
        PyErr_Clear();  // who asks in another way is told why
        return false;
    }
    return out.device_type == kHost && out.lanes == 1 && out.data != nullptr &&
           out.strides != nullptr;
}

}  // namespace kvcore::python
