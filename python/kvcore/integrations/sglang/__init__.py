# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefix cache on kvcore: ``--radix-cache-backend kvcore``.

SGLang calls `register` by itself, as kvcore is installed beside it. Importing this imports nothing
of SGLang.
"""

from __future__ import annotations

import logging
from typing import Any

import kvcore
from kvcore.integrations.gate import is_served

__all__ = ["SERVED_VERSIONS", "make_cache", "register"]

#: Versions of SGLang whose cache was compared with kvcore's, call by call.
SERVED_VERSIONS = ("0.5.23",)

_log = logging.getLogger(__name__)


def register() -> None:
    """Make the backend known to SGLang; what its plug-in entry point calls, once per process.

    Where this fails, SGLang has its own caches only, which one line of the log says.
    """
    try:
        from sglang.srt.mem_cache.registry import register_radix_cache_backend

        register_radix_cache_backend("kvcore", make_cache)
    except ImportError:
        _log.warning("this SGLang has no --radix-cache-backend; kvcore serves %s", _served())
    except Exception as error:  # noqa: BLE001 - whatever it is, SGLang goes on without kvcore
        _log.warning(
            "SGLang has no --radix-cache-backend kvcore: it refused it with %s: %s",
            type(error).__name__,
            error,
        )


def make_cache(context: Any) -> Any:
    """Make the prefix cache of a scheduler.

    Parameters
    ----------
    context : sglang TreeCacheBuildContext

    Returns
    -------
    sglang BasePrefixCache
        Of kvcore. SGLang's own, with a line in the log: for a version of SGLang that is not one of
        `SERVED_VERSIONS`, where prefixes are not to be cached, where SGLang passes or calls what
        kvcore does not know, and where kvcore fails.

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
            f"kvcore serves SGLang {_served()}, and finds no cache of this one's own ({error}); "
            f"leave out --radix-cache-backend kvcore"
        ) from error

    own = f"SGLang {__version__} uses its own cache: "
    try:
        made = _make(context, __version__, own)
    except NotImplementedError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, SGLang goes on without kvcore
        made = f"{own}kvcore failed with {type(error).__name__}: {error}"
    if isinstance(made, str):
        _log.warning(made)
        return default_radix_cache_factory(context)
    _log.info("prefix cache: kvcore %s (%s)", kvcore.__version__, type(made).__name__)
    return made


def _make(context: Any, version: str, own: str) -> Any:
    """Return a cache, or as text why SGLang keeps its own."""
    if not is_served(version, SERVED_VERSIONS):
        return f"{own}kvcore serves {_served()}"
    if context.disable_radix_cache:
        return "--disable-radix-cache leaves kvcore nothing to do: no prefix is cached"
    from kvcore.integrations.sglang.served import cache_class, unknown

    what = unknown(context)
    return cache_class(context)(context.params) if what is None else f"{own}{what}"


def _served() -> str:
    return " and ".join(SERVED_VERSIONS)
