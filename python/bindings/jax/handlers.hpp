// SPDX-License-Identifier: Apache-2.0
// The functions that XLA calls for kvcore.functional in compiled functions, on the CPU.
// kvcore/ops/jax_calls.py is the only caller and defines the operands and results. No handler
// takes the GIL.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace kvcore::jax {

XLA_FFI_Error* append_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* gather_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* attention_handler(XLA_FFI_CallFrame* frame);

}  // namespace kvcore::jax
