# SPDX-License-Identifier: Apache-2.0
"""The shape of a model's KV cache and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.arguments import flag, number
from kvcore.dtypes import itemsize
from kvcore.hf_config import cache_shape

__all__ = ["KVCacheParams", "require_count", "require_params"]

_SCALE_BYTES = 4  # float32
_MAX_COUNT = 2**31 - 1  # page ids and shapes are int32
_MOST_GIB = 2**33  # whose bytes are counted in int64


def require_count(**values: int) -> None:
    """Raise ValueError for a value outside 1 .. 2**31 - 1, TypeError for one that is no int."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is a {type(value).__name__}, must be an int")
        if not 1 <= value <= _MAX_COUNT:
            raise ValueError(f"{name} is {value}, must be 1 .. {_MAX_COUNT}")


def require_params(params: object) -> None:
    """Raise TypeError for what is no KVCacheParams."""
    if not isinstance(params, KVCacheParams):
        raise TypeError(f"params is a {type(params).__name__}, must be a KVCacheParams")


@dataclass(frozen=True)
class KVCacheParams:
    """Describe the KV cache of a model and how it is spread over devices.

    Parameters
    ----------
    dtype : str
        float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8. The narrow ones store
        unscaled values unless `kv_scale_granularity` is given.
    n_kv_heads, head_dim, num_layers : int
        Of the whole model. `head_dim` counts elements; with MLA the latent row.
    page_size : int
        Tokens per page.
    enable_prefix_caching : bool
        Share the pages of equal prefixes.
    enable_kvcache_swapping_to_host : bool
        Keep a host tier below the device; needs prefix caching and
        `host_kvcache_swap_space_gb`.
    host_kvcache_swap_space_gb : float, optional
        Host tier per replica, in GiB.
    n_devices : int
        Devices altogether: data parallel replicas times tensor parallel shards.
    data_parallel_degree : int
        Replicas; each is spread over ``n_devices / data_parallel_degree`` devices by heads.
    is_mla : bool
        One latent row per token in place of K and V; every shard holds all of it.
    kv_scale_granularity : int, optional
        Elements of `head_dim` per float32 scale.
    v_head_dim : int, optional
        Width of V where it is not `head_dim`; the pool is then two arrays.
    cache_strategy : str
        "paged".

    Raises
    ------
    ValueError
        A size below 1, an unknown dtype, heads or devices that do not divide, a host tier without
        prefix caching or space.
    TypeError
        A size that is no int, a flag that is no bool, a dtype that is no str.

    Examples
    --------
    >>> from kvcore import KVCacheParams
    >>> params = KVCacheParams("bfloat16", n_kv_heads=8, head_dim=128, num_layers=32, page_size=16)
    >>> params.bytes_per_token, params.bytes_per_page
    (131072, 2097152)
    """

    dtype: str
    n_kv_heads: int
    head_dim: int
    num_layers: int
    page_size: int = 128
    enable_prefix_caching: bool = False
    enable_kvcache_swapping_to_host: bool = False
    host_kvcache_swap_space_gb: float | None = None
    n_devices: int = 1
    data_parallel_degree: int = 1
    is_mla: bool = False
    kv_scale_granularity: int | None = None
    v_head_dim: int | None = None
    cache_strategy: str = "paged"

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str):
            raise TypeError(f"dtype is a {type(self.dtype).__name__}, must be a str")
        itemsize(self.dtype)
        require_count(
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            num_layers=self.num_layers,
            page_size=self.page_size,
            n_devices=self.n_devices,
            data_parallel_degree=self.data_parallel_degree,
        )
        flag("is_mla", self.is_mla)
        flag("enable_prefix_caching", self.enable_prefix_caching)
        flag("enable_kvcache_swapping_to_host", self.enable_kvcache_swapping_to_host)
        if self.cache_strategy != "paged":
            raise ValueError(f"cache_strategy is {self.cache_strategy!r}, must be 'paged'")
        self._check_devices()
        self._check_widths()
        self._check_host_tier()

    def _check_devices(self) -> None:
        if self.n_devices % self.data_parallel_degree != 0:
            raise ValueError(
                f"n_devices {self.n_devices} is not a multiple of data_parallel_degree "
                f"{self.data_parallel_degree}; give each replica as many devices"
            )
        tp = self.tensor_parallel_degree
        if not self.is_mla and self.n_kv_heads % tp != 0:
            raise ValueError(
                f"n_kv_heads {self.n_kv_heads} does not divide over {tp} tensor parallel devices; "
                f"heads are not replicated, use a degree that divides them"
            )

    def _check_widths(self) -> None:
        if self.v_head_dim is not None:
            require_count(v_head_dim=self.v_head_dim)
            if self.is_mla:
                raise ValueError(
                    f"v_head_dim is {self.v_head_dim} with is_mla, must be None: "
                    f"a latent row has no V of its own"
                )
        if self.kv_scale_granularity is None:
            return
        require_count(kv_scale_granularity=self.kv_scale_granularity)
        for width in self.row_widths:
            if width % self.kv_scale_granularity != 0:
                raise ValueError(
                    f"kv_scale_granularity {self.kv_scale_granularity} does not divide "
                    f"the {width} elements of a row"
                )

    def _check_host_tier(self) -> None:
        space = self.host_kvcache_swap_space_gb
        if space is not None:
            number("host_kvcache_swap_space_gb", space)
        if not self.enable_kvcache_swapping_to_host:
            return
        if not self.enable_prefix_caching:
            raise ValueError(
                "enable_kvcache_swapping_to_host without enable_prefix_caching: "
                "the host tier holds cached pages, so enable both"
            )
        if space is None or not 0 < space < _MOST_GIB:
            raise ValueError(
                f"host_kvcache_swap_space_gb is {space}, must be above 0 GiB for the host tier, "
                f"and below {_MOST_GIB}"
            )

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any] | str | Path,
        dtype: str | None = None,
        **overrides: Any,
    ) -> KVCacheParams:
        """Read a Hugging Face ``config.json``.

        Parameters
        ----------
        config : mapping, or path of the file or of the directory that holds it
            Of a multimodal model the language model is read.
        dtype : str, optional
            The config's ``dtype`` or ``torch_dtype`` by default.
        **overrides
            Other fields of KVCacheParams, such as ``page_size``.

        Raises
        ------
        ValueError
            A field is missing or out of range; the model keeps a recurrent state, or its layers
            differ in their K and V. What no file can be called; a file that holds no JSON.
        TypeError
            Neither mapping nor path; another field than those of KVCacheParams.
        OSError
            The file cannot be read.

        Notes
        -----
        Every layer counts with every token: a sliding window takes no less.

        Examples
        --------
        >>> from kvcore import KVCacheParams
        >>> config = {"num_hidden_layers": 36, "num_attention_heads": 32, "hidden_size": 4096,
        ...           "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
        >>> KVCacheParams.from_hf_config(config, page_size=16).bytes_per_token
        147456
        """
        return cls(**(cache_shape(config, dtype) | overrides))

    @property
    def tensor_parallel_degree(self) -> int:
        """Devices that one replica is spread over."""
        return self.n_devices // self.data_parallel_degree

    @property
    def n_kv_heads_per_device(self) -> int:
        """KV heads on one device; 1 for MLA, whose latent row every shard holds."""
        return 1 if self.is_mla else self.n_kv_heads // self.tensor_parallel_degree

    @property
    def kv_dim(self) -> int:
        """2 for K and V, 1 for an MLA row."""
        return 1 if self.is_mla else 2

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Elements per token, layer and head of each part: (K, V), or (latent,)."""
        if self.is_mla:
            return (self.head_dim,)
        return (self.head_dim, self.head_dim if self.v_head_dim is None else self.v_head_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token, scales included, over all devices of a replica."""
        per_head = sum(self.row_widths) * itemsize(self.dtype)
        if self.kv_scale_granularity is not None:
            per_head += sum(self.row_widths) // self.kv_scale_granularity * _SCALE_BYTES
        shards = self.tensor_parallel_degree
        return per_head * self.num_layers * self.n_kv_heads_per_device * shards

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all devices of a replica."""
        return self.page_size * self.bytes_per_token
