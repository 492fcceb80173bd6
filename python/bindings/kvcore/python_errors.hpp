// SPDX-License-Identifier: Apache-2.0
// Translates C++ exceptions to the Python classes of kvcore.errors, for both extension modules.
// Needs Python.h; ships with the wheel for modules that cimport kvcore.
#pragma once

#include <Python.h>

#include <exception>
#include <new>
#include <stdexcept>

#include "kvcore/errors.hpp"

namespace kvcore::python {

/// Raises `type(text)`. `.row` is the row of a batch, if the error belongs to a row.
inline void set_error(PyObject* type, const std::exception& error) {
    PyObject* raised = PyObject_CallFunction(type, "s", error.what());
    if (raised == nullptr) return;
    if (const auto* batch = dynamic_cast<const BatchRow*>(&error)) {
        PyObject* row = PyLong_FromLongLong(batch->row());
        if (row == nullptr || PyObject_SetAttrString(raised, "row", row) != 0) PyErr_Clear();
        Py_XDECREF(row);
    }
    PyErr_SetObject(type, raised);
    Py_DECREF(raised);
}

/// The same with the class `kvcore.errors.<name>`.
inline void set_error(const char* name, const std::exception& error) {
    PyObject* module = PyImport_ImportModule("kvcore.errors");
    if (module == nullptr) return;
    PyObject* type = PyObject_GetAttrString(module, name);
    Py_DECREF(module);
    if (type == nullptr) return;
    set_error(type, error);
    Py_DECREF(type);
}

/// Sets the Python error for the exception that is handled. Call it in a catch block.
inline void translate_exception() {
    try {
        throw;
    } catch (const InsufficientBlocksError& error) {
        set_error("InsufficientBlocksError", error);
    } catch (const RequestNotFoundError& error) {
        set_error("RequestNotFoundError", error);
    } catch (const CapacityError& error) {
        set_error("CapacityError", error);
    } catch (const InvalidHandleError& error) {
        set_error("InvalidHandleError", error);
    } catch (const PendingTransfersError& error) {
        set_error("PendingTransfersError", error);
    } catch (const Error& error) {
        set_error("KVCacheError", error);
    } catch (const IntegrityError& error) {
        set_error(PyExc_AssertionError, error);
    } catch (const std::invalid_argument& error) {
        set_error(PyExc_ValueError, error);
    } catch (const std::out_of_range& error) {
        set_error(PyExc_IndexError, error);
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        set_error(PyExc_RuntimeError, error);
    }
}

}  // namespace kvcore::python
