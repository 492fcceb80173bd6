# SPDX-License-Identifier: Apache-2.0
# Only where jaxlib's headers were found when kvcore was built.
from typing import Any

#: For ``jax.ffi.register_ffi_target``: a capsule for each name.
handlers: dict[str, Any]
