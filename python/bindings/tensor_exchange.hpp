// SPDX-License-Identifier: Apache-2.0
// DLPack's C exchange: the table of functions by which a class of tensors exports its memory,
// without a call of Python code. The structs follow version 1 of its ABI.
#pragma once

#include <Python.h>

#include <cstdint>
#include <new>

namespace kvcore::python {

constexpr std::int32_t kHostMemory = 1;  // a device_type

/// Valid as long as the tensor exists and keeps its memory.
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
    std::int64_t* strides;  // in elements; null: C order
    std::uint64_t byte_offset;
};

/// Memory for a new tensor, which calls `release` at its end.
struct ManagedTensor {
    std::uint32_t major;
    std::uint32_t minor;
    PyObject* owner;
    void (*release)(ManagedTensor* tensor);
    std::uint64_t flags;
    ExchangedTensor memory;
};

struct TensorExchange {
    static constexpr std::uint32_t kMajor = 1;

    std::uint32_t major;
    std::uint32_t minor;
    TensorExchange* older;
    void* allocate;
    void* take;
    int (*to_object)(ManagedTensor* tensor, PyObject** out);
    int (*view)(void* object, ExchangedTensor* out);  // may be null
    void* stream;
};

/// Returns the table of a class; null, without an error, if the class has no table of this version
/// with `view` and `to_object`.
[[nodiscard]] inline const TensorExchange* tensor_exchange(PyObject* type) {
    PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    void* found =
        capsule == nullptr ? nullptr : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule);  // the table lives as long as the process
    PyErr_Clear();
    const auto* table = static_cast<const TensorExchange*>(found);
    while (table != nullptr && table->major != TensorExchange::kMajor) table = table->older;
    const bool is_whole = table != nullptr && table->view != nullptr && table->to_object != nullptr;
    return is_whole ? table : nullptr;
}

/// Returns true if a tensor has host memory, and stores its address. Returns false, without an
/// error, if the table cannot give it.
[[nodiscard]] inline bool view_host_memory(const TensorExchange& table, PyObject* tensor,
                                           ExchangedTensor& out) {
    if (table.view(tensor, &out) != 0) {
        PyErr_Clear();  // another way of access raises it
        return false;
    }
    return out.device_type == kHostMemory && out.lanes == 1 && out.data != nullptr &&
           out.strides != nullptr;
}

/// An array of numpy as a tensor: `memory` points to `shape` and `strides`.
struct ArrayTensor : ManagedTensor {
    static constexpr int kMostAxes = 16;

    std::int64_t shape[kMostAxes];
    std::int64_t strides[kMostAxes];

    /// The last reference to the tensor may end on any thread, and after the interpreter.
    static void end(ManagedTensor* tensor) {
        if (Py_IsInitialized() != 0) {
            const PyGILState_STATE state = PyGILState_Ensure();
            Py_DECREF(tensor->owner);
            PyGILState_Release(state);
        }
        delete static_cast<ArrayTensor*>(tensor);
    }
};

/// Returns a new tensor over the data of `memory` in C order, with its shape and dtype. The tensor
/// keeps `owner` alive. Returns null and sets an error if memory runs out or the table refuses the
/// dtype. The table does not report whether it has released a refused tensor, so its memory leaks.
[[nodiscard]] inline PyObject* tensor_over(const TensorExchange& table, PyObject* owner,
                                           const ExchangedTensor& memory) {
    auto* made = new (std::nothrow) ArrayTensor;
    if (made == nullptr) return PyErr_NoMemory();
    Py_INCREF(owner);
    static_cast<ManagedTensor&>(*made) = {TensorExchange::kMajor,
                                          0,
                                          owner,
                                          &ArrayTensor::end,
                                          0,
                                          {memory.data, kHostMemory, 0, memory.ndim, memory.code,
                                           memory.bits, 1, made->shape, made->strides, 0}};
    std::int64_t stride = 1;
    for (int axis = memory.ndim - 1; axis >= 0; --axis) {
        made->shape[axis] = memory.shape[axis];
        made->strides[axis] = stride;
        stride *= memory.shape[axis];
    }
    PyObject* tensor = nullptr;
    return table.to_object(made, &tensor) == 0 ? tensor : nullptr;
}

/// Returns a method without arguments; null, without an error, if the name is anything else.
[[nodiscard]] inline PyCFunction plain_method(PyObject* type, const char* name) {
    PyObject* found = PyObject_GetAttrString(type, name);
    PyCFunction method = nullptr;
    if (found != nullptr && Py_IS_TYPE(found, &PyMethodDescr_Type)) {
        const PyMethodDef& made = *reinterpret_cast<PyMethodDescrObject*>(found)->d_method;
        if (made.ml_flags == METH_NOARGS) method = made.ml_meth;
    }
    Py_XDECREF(found);  // its table lives as long as the class
    PyErr_Clear();
    return method;
}

/// The same for an attribute.
[[nodiscard]] inline getter plain_getter(PyObject* type, const char* name) {
    PyObject* found = PyObject_GetAttrString(type, name);
    getter get = nullptr;
    if (found != nullptr && Py_IS_TYPE(found, &PyGetSetDescr_Type)) {
        const PyGetSetDef& made = *reinterpret_cast<PyGetSetDescrObject*>(found)->d_getset;
        if (made.closure == nullptr) get = made.get;
    }
    Py_XDECREF(found);
    PyErr_Clear();
    return get;
}

/// The methods of a class of tensors that is written in C, called without a lookup by name.
class TensorMethods {
   public:
    TensorMethods() = default;
    explicit TensorMethods(PyObject* type)
        : storage_(plain_method(type, "untyped_storage")),
          is_negated_(plain_method(type, "is_neg")),
          expects_gradient_(plain_getter(type, "requires_grad")) {}

    [[nodiscard]] bool is_whole() const {
        return storage_ != nullptr && is_negated_ != nullptr && expects_gradient_ != nullptr;
    }
    /// Returns a new reference to the owner of the memory. The owner may be None.
    [[nodiscard]] PyObject* storage_of(PyObject* tensor) const {
        PyObject* found = storage_(tensor, nullptr);
        if (found != nullptr) return found;
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    /// Returns true if the floats expect no gradient and no bit marks them as negated.
    [[nodiscard]] bool are_plain_floats(PyObject* tensor) const {
        return is_false(expects_gradient_(tensor, nullptr)) &&
               is_false(is_negated_(tensor, nullptr));
    }

   private:
    [[nodiscard]] static bool is_false(PyObject* answer) {
        if (answer == nullptr) PyErr_Clear();  // another way of access raises it
        Py_XDECREF(answer);
        return answer == Py_False;
    }

    PyCFunction storage_ = nullptr;
    PyCFunction is_negated_ = nullptr;
    getter expects_gradient_ = nullptr;
};

}  // namespace kvcore::python
