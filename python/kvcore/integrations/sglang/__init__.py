# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefix cache on kvcore: ``--radix-cache-backend kvcore``.

SGLang calls `register` itself if kvcore is installed. This package does not import SGLang before
it is called.
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
    """Register the backend with SGLang; SGLang's plug-in entry point calls it once per process.

    If this fails, SGLang has only its own caches, and one log line gives the reason.
    """
    try:
        from sglang.srt.mem_cache.registry import register_radix_cache_backend

        register_radix_cache_backend("kvcore", make_cache)
    except ImportError:
        _log.warning("this SGLang has no --radix-cache-backend; kvcore serves %s", _served())
    except Exception as error:  # noqa: BLE001 - after any error, SGLang runs without kvcore
        _log.warning(
            "SGLang has no --radix-cache-backend kvcore: SGLang refused it with %s: %s",
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
        kvcore's cache. Or SGLang's own cache, with a log line, if SGLang's version is not in
        `SERVED_VERSIONS`, if prefix caching is off, if SGLang passes an argument or makes a call
        that kvcore does not support, or if kvcore fails.

    Raises
    ------
    NotImplementedError
        kvcore does not serve a feature of the model or the options; the text names it. Or SGLang
        has an unsupported version, and its own cache is not at the place that kvcore imports.
    """
    try:
        from sglang.srt.mem_cache.registry import default_radix_cache_factory
        from sglang.version import __version__
    except ImportError as error:
        raise NotImplementedError(
            f"kvcore serves SGLang {_served()}, and cannot import this one's own cache ({error}); "
            f"leave out --radix-cache-backend kvcore"
        ) from error

    own = f"SGLang {__version__} uses its own cache: "
    try:
        made = _make(context, __version__, own)
    except NotImplementedError:
        raise
    except Exception as error:  # noqa: BLE001 - after any error, SGLang runs without kvcore
        made = f"{own}kvcore failed with {type(error).__name__}: {error}"
    if isinstance(made, str):
        _log.warning(made)
        return default_radix_cache_factory(context)
    _log.info("prefix cache: kvcore %s (%s)", kvcore.__version__, type(made).__name__)
    return made


def _make(context: Any, version: str, own: str) -> Any:
    """Return a cache, or a text with the reason why SGLang keeps its own."""
    if not is_served(version, SERVED_VERSIONS):
        return f"{own}kvcore serves {_served()}"
    if context.disable_radix_cache:
        return "--disable-radix-cache leaves kvcore nothing to do: no prefix is cached"
    from kvcore.integrations.sglang.served import cache_class, unknown

    what = unknown(context)
    return cache_class(context)(context.params) if what is None else f"{own}{what}"


def _served() -> str:
    return " and ".join(SERVED_VERSIONS)
