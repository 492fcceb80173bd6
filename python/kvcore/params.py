# SPDX-License-Identifier: Apache-2.0
"""The shape of a model's KV cache, and its size in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvcore.groups import AttentionGroup, Bundle, FullAttention, State, bundles
from kvcore.layers.kinds import MOST_LAYERS
from kvcore.layers.packing import (
    check_groups,
    frozen_groups,
    frozen_shared,
    page_shape,
    row_elements,
)
from kvcore.support.arguments import flag, number
from kvcore.support.dtypes import itemsize

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "KVCacheParams",
    "require_count",
    "require_one_group",
    "require_params",
]

_SCALE_BYTES = 4  # float32
_MAX_COUNT = 2**31 - 1  # page ids and shapes are int32
_MOST_GIB = 2**33  # the bytes of fewer GiB fit in int64
_HF_GROUPS = True  # default of the `groups` argument of from_hf_config


def require_count(**values: int) -> None:
    """Raise TypeError for a value that is not an int, ValueError for one outside 1 .. 2**31 - 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is a {type(value).__name__}, must be an int")
        if not 1 <= value <= _MAX_COUNT:
            raise ValueError(f"{name} is {value}, must be 1 .. {_MAX_COUNT}")


def require_params(params: object) -> None:
    """Raise TypeError if `params` is not a KVCacheParams."""
    if not isinstance(params, KVCacheParams):
        raise TypeError(f"params is a {type(params).__name__}, must be a KVCacheParams")


def require_one_group(params: KVCacheParams) -> None:
    """Raise ValueError unless every layer keeps every token in the same slot."""
    if params.groups is None and params.shared is None:
        return
    packed = () if params.shared or params.state_groups else bundles(params)
    if len(packed) == 1 and packed[0] == Bundle(
        FullAttention(range(params.num_layers)), tuple(range(params.num_layers)), params.page_size
    ):
        return
    kinds = ", ".join(
        f"{type(group).__name__} of {len(group.layers)} layers"
        for group in params.groups or params.attention_groups
    )
    raise ValueError(
        f"the params have groups ({kinds}), a slot holds every token of all {params.num_layers} "
        f"layers, in rows of {params.n_kv_heads} heads of {params.head_dim}; use "
        f"PagedKVCacheManager, or pass groups=None and to from_hf_config groups=False"
    )


