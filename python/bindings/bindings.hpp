// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

void bind_attention(pybind11::module_& module);
void bind_block_pool(pybind11::module_& module);
void bind_cache_config(pybind11::module_& module);
void bind_disk_store(pybind11::module_& module);
void bind_host_store(pybind11::module_& module);
void bind_page_copier(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_nvfp4(pybind11::module_& module);
void bind_page_bytes(pybind11::module_& module);
void bind_paged_batch(pybind11::module_& module);
void bind_paged_rows(pybind11::module_& module);
void bind_slots(pybind11::module_& module);
void bind_transfer(pybind11::module_& module);
