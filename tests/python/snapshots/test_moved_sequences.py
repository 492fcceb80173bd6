# SPDX-License-Identifier: Apache-2.0
"""Imports check saved sequences again, because a caller may have changed them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcore import moving
from moved_requests import exported, moving_manager


def changed(**fields: Any) -> Any:
    return lambda saved: replace(saved, **fields)


def with_tensor(name: str, change: Any) -> Any:
    return lambda saved: replace(
        saved, tensors={**saved.tensors, name: change(saved.tensors[name])}
    )


CHANGES: dict[str, Any] = {
    "fewer rows": with_tensor("layers.1.k", lambda array: array[:5]),
    "more rows": with_tensor("layers.1.k", lambda array: array.repeat(2, 0)),
    "fewer heads": with_tensor("layers.0.v", lambda array: array[:, :1]),
    "narrower": with_tensor("layers.0.v", lambda array: array[..., :3]),
    "another dtype": with_tensor("layers.0.k", lambda array: array.astype(np.float64)),
    "another byte order": with_tensor("layers.0.k", lambda array: array.astype(">f4")),
    "a list": with_tensor("layers.0.k", lambda array: array.tolist()),
    "nothing": with_tensor("layers.0.k", lambda _: None),
    "no tensors": changed(tensors={}),
    "tensors of nothing": changed(tensors=None),
    "fewer written": changed(written=17),
    "written -1": changed(written=-1),
    "written text": changed(written="18"),
    "written 18.0": changed(written=18.0),
    "all written": changed(written=19),
    "indices": changed(start_idx=19),
    "tokens of another dtype": changed(tokens=np.arange(19)),
    "tokens of a list": changed(tokens=[1] * 19),
    "tokens of nothing": changed(tokens=None),
    "other layers": changed(layers={0: moving.SavedLayer(0, 2, (4, 4))}),
    "a layer before the first token": lambda saved: with_tensor(
        "layers.0.k", lambda array: np.concatenate([array[:1], array])
    )(replace(saved, layers={**saved.layers, 0: moving.SavedLayer(-1, 2, (4, 4))})),
    "layers of text": changed(layers={0: "x", 1: "y"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_sequences_are_refused(change: str) -> None:
    saved = moving.read_sequence(exported())
    manager = moving_manager()
    before = (manager.num_free_blocks, manager.num_cached_blocks, manager.metrics)
    context = saved.context("r")
    with pytest.raises(ValueError, match="the data is damaged"):
        manager.import_sequence(context, CHANGES[change](saved))
    assert (manager.contains("r"), context.start_idx) == (False, 0)
    assert (manager.num_free_blocks, manager.num_cached_blocks, manager.metrics) == before
