# SPDX-License-Identifier: Apache-2.0
"""Read the texts that name tiers, such as ``disk:/var/cache/kv:200GiB``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvcore.support.arguments import integer, number
from kvcore.support.byte_sizes import parse_size

__all__ = ["DiskTier", "HostTier", "MooncakeTier", "RedisTier", "TierSpec", "parse_tier"]


@dataclass(frozen=True)
class HostTier:
    """Describe a tier in host memory.

    Parameters
    ----------
    bytes : int
        Bytes of pages, at least 1.
    """

    bytes: int

    def __post_init__(self) -> None:
        _check_bytes(self.bytes)


@dataclass(frozen=True)
class DiskTier:
    """Describe a tier on local disks.

    Parameters
    ----------
    directories : tuple of (str, int)
        Paths, and the most bytes that the files of each path take.
    """

    directories: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if not self.directories:
            raise ValueError("a disk tier without directories; give it one")
        for path, size in self.directories:
            if not path or "\0" in path:
                raise ValueError(f"a directory of a disk tier is {path!r}; give its path")
            _check_bytes(size)
        paths = [path for path, _ in self.directories]
        if len({*paths}) < len(paths):
            raise ValueError(f"the directories {paths} contain one twice; name each once")


@dataclass(frozen=True)
class RedisTier:
    """Describe a tier in a server that speaks the Redis protocol.

    Parameters
    ----------
    host : str
    port : int
    database : int
    username, password : str, optional
        Hidden in the representation.
    is_tls : bool
        Encrypt the connection, and check the server's certificate.
    ca_certs : str, optional
        For TLS: a file with the certificates of authorities; by default the system's.
    seconds : float
        Time limit of a batch, including the time to connect.
    ttl : float, optional
        Seconds after which the server removes a page; by default pages stay as long as the server
        has room.
    prefix : str
        Prefix of the names of pages: letters, digits and ``_.-``. Users with different prefixes
        share no pages.
    """

    host: str
    port: int = 6379
    database: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    is_tls: bool = False
    ca_certs: str | None = None
    seconds: float = 1.0
    ttl: float | None = None
    prefix: str = "kvcore"

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("a Redis tier without a host; give it one")
        integer("port", self.port, 1, 65_535)
        integer("database", self.database, 0)
        for name, value in (("timeout", self.seconds), ("ttl", self.ttl)):
            if value is not None and not 0 < number(name, value) < math.inf:
                raise ValueError(f"{name} is {value}, must be more than 0 seconds, and finite")
        _check_name("prefix", self.prefix)


@dataclass(frozen=True)
class MooncakeTier:
    """Describe a tier in the memory of the machines of a Mooncake store.

    Parameters
    ----------
    host : str
    port : int
        Port of its master.
    seconds : float
        Time limit of a call.
    prefix : str
        Prefix of the names of pages: letters, digits and ``_.-``. Users with different prefixes
        share no pages.
    tenant : str
        Tenant of the engine: different tenants share no pages, and a tenant may have a quota.
    protocol : {"tcp", "rdma"}
    devices : str
        For RDMA: names of network devices, separated by commas.
    buffer : int
        Bytes of memory through which pages pass, at least 1 MiB.
    """

    host: str
    port: int = 50_051
    seconds: float = 1.0
    prefix: str = "kvcore"
    tenant: str = "default"
    protocol: str = "tcp"
    devices: str = ""
    buffer: int = 256 << 20

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("a Mooncake tier without a host; give it the host of its master")
        integer("port", self.port, 1, 65_535)
        if not 0 < number("timeout", self.seconds) < math.inf:
            raise ValueError(f"timeout is {self.seconds}, must be more than 0 seconds, and finite")
        _check_name("prefix", self.prefix)
        _check_name("tenant", self.tenant)
        if self.protocol not in ("tcp", "rdma"):
            raise ValueError(f"protocol is {self.protocol!r}, must be 'tcp' or 'rdma'")
        _check_bytes(self.buffer)
        if self.buffer < 1 << 20:
            raise ValueError(f"buffer is {self.buffer} bytes, must be at least 1MiB")


TierSpec: TypeAlias = HostTier | DiskTier | RedisTier | MooncakeTier


def parse_tier(text: str) -> TierSpec:
    """Read a tier from its text.

    Parameters
    ----------
    text : str
        ``"host:SIZE"``; ``"disk:PATH:SIZE"``, with more ``PATH:SIZE`` after commas for more disks;
        or ``"redis://[user:password@]host[:port][/database]"``, with ``rediss`` for TLS, and
        options after a question mark: ``timeout`` and ``ttl`` in seconds, ``prefix``, ``ca_certs``;
        or ``"mooncake://host[:port]"`` with the options ``timeout``, ``prefix``, ``tenant``,
        ``protocol``, ``devices`` and ``buffer``. Sizes are written as ``200GiB``, ``1.5TB`` or
        ``4096`` (bytes).

    Returns
    -------
    HostTier, DiskTier, RedisTier or MooncakeTier

    Raises
    ------
    ValueError
        For any other text; the error text names the problem and shows a correct example.

    Examples
    --------
    >>> from kvcore.stores import parse_tier
    >>> parse_tier("host:8GiB")
    HostTier(bytes=8589934592)
    >>> parse_tier("disk:/mnt/a/kv:1TB,/mnt/b/kv:500GB")
    DiskTier(directories=(('/mnt/a/kv', 1000000000000), ('/mnt/b/kv', 500000000000)))
    >>> parse_tier("redis://:secret@10.0.0.7/2?ttl=3600").database
    2
    """
    if not isinstance(text, str):
        raise TypeError(f"a tier is a {type(text).__name__}, must be a text such as 'host:8GiB'")
    kind, colon, rest = text.partition(":")
    if kind not in _KINDS or not colon:
        known = ", ".join(f"{name}:" for name in _KINDS)
        raise ValueError(
            f"tier {text!r} must begin with one of {known}; for example 'host:8GiB', "
            "'disk:/var/cache/kv:200GiB' or 'redis://127.0.0.1:6379'"
        )
    read, example = _KINDS[kind]
    try:
        return read(rest)
    except ValueError as error:
        raise ValueError(f"tier {_shown(text)!r}: {error}; for example {example!r}") from None


def _shown(text: str) -> str:
    """Return a text without its password, if it has one."""
    return re.sub(r"//.*@", "//...@", text, flags=re.S)


def _host(text: str) -> HostTier:
    return HostTier(parse_size(text))


def _disk(text: str) -> DiskTier:
    return DiskTier(tuple(_directory(item) for item in text.split(",")))


def _directory(text: str) -> tuple[str, int]:
    path, colon, size = text.rpartition(":")
    if not colon:
        raise ValueError(f"{text!r} lacks a size after the path")
    return path, parse_size(size)


def _redis(text: str, *, is_tls: bool = False) -> RedisTier:
    url, options = _split(text, _REDIS_OPTIONS)
    if "ca_certs" in options and not is_tls:
        raise ValueError("ca_certs needs rediss://")
    database = url.path.strip("/")
    if database and not database.isdecimal():
        raise ValueError(f"the database {database!r} is not a number")
    user, password = (part and unquote(part) for part in (url.username, url.password))
    options |= {"username": user or None, "password": password or None, "is_tls": is_tls}
    return RedisTier(url.hostname or "", database=int(database or 0), **options)


def _mooncake(text: str) -> MooncakeTier:
    url, options = _split(text, _MOONCAKE_OPTIONS)
    if "@" in url.netloc or url.path.strip("/"):
        raise ValueError("only the address of its master is possible, without a user and a path")
    return MooncakeTier(url.hostname or "", **options)


def _split(
    text: str, known: Mapping[str, tuple[str, Callable[[str], Any]]]
) -> tuple[SplitResult, dict[str, Any]]:
    """Read the address of a server, its port and the options after it."""
    if not text.startswith("//"):
        raise ValueError("'//' and the server's name must follow")
    url = urlsplit(text)
    if "@" in url.path + url.query + url.fragment:
        raise ValueError("its password must be percent-encoded, %2F for / and %40 for @")
    given = dict(parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)))
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"it has no option {name!r}; its options are {', '.join(known)}")
        field_name, read = known[name]
        options[field_name] = read(value)
    try:
        port = url.port
    except ValueError:
        raise ValueError("the port is not a number from 1 to 65535") from None
    return url, options if port is None else {**options, "port": port}


def _check_name(name: str, value: str) -> None:
    if not _NAME.fullmatch(value):
        raise ValueError(f"{name} is {value!r}, must be 1 to 64 letters, digits, '_', '.' and '-'")


def _check_bytes(size: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"a tier's size is a {type(size).__name__}, must be an int of bytes")
    if not 1 <= size < 1 << 60:
        raise ValueError(f"a tier of {size} bytes; must be 1 to 2**60 - 1")


_KINDS: dict[str, tuple[Callable[[str], TierSpec], str]] = {
    "host": (_host, "host:8GiB"),
    "disk": (_disk, "disk:/var/cache/kv:200GiB"),
    "redis": (_redis, "redis://127.0.0.1:6379"),
    "rediss": (partial(_redis, is_tls=True), "rediss://cache.example.org:6380"),
    "mooncake": (_mooncake, "mooncake://127.0.0.1:50051"),
}

#: Options of a tier in a URL: the field, and the function that reads its text.
_REDIS_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "timeout": ("seconds", float),
    "ttl": ("ttl", float),
    "prefix": ("prefix", str),
    "ca_certs": ("ca_certs", str),
}
_MOONCAKE_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "timeout": ("seconds", float),
    "prefix": ("prefix", str),
    "tenant": ("tenant", str),
    "protocol": ("protocol", str),
    "devices": ("devices", str),
    "buffer": ("buffer", parse_size),
}

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}", re.ASCII)
