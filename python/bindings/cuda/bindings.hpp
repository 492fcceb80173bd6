// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

void bind_cuda_arrays(pybind11::module_& module);
void bind_cuda_batch(pybind11::module_& module);
void bind_cuda_conversions(pybind11::module_& module);
void bind_cuda_emulation(pybind11::module_& module);
void bind_cuda_memory(pybind11::module_& module);
void bind_cuda_nvfp4(pybind11::module_& module);
void bind_cuda_pages(pybind11::module_& module);
void bind_cuda_rows(pybind11::module_& module);
void bind_cuda_simulation(pybind11::module_& module);
void bind_cuda_slots(pybind11::module_& module);
void bind_cuda_streams(pybind11::module_& module);
void bind_cuda_transfer(pybind11::module_& module);
