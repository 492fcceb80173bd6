# SPDX-License-Identifier: Apache-2.0
"""KVCoreCache: a cache for ``model.generate(cache=...)`` with K and V in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, cache_utils

from kvcore.integrations.transformers.cache_pool import PoolPlan
from kvcore.integrations.transformers.cache_rows import CacheRows
from kvcore.integrations.transformers.devices import device_of
from kvcore.params import require_count
from kvcore.support.arguments import flag

if TYPE_CHECKING:
    from kvcore.paged import PagedKVCacheManager

__all__ = ["KVCoreCache", "KVCoreCacheLayer"]

# A layer without its own K and V; transformers before 5.16 leaves out such a layer.
_DUMMY = getattr(cache_utils, "DummyLayer", ())


class KVCoreCache(Cache):
    """A batch's K and V in pages, for any attention implementation of a model.

    Parameters
    ----------
    config : transformers config
        ``model.config``; for a multimodal model, the cache is for its language model.
    page_size : int
        Tokens per page.
    num_pages : int, optional
        Pages of the pool.
    available_cache_memory : int, optional
        Bytes of the pool, instead of `num_pages`. Without both, the pool may grow to half of the
        memory that is free at the first tokens, at most 2**20 tokens. Host memory is taken when a
        page is first written, GPU memory at once.
    groups : bool
        Layers with a window or chunk keep only the tokens of the window or chunk, if the model also
        has other layers. ``crop`` can then remove at most the tokens of the last forward pass,
        which is enough for assisted generation. By default every layer keeps every token.
    threads : int
        Threads that copy K and V in host memory.

    Raises
    ------
    ValueError
        A model whose cache has more than K and V of one shape: a recurrent state, indexer keys,
        cross attention, or layers whose heads differ.
    TypeError
        `config` is no transformers config.

    Notes
    -----
    Works wherever DynamicCache works: greedy search with padding, beams, sampling, assisted
    generation, prompt lookup, several turns. Masks apply windows.
    Latents of MLA models are stored unchanged. Beams, ``batch_repeat_interleave`` and
    ``copy.deepcopy`` share pages, and copy a page before they write into it. The pool is on the
    device of the first K and V: in host memory, or on a GPU (which needs cupy and a build with
    nvcc). Only one thread at a time may use a cache.

    A forward pass costs the append of its tokens and a gather of all K and V into new tensors. On a
    GPU both run on torch's current stream, and the host does not wait for them.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from kvcore.integrations.transformers import KVCoreCache
    >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, pad_token_id=0,
    ...                      num_hidden_layers=1, num_attention_heads=2, eos_token_id=None)
    >>> model, cache = LlamaForCausalLM(config).eval(), KVCoreCache(config, page_size=4)
    >>> out = model.generate(torch.tensor([[1, 2, 3]]), cache=cache, max_new_tokens=4,
    ...                      do_sample=False)
    >>> cache.get_seq_length(), cache.held_pages
    (6, 2)
    """

    is_croppable = True  # the base lacks it before transformers 5.16

    def __init__(
        self,
        config: Any,
        *,
        page_size: int = 16,
        num_pages: int | None = None,
        available_cache_memory: int | None = None,
        groups: bool = False,
        threads: int = 1,
    ) -> None:
        require_count(threads=threads)
        flag("groups", groups)
        theirs = _layers_of(config)
        own = [layer for layer in theirs if not isinstance(layer, _DUMMY)]
        windows = _windows_of(own) if groups else (None,) * len(own)
        self._rows = CacheRows(
            PoolPlan(windows, page_size, num_pages, available_cache_memory), threads
        )
        indices = iter(range(len(own)))
        super().__init__(
            layers=[
                layer if isinstance(layer, _DUMMY) else self._layer(next(indices), windows)
                for layer in theirs
            ]
        )

    def _layer(self, index: int, windows: tuple[int | None, ...]) -> KVCoreCacheLayer:
        return KVCoreCacheLayer(self._rows, index, windows[index])

    @property
    def manager(self) -> PagedKVCacheManager | None:
        """The PagedKVCacheManager that owns the pages; None before the first tokens."""
        return self._rows.manager

    @property
    def held_pages(self) -> int:
        """The number of pages that the rows hold; a shared page counts once."""
        return len(self._rows.held())

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers' name
        """Return -1: no fixed length. Up to 5.17, ``get_max_length`` had this name."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens at the end of every row, and free the pages that become empty.

        Parameters
        ----------
        tokens_to_remove : int
            ``-n`` removes n tokens, 0 removes no token. A positive number is the length to keep, as
            in transformers up to 5.17.
        """
        change = int(tokens_to_remove)  # some versions pass a tensor
        self._rows.crop(change if change > 0 else max(0, self._rows.length + change))
        for layer in self._own_layers():
            layer.length = min(layer.length, self._rows.length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i a copy of row ``beam_idx[i]`` that shares its pages; this copies no page.

        Parameters
        ----------
        beam_idx : int tensor [rows]
        """
        if len(self._rows):
            self._rows.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each row by `repeats` consecutive copies, which share their pages."""
        require_count(repeats=repeats)
        self._rows.select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that an index or a mask names, in its order.

        Parameters
        ----------
        indices : int or bool tensor [n]
        """
        if len(self._rows):
            self._rows.select(torch.arange(len(self._rows))[indices].tolist())

    def reset(self) -> None:
        """Release all pages; the pool stays for later tokens."""
        self._rows.release()
        for layer in self._own_layers():
            layer.length = 0
            layer.is_initialized = False

    def _own_layers(self) -> list[KVCoreCacheLayer]:
        return [layer for layer in self.layers if isinstance(layer, KVCoreCacheLayer)]


