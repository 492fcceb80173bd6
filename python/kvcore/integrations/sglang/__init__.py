# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefix cache on kvcore: ``--radix-cache-backend kvcore``.

SGLang calls `register` by itself, as kvcore is installed beside it. Importing this imports nothing
of SGLang.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["SERVED_VERSIONS", "make_cache", "register"]

#: Versions of SGLang whose cache was compared with kvcore's, call by call.
SERVED_VERSIONS = ("0.5.23",)

_log = logging.getLogger(__name__)


def register() -> None:
    """Make the backend known to SGLang; what its plug-in entry point calls, once per process."""
    try:
        from sglang.srt.mem_cache.registry import register_radix_cache_backend
    except ImportError:
        _log.warning("this SGLang has no --radix-cache-backend; kvcore serves %s", SERVED_VERSIONS)
        return
    register_radix_cache_backend("kvcore", make_cache)


def make_cache(context: Any) -> Any:
    """Make the prefix cache of a scheduler.

    Parameters
    ----------
    context : sglang TreeCacheBuildContext

    Returns
    -------
    sglang BasePrefixCache
        Of kvcore; SGLang's own, with a line in the log, for a version of SGLang that is not one of
        `SERVED_VERSIONS`, or where prefixes are not to be cached.

    Raises
    ------
    NotImplementedError
        What the model or the options need is not served; the text says what. Or a version of SGLang
        that is not served has no cache of its own where this one looks for it.
    """
    try:
        from sglang.srt.mem_cache.registry import default_radix_cache_factory
        from sglang.version import __version__
    except ImportError as error:
        raise NotImplementedError(
            f"kvcore serves SGLang {SERVED_VERSIONS}, and finds no cache of this one's own "
            f"({error}); leave out --radix-cache-backend kvcore"
        ) from error

    if __version__ not in SERVED_VERSIONS:
        _log.warning("SGLang %s uses its own cache: kvcore serves %s", __version__, SERVED_VERSIONS)
        return default_radix_cache_factory(context)
    if context.disable_radix_cache:
        _log.warning("--disable-radix-cache leaves kvcore nothing to do: no prefix is cached")
        return default_radix_cache_factory(context)
    from kvcore.integrations.sglang.served import cache_class

    return cache_class(context)(context.params)
