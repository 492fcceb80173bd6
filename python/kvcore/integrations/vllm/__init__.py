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

#: The releases whose scheduler the adapter was tested with; builds such as 0.33.0+cpu included.
SERVED_VERSIONS = ("0.32.0", "0.33.0")

#: The variable of the environment that switches the adapter on.
SWITCH = "KVCORE_VLLM"

logger = logging.getLogger("vllm.kvcore")


def register() -> None:
    """Have vLLM's scheduler make its KV cache managers of kvcore, where ``KVCORE_VLLM=1`` says so.

    Raises
    ------
    ValueError
        ``KVCORE_VLLM`` is a word that means neither on nor off.

    Notes
    -----
    With another release of vLLM, or where anything fails, vLLM keeps its own manager. One line of
    the log says so: the switch is then off for the processes that this one starts. May be called
    repeatedly.
    """
    if not is_on(SWITCH):
        return
    try:
        reason = _rebind()
    except Exception as error:  # noqa: BLE001 - whatever it is, vLLM goes on without kvcore
        reason = f"kvcore failed with {type(error).__name__}: {error}"
    if reason is not None:
        os.environ[SWITCH] = "0"
        logger.warning("KV cache manager: vLLM's own, not kvcore's: %s", reason)


def _rebind() -> str | None:
    """Put kvcore in the place of vLLM's manager; return why not, and nothing is changed."""
    import vllm

    if not is_served(vllm.__version__, SERVED_VERSIONS):
        return f"kvcore serves vLLM {' and '.join(SERVED_VERSIONS)}, and this is {vllm.__version__}"
    from kvcore.integrations.vllm.choice import rebind

    return rebind()
