// SPDX-License-Identifier: Apache-2.0
// What XLA calls for kvcore.functional in compiled functions, on the CPU: operands and results are
// those of kvcore/compat/jax_calls.py, which is the only caller. None takes the GIL.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace kvcore::jax {

XLA_FFI_Error* append_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* gather_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* attention_handler(XLA_FFI_CallFrame* frame);

}  // namespace kvcore::jax
