# SPDX-License-Identifier: Apache-2.0
"""The recurrent layers of a model: how to find them and run them on a packed batch's states.

A recurrent layer of transformers runs rows of one length from the states of a cache object. A
packed batch has rows of all lengths, so the layer's ``forward`` is wrapped for the time of a call.
The wrapper passes the layer's input to the tray, which runs the layer row by row, or for many rows
of one token at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from kvcore.integrations.transformers.tray import LayerTray, RunMixer

__all__ = ["cache_of", "goes_on", "mixers_of", "mixing", "states_of"]

States = dict[str, torch.Tensor]

_NAMES = ("conv_states", "recurrent_states")

# By module: true if several tokens at once continue from a state.
_GOES_ON: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def mixers_of(model: Any) -> list[Any]:
    """Return the modules of a model that keep states in a cache: modules with a convolution."""
    return [
        module
        for module in model.modules()
        if getattr(module, "layer_idx", None) is not None
        and any(isinstance(child, torch.nn.Conv1d) for child in module.children())
    ]


@contextmanager
def mixing(model: Any) -> Iterator[None]:
    """Inside the block, pass the inputs of recurrent layers to the tray of a packed batch.

    Calls without a tray run unchanged.
    """
    before = [(module, vars(module).get("forward")) for module in mixers_of(model)]
    try:
        for module, _ in before:
            module.forward = _led(module, module.forward)
        yield
    finally:
        for module, forward in before:
            if forward is not None:
                module.forward = forward
            else:
                vars(module).pop("forward", None)


def _led(module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # Search by position and name: in some versions a decorator hides the signature.
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        cached = next((key for key, each in given.items() if isinstance(each, LayerTray)), None)
        if cached is None:
            return forward(*args, **kwargs)
        if given.get("attention_mask") is not None:
            raise ValueError(
                f"{type(module).__name__} gets an attention mask of its own, which a packed batch "
                f"cannot apply; keep the model's own attention"
            )
        incoming: Any = 0 if args else "hidden_states"

        def run_rows(hidden: torch.Tensor, cache: Cache) -> torch.Tensor:
            own = given | {incoming: hidden, cached: cache}
            places = [own[i] for i in range(len(args))]
            out: torch.Tensor = forward(*places, **{name: own[name] for name in kwargs})
            return out

        mixed: torch.Tensor = given[cached].mix(module, given[incoming], run_rows)
        return mixed

    return run


def cache_of(layer: int, states: Mapping[str, torch.Tensor], *, is_new: bool) -> Cache:
    """Make a cache of transformers for one recurrent layer.

    Parameters
    ----------
    layer : int
    states : mapping of str to tensor [B, ...]
        The states that the layer updates; a state that is missing here is made by the layer.
    is_new : bool
        Start without a state: the layer does not read the contents of `states`.
    """
    kept = LinearAttentionLayer()
    for name, value in states.items():
        getattr(kept, name)[0] = value
        getattr(kept, f"is_{name}_initialized")[0] = True
        kept.dtype, kept.device = value.dtype, value.device
    if "conv_states" in states:
        kept.conv_kernel_size[0] = states["conv_states"].shape[-1]
    kept.has_previous_state[0] = not is_new
    # Some layers ask for the state of the cache's last layer.
    return Cache(layers=[kept] * (layer + 1))


def states_of(cache: Cache) -> States:
    """Return the states that a layer has left in a cache of ``cache_of``."""
    kept = cache.layers[-1]
    found = {name: getattr(kept, name)[0] for name in _NAMES}
    return {name: value for name, value in found.items() if value is not None}


def goes_on(module: Any, width: int, states: States, run: RunMixer) -> bool:
    """Return true if a layer continues from a state when it gets several tokens at once.

    Some classes read the state only for a single token, and start anew with several tokens. So the
    check runs two tokens from states of noise: a change of any state must change the output.

    Parameters
    ----------
    module : Module
    width : int
        The width of the layer's input.
    states : dict of str to tensor
        States with the shapes and dtypes of the layer's own.
    run : RunMixer

    Notes
    -----
    Checks each module once, and keeps the answer.
    """
    known = _GOES_ON.get(module)
    if known is None:
        known = _GOES_ON[module] = _reads_states(module, width, states, run)
    return known


def _reads_states(module: Any, width: int, states: States, run: RunMixer) -> bool:
    numbers = torch.Generator().manual_seed(0)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like[:1].shape, generator=numbers).to(like)

    weight = next(iter(module.parameters()))
    hidden = torch.randn((1, 2, width), generator=numbers).to(weight)
    first = {name: noise(value) for name, value in states.items()}

    def out(given: States) -> torch.Tensor:
        copies = {name: value.clone() for name, value in given.items()}
        return run(hidden, cache_of(module.layer_idx, copies, is_new=False))

    told = out(first)
    if not torch.isfinite(told).all():
        return False  # inconclusive: one token at a time is exact
    return all(not torch.equal(out(first | {name: noise(first[name])}), told) for name in first)
