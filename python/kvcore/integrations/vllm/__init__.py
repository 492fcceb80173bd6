# SPDX-License-Identifier: Apache-2.0
"""kvcore as the KV cache manager of vLLM 0.33.

vLLM finds `register` by its entry point ``vllm.general_plugins`` and calls it in every process,
before it builds its scheduler. Nothing changes unless ``KVCORE_VLLM=1`` is set. See
``docs/vllm.md``.
"""

from __future__ import annotations

import logging
import os

__all__ = ["SERVED_VERSIONS", "register"]

#: The releases whose scheduler the adapter was written for.
SERVED_VERSIONS = "0.33."

logger = logging.getLogger("vllm.kvcore")


def register() -> None:
    """Have vLLM's scheduler make its KV cache managers of kvcore, where ``KVCORE_VLLM=1`` says so.

    Notes
    -----
    Another release of vLLM keeps its own manager, which the log says. May be called repeatedly.
    """
    if os.environ.get("KVCORE_VLLM") != "1":
        return
    import vllm

    if not vllm.__version__.startswith(SERVED_VERSIONS):
        logger.warning(
            "KVCORE_VLLM=1, but kvcore serves vLLM %sx and this is %s: vLLM keeps its own manager",
            SERVED_VERSIONS,
            vllm.__version__,
        )
        return
    from kvcore.integrations.vllm.choice import rebind

    rebind()