@dataclass(frozen=True, repr=False)
class KVCacheParams:
    """Describe the KV cache of a model and how it is spread over devices.

    Parameters
    ----------
    dtype : str
        float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8. float8 and int8 pools store
        unscaled values unless `kv_scale_granularity` is given.
    n_kv_heads, head_dim, num_layers : int
        Sizes of the whole model. `head_dim` counts elements; with MLA, the elements of the latent
        row.
    page_size : int
        Tokens per page.
    enable_prefix_caching : bool
        Requests with equal prefixes share the pages of the prefix.
    enable_kvcache_swapping_to_host : bool
        Keep a host tier below the device. The host tier needs `enable_prefix_caching` and
        `host_kvcache_swap_space_gb`.
    host_kvcache_swap_space_gb : float, optional
        Size of the host tier of each replica, in GiB.
    n_devices : int
        All devices: data parallel replicas times tensor parallel shards.
    data_parallel_degree : int
        Replicas; the heads of each replica are spread over ``n_devices / data_parallel_degree``
        devices.
    is_mla : bool
        The cache has a latent row per token in place of K and V. Every shard holds the whole row.
    kv_scale_granularity : int, optional
        Elements of `head_dim` per float32 scale.
    v_head_dim : int, optional
        Width of V if it differs from `head_dim`. The pool of a device is a pair of arrays in this
        case.
    cache_strategy : str
        "paged".
    groups : sequence of FullAttention, SlidingWindow, ChunkedLocal and State, optional
        The tokens that each layer keeps, see ``kvcore.groups``; stored as a tuple. A layer is in at
        most one attention group and at most one State group. A layer without a group caches no
        tokens. None means a FullAttention group of all layers.
    shared : mapping of int to int, optional
        Layers that read the K and V of another layer: {layer: owner}. The owner is in an attention
        group, and the layer is not in an attention group. Stored as a hashable mapping.

    Raises
    ------
    ValueError
        A size is below 1, a dtype is unknown, heads or devices do not divide evenly, or the host
        tier lacks prefix caching or space. Groups name a layer twice or a layer beyond
        `num_layers`, all groups are State groups, or the pages of the groups cannot have the same
        size.
    TypeError
        A size is not an int, a flag is not a bool, or a dtype is not a str.

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
    groups: Sequence[AttentionGroup | State] | None = None
    shared: Mapping[int, int] | None = None

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
        self._check_groups()

    def _check_groups(self) -> None:
        object.__setattr__(self, "groups", frozen_groups(self.groups))
        object.__setattr__(self, "shared", frozen_shared(self.shared))
        if self.groups is not None or self.shared is not None:
            check_groups(self)

    def __repr__(self) -> str:
        # Newer fields appear only if they are given.
        given = [
            field.name
            for field in fields(self)
            if field.name not in ("groups", "shared") or getattr(self, field.name) is not None
        ]
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in given)
        return f"{type(self).__qualname__}({values})"

    def _check_devices(self) -> None:
        if self.n_devices % self.data_parallel_degree != 0:
            raise ValueError(
                f"n_devices {self.n_devices} is not a multiple of data_parallel_degree "
                f"{self.data_parallel_degree}; give each replica the same number of devices"
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
        *,
        groups: bool | None = None,
        mtp: bool = False,
        assume: Mapping[str, str] | None = None,
        **overrides: Any,
    ) -> KVCacheParams:
        """Build the params from a Hugging Face ``config.json``.

        Parameters
        ----------
        config : mapping, or path of the file or of the directory that holds it
            For a multimodal model, the config of the language model is used.
        dtype : str, optional
            The default is the dtype of K and V in ``quantization_config`` (``kv_cache_scheme``,
            ``kv_cache_quant_algo``), or else the config's ``dtype`` or ``torch_dtype``.
        groups : bool, optional
            Fill in `groups` and `shared` if layers keep windows, chunks or states, or read the K
            and V of other layers. With False, every layer keeps every token, and a model that keeps
            a state raises ValueError.
        mtp : bool
            Also count the MTP layers (``num_nextn_predict_layers``), which predict further tokens.
        assume : mapping of str to str, optional
            Maps names of fields to "ignored", as in ``{"kv_share_map": "ignored"}``: the config is
            read without these fields.
        **overrides
            Other fields of KVCacheParams, such as ``page_size``.

        Raises
        ------
        ValueError
            A field is missing or out of range. Without `groups`, the model keeps a recurrent state
            or its layers differ in their K and V. With `groups`, no group describes the cache of a
            layer. The name of a field suggests an effect on the cache, and kvcore has no rule for
            the field; the message has its name, its value and the `assume` argument that ignores
            it. The path is not a valid file name, or the file does not contain JSON.
        TypeError
            `config` is neither a mapping nor a path, or `overrides` has a name that is not a field
            of KVCacheParams.
        OSError
            The file cannot be read.

        Notes
        -----
        Layers keep a window only if the config or its model family defines the layers with windows.
        In other models the layers keep every token, which is also correct for these models. If
        layers have an indexer (``index_head_dim``), the row of a token holds the latent row,
        followed by the indexer's key.

        Examples
        --------
        >>> from kvcore import KVCacheParams
        >>> config = {"num_hidden_layers": 36, "num_attention_heads": 32, "hidden_size": 4096,
        ...           "num_key_value_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
        >>> KVCacheParams.from_hf_config(config, page_size=16).bytes_per_token
        147456
        """
        from kvcore.layers.hf.config import read_config

        fill = _HF_GROUPS if groups is None else flag("groups", groups)
        shards = 1
        if fill:
            n, dp = (overrides.get(k, 1) for k in ("n_devices", "data_parallel_degree"))
            require_count(n_devices=n, data_parallel_degree=dp)
            shards = max(1, n // dp)
        found = read_config(
            config, dtype, groups=fill, shards=shards, mtp=flag("mtp", mtp), assume=assume
        )
        return cls(**(found.shape | overrides))

    @property
    def tensor_parallel_degree(self) -> int:
        """Number of devices of one replica."""
        return self.n_devices // self.data_parallel_degree

    @property
    def n_kv_heads_per_device(self) -> int:
        """KV heads on one device; 1 for MLA, where every shard holds the latent row."""
        return 1 if self.is_mla else self.n_kv_heads // self.tensor_parallel_degree

    @property
    def kv_dim(self) -> int:
        """2 for K and V, 1 for an MLA row."""
        return 1 if self.is_mla else 2

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Elements of each part, (K, V) or (latent,), per token, layer and head."""
        if self.is_mla:
            return (self.head_dim,)
        return (self.head_dim, self.head_dim if self.v_head_dim is None else self.v_head_dim)

    @property
    def attention_groups(self) -> tuple[AttentionGroup, ...]:
        """The groups that keep K and V; for None, a group of all layers not in `shared`."""
        if self.groups is None:
            shared = self.shared or {}
            if self.num_layers > MOST_LAYERS:
                raise ValueError(
                    f"num_layers is {self.num_layers}, must be at most {MOST_LAYERS} where layers "
                    f"are told apart"
                )
            return (FullAttention([i for i in range(self.num_layers) if i not in shared]),)
        return tuple(group for group in self.groups if isinstance(group, AttentionGroup))

    @property
    def state_groups(self) -> tuple[State, ...]:
        """The groups that keep states."""
        return tuple(group for group in self.groups or () if isinstance(group, State))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers that cache the token, over all devices of a replica.

        The bytes include scales. After a token leaves the window of a layer, that layer no longer
        stores the bytes of the token.
        """
        shards = self.tensor_parallel_degree
        if self.groups is None and self.shared is None:
            layer = self.n_kv_heads_per_device * sum(self.row_widths)
            return self._bytes_of(layer) * self.num_layers * shards
        return shards * sum(
            len(group.layers) * self._bytes_of(sum(row_elements(self, group)))
            for group in self.attention_groups
        )

    @property
    def flat_bytes_per_token(self) -> int:
        """Bytes of one token if every layer keeps the token, over all devices of a replica.

        Layers that share K and V, or keep a state, count like layers with their own K and V.
        """
        rows = {
            layer: sum(row_elements(self, group))
            for group in self.attention_groups
            for layer in group.layers
        }
        usual = self.n_kv_heads_per_device * sum(self.row_widths)
        owners = self.shared or {}
        layers = (rows.get(owners.get(i, i), usual) for i in range(self.num_layers))
        return self.tensor_parallel_degree * sum(map(self._bytes_of, layers))

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all devices of a replica, including padding."""
        if self.groups is None and self.shared is None:
            return self.page_size * self.bytes_per_token
        page = page_shape(self)
        return page.layers * self._bytes_of(sum(page.elements)) * self.tensor_parallel_degree

    @property
    def layers_per_page(self) -> int:
        """Number of layers that fit in a page: the third dimension of the pool."""
        if self.groups is None and self.shared is None:
            return self.num_layers
        return page_shape(self).layers

    @property
    def bytes_per_state_slot(self) -> int:
        """Bytes of one request's states in all State groups, over all devices of a replica."""
        slot = sum(group.bytes_per_slot for group in self.state_groups)
        return slot * self.tensor_parallel_degree

    def _bytes_of(self, elements: int) -> int:
        """Return the bytes of `elements`, which form whole rows, and of their scales."""
        scales = 0 if self.kv_scale_granularity is None else elements // self.kv_scale_granularity
        return elements * itemsize(self.dtype) + scales * _SCALE_BYTES