class KVCoreCacheLayer(CacheLayerMixin):
    """One layer of a KVCoreCache.

    Attributes
    ----------
    length : int
        The number of tokens that this layer has in each row.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, rows: CacheRows, index: int, window: int | None) -> None:
        # Skips the base's constructor: keys and values are properties here.
        self._rows = rows
        self._index = index
        self._window = window
        self._home = torch.device("cpu")
        self.length = 0
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:  # noqa: ARG002
        """Count as initialized; the first tokens take pages."""
        self.is_initialized = True

    # torch.compile breaks the graph here.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002 - arguments of other caches
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the K and V of new tokens to the pages and return all K and V that they read.

        Parameters
        ----------
        key_states, value_states : tensor [rows, heads, new tokens, dim]
            In host memory or on a GPU, like earlier K and V; the last dimensions may differ.

        Returns
        -------
        tensor, tensor [rows, heads, all tokens, dim]

        Raises
        ------
        InsufficientBlocksError, CapacityError
            The pool is full; the cache is as it was before the forward pass.
        ValueError, TypeError
            K and V that do not fit the cache, or are on another device.
        KVCacheError
            K and V are on a GPU and kvcore has no kernels for it here, with the reason.
        """
        _check(key_states, value_states)
        before = self.length
        self._begin(key_states, value_states)
        self._rows.append(self._index, _flat(key_states), _flat(value_states))
        self._home, self.is_initialized = key_states.device, True
        self.length = self._rows.length
        return (key_states, value_states) if before == 0 else self._read(self._first(before))

    def _begin(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Begin a forward pass of the rows if this is its first layer."""
        tokens, length = k.shape[2], self._rows.length
        device = device_of(k.device)
        assert device is not None
        if self.length == length:
            dtype = str(k.dtype).removeprefix("torch.")
            widths = k.shape[3], v.shape[3]
            self._rows.begin(len(k), tokens, dtype, k.shape[1], widths, device)
        elif self.length + tokens != length:
            raise ValueError(
                f"layer {self._index} has {self.length} tokens and gets {tokens}, another layer "
                f"has {length}; crop() the cache after a forward pass that failed"
            )
        else:
            self._rows.require_device(device)

    @property
    def is_sliding(self) -> bool:
        """True if the layer keeps a window of tokens; transformers makes the masks from it."""
        return self._window is not None

    def _first(self, length: int) -> int:
        """Return the first token that is read after `length` tokens are written."""
        return 0 if self._window is None else max(0, length - self._window + 1)

    def _read(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the tokens from `first` on into new tensors."""
        assert self._rows.manager is not None
        params = self._rows.manager.params
        dtype = getattr(torch, params.dtype)
        page = first // params.page_size
        skipped = page * params.page_size
        shape = (len(self._rows), self.length - skipped, params.n_kv_heads)
        k, v = (
            torch.empty((*shape, width), dtype=dtype, device=self._home)
            for width in params.row_widths
        )
        self._rows.gather(self._index, page, shape[1], (k.flatten(0, 1), v.flatten(0, 1)))
        k, v = k[:, first - skipped :], v[:, first - skipped :]
        return k.transpose(1, 2), v.transpose(1, 2)

    @property
    def keys(self) -> torch.Tensor | None:
        """The kept K, [rows, heads, tokens, dim], gathered now; None for an empty layer."""
        return self._read(self._first(self.length))[0] if self.length else None

    @property
    def values(self) -> torch.Tensor | None:
        """The kept V, like `keys`."""
        return self._read(self._first(self.length))[1] if self.length else None

    def get_seq_length(self) -> int:
        """Return the number of tokens of each row."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the first token of the next result of ``update``."""
        first = self._first(self.length)
        return self.length + query_length - first, first

    def get_max_length(self) -> int:
        """Return -1: no fixed length."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Refuse: the layers of a cache share their pages."""
        self._refuse("reset")

    def crop(self, tokens_to_remove: int) -> None:  # noqa: ARG002 - transformers' name
        """Refuse: the layers of a cache share their pages."""
        self._refuse("crop")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:  # noqa: ARG002
        """Refuse: the layers of a cache share their pages."""
        self._refuse("reorder_cache")

    def _refuse(self, verb: str) -> None:
        raise NotImplementedError(
            f"{verb} of a single layer: all layers share their pages, call it on the KVCoreCache"
        )


def _check(k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse K and V that no pool can hold."""
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or k.dtype != v.dtype:
        raise ValueError(
            f"K is {k.dtype} {tuple(k.shape)} and V {v.dtype} {tuple(v.shape)}, must be of one "
            f"dtype and [rows, heads, tokens, dim], equal but for dim"
        )
    if k.shape[2] == 0:
        raise ValueError("K has 0 tokens, must have at least 1")
    if device_of(k.device) is None or k.device != v.device:
        raise TypeError(
            f"K is on {k.device} and V on {v.device}, must both be in host memory or on one NVIDIA "
            f"GPU; load the model there"
        )
    if k.requires_grad or v.requires_grad:
        raise ValueError("K or V requires grad, which pages do not keep; use torch.no_grad()")


def _flat(states: torch.Tensor) -> torch.Tensor:
    """Return states as [rows * tokens, heads, dim]; a view if possible, else a copy."""
    rows, heads, tokens, dim = states.shape
    flat = states.transpose(1, 2).reshape(rows * tokens, heads, dim)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _windows_of(layers: list[Any]) -> tuple[int | None, ...]:
    """Return the number of tokens that each layer keeps, None for all tokens.

    A layer with chunks keeps the number of tokens of one chunk, because a row's chunks begin after
    its padding. If no layer keeps all tokens, every layer does: a manager with only windows needs
    room for the columns of the most rows at any time, and a cache has no limit of its rows.
    """
    windows = tuple(getattr(layer, "sliding_window", None) for layer in layers)
    return windows if None in windows else (None,) * len(layers)


def _layers_of(config: Any) -> list[Any]:
    """Return the layers of transformers' own cache of a model; refuse layers that fit no pages."""
    if not hasattr(config, "get_text_config"):
        raise TypeError(
            f"config is a {type(config).__name__}, must be that of a transformers model"
        )
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type} also caches cross attention, which kvcore does not")
    text = config.get_text_config(decoder=True)
    shapes = {
        (getattr(layer, "head_dim", None), getattr(layer, "num_key_value_heads", None))
        for layer in getattr(text, "per_layer_config", ())
    }
    if len(shapes) > 1:
        raise ValueError(
            f"the layers of {config.model_type} differ in head_dim and K/V heads "
            f"({', '.join(map(str, sorted(shapes, key=str)))}), a page holds K and V of one shape"
        )
    layers: list[Any] = DynamicCache(config=config).layers
    known = (DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
    for layer in layers:
        if type(layer) not in known and not isinstance(layer, _DUMMY):
            raise ValueError(
                f"{config.model_type} keeps more than K and V ({type(layer).__name__}), such as a "
                f"recurrent state or indexer keys, which kvcore does not cache"
            )
    return layers
