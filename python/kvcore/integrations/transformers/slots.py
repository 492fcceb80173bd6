# SPDX-License-Identifier: Apache-2.0
"""The recurrent states of a batch's requests: layers read them from slots and write them back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcore.integrations.transformers.devices import Tensors
from kvcore.integrations.transformers.mixers import States, cache_of, goes_on, states_of
from kvcore.integrations.transformers.tray import RunMixer
from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.paged import PagedKVCacheManager

__all__ = ["BatchStates"]


class BatchStates:
    """Run the recurrent layers of a packed batch over the slots of its requests.

    Parameters
    ----------
    manager : PagedKVCacheManager
        The manager; its states are on one device.
    inputs : RaggedKVCacheInputs
        The result of its ``fetch`` for the batch.
    row_offsets : uint32 array [B + 1]
        The first token of each row.
    begun : bool array [B]
        True for a row that continues from a state.
    tensors : Tensors
        The tensors of the states' device.

    Notes
    -----
    Rows that continue by one token run together; every other row runs by itself. Some layer classes
    ignore the state if they get several tokens. For these, a row that continues runs its tokens
    one by one.
    """

    def __init__(
        self,
        manager: PagedKVCacheManager,
        inputs: RaggedKVCacheInputs,
        row_offsets: NDArray[np.uint32],
        begun: NDArray[np.bool_],
        tensors: Tensors,
    ) -> None:
        if not manager.states:
            raise ValueError("blocks is None: this manager has no arrays for the model's states")
        if any(len(each) > 1 for group in manager.states for each in group.values()):
            raise ValueError(
                f"the manager has states on {manager.params.n_devices} devices, a packed batch "
                f"needs all states on one; make a manager with one device"
            )
        # A tensor made in inference mode must not be written outside of it.
        with torch.inference_mode(mode=False):
            self._arrays = [
                {name: tensors.tensor(each[0]) for name, each in group.items()}
                for group in manager.states
            ]
        self._places = {
            layer: (group, place)
            for group, states in enumerate(manager.params.state_groups)
            for place, layer in enumerate(states.layers)
        }
        self._slots = [tensors.tensor(slots).long() for slots in inputs.states]
        begins = row_offsets.astype(np.int64)
        lengths = np.diff(begins)
        steps = np.flatnonzero((lengths == 1) & begun)
        self._steps = tensors.put(steps), tensors.put(begins[steps])
        self._rows = [
            (int(row), slice(int(begins[row]), int(begins[row + 1])), not begun[row])
            for row in np.flatnonzero((lengths > 1) | ~begun)
        ]

    def mix(self, module: Any, hidden: torch.Tensor, run: RunMixer) -> torch.Tensor:
        """Run one layer for all rows, and write the rows' states into their slots.

        Parameters
        ----------
        module : Module
            Its ``layer_idx`` names the layer.
        hidden : tensor [1, T, width]
        run : RunMixer

        Returns
        -------
        tensor [1, T, width]

        Raises
        ------
        ValueError
            The manager has no slots for the layer.
        """
        found = self._places.get(module.layer_idx)
        if found is None:
            raise ValueError(
                f"layer {module.layer_idx} keeps a state, the manager has no slots for it; take "
                f"the params from cache_params(model)"
            )
        group, place = found
        slots = self._slots[group]
        arrays = {name: each[:, place] for name, each in self._arrays[group].items()}
        parts: list[tuple[Any, torch.Tensor]] = []
        rows, tokens = self._steps
        if len(rows):
            out = _run(module, arrays, slots[rows], hidden[0, tokens, None], run, is_new=False)
            parts.append((tokens, out[:, 0]))
        for row, span, is_new in self._rows:
            one = slots[row : row + 1]
            parts.append((span, _run_row(module, arrays, one, hidden[:, span], run, is_new=is_new)))
        out = parts[0][1].new_empty((hidden.shape[1], parts[0][1].shape[-1]))
        for where, part in parts:
            out[where] = part
        return out[None]


def _run_row(
    module: Any,
    arrays: States,
    slot: torch.Tensor,
    hidden: torch.Tensor,
    run: RunMixer,
    *,
    is_new: bool,
) -> torch.Tensor:
    """Run the tokens of one row, [1, T, width], and return [T, width]."""
    count = hidden.shape[1]
    if is_new or count == 1 or goes_on(module, hidden.shape[2], arrays, run):
        return _run(module, arrays, slot, hidden, run, is_new=is_new)[0]
    return torch.cat(
        [
            _run(module, arrays, slot, hidden[:, i : i + 1], run, is_new=False)[0]
            for i in range(count)
        ]
    )


def _run(
    module: Any,
    arrays: States,
    slots: torch.Tensor,
    hidden: torch.Tensor,
    run: RunMixer,
    *,
    is_new: bool,
) -> torch.Tensor:
    cache = cache_of(
        module.layer_idx, {name: each[slots] for name, each in arrays.items()}, is_new=is_new
    )
    out = run(hidden, cache)
    for name, state in states_of(cache).items():
        arrays[name][slots] = state.detach().to(arrays[name].dtype)
    return out
