# SPDX-License-Identifier: Apache-2.0
"""kvcore as the KV cache manager of vLLM.

vLLM finds `register` by its entry point ``vllm.general_plugins`` and calls it in every process,
before it builds its scheduler. Nothing changes unless ``KVCORE_VLLM=1`` is set. See
``docs/vllm.md``.
"""

from __future__ import annotations

import logging
import os

from kvcore.integrations.gate import is_on, is_served

__all__ = ["SERVED_VERSIONS", "register"]

#: The releases with which the adapter was tested; a build such as 0.33.0+cpu counts as its release.
SERVED_VERSIONS = ("0.32.0", "0.33.0")

#: The environment variable that switches the adapter on.
SWITCH = "KVCORE_VLLM"

logger = logging.getLogger("vllm.kvcore")


def register() -> None:
    """Make vLLM's scheduler use kvcore's KV cache manager, if ``KVCORE_VLLM=1`` is set.

    Raises
    ------
    ValueError
        ``KVCORE_VLLM`` is neither a word for on nor a word for off.

    Notes
    -----
    With another release of vLLM, or after any failure, vLLM keeps its own manager. One log line
    gives the reason, and the switch is off for the processes that this process starts. May be
    called repeatedly.
    """
    if not is_on(SWITCH):
        return
    try:
        reason = _rebind()
    except Exception as error:  # noqa: BLE001 - after any error, vLLM runs without kvcore
        reason = f"kvcore failed with {type(error).__name__}: {error}"
    if reason is not None:
        os.environ[SWITCH] = "0"
        logger.warning("KV cache manager: vLLM's own, not kvcore's: %s", reason)


def _rebind() -> str | None:
    """Replace vLLM's manager; return None, or the reason why nothing was changed."""
    import vllm

    if not is_served(vllm.__version__, SERVED_VERSIONS):
        return f"kvcore serves vLLM {' and '.join(SERVED_VERSIONS)}, and this is {vllm.__version__}"
    from kvcore.integrations.vllm.choice import rebind

    return rebind()
