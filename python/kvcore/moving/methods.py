# SPDX-License-Identifier: Apache-2.0
"""What a manager offers to move a request, or its prefix cache, to another one.

What does it is imported at its first use: few managers need it.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, overload

from kvcore._hot.engine import StepEngine
from kvcore.context import ContextLike, TextGenerationContext
from kvcore.moving.arguments import require_context, require_model, require_target
from kvcore.params import KVCacheParams

if TYPE_CHECKING:
    from kvcore.snapshots.restoring import RestoredCache
    from kvcore.snapshots.rows import Pools
    from kvcore.snapshots.saving import SavedCache
    from kvcore.snapshots.sequences import SavedSequence

__all__ = ["MovesSequences"]


class MovesSequences(StepEngine):
    """Move requests and prefix caches between managers and processes."""

    params: KVCacheParams
    _states: tuple[dict[str, list[Any]], ...]

    def _pools(self) -> Pools:
        from kvcore.snapshots.rows import Pools

        self._require_open()
        return Pools(self, self.params, self._shards, self._states, self._gpus)

    @overload
    def export_sequence(
        self, request_id: Hashable, file: None = None, *, model: str | None = None
    ) -> bytes: ...
    @overload
    def export_sequence(
        self,
        request_id: Hashable,
        file: str | os.PathLike[str] | BinaryIO,
        *,
        model: str | None = None,
    ) -> None: ...
    def export_sequence(
        self,
        request_id: Hashable,
        file: str | os.PathLike[str] | BinaryIO | None = None,
        *,
        model: str | None = None,
    ) -> bytes | None:
        """Save what a request has written as of its last ``step``: K, V and state.

        Parameters
        ----------
        request_id
            A claimed request; it is not changed and goes on.
        file : path or binary file, optional
            Where to write it. A path has the whole file or what was there before; a device or a
            pipe is written as it is.
        model : str, optional
            Name of the model or adapter, for ``import_sequence`` to compare.

        Returns
        -------
        bytes, or None where `file` is given
            In the layout of safetensors: see "Move a request, or a cache" in the documentation.

        Raises
        ------
        RequestNotFoundError
            Also where another thread releases it meanwhile.
        ValueError
            Nothing is written; its state has run further; its extra keys take megabytes; the
            manager has no pool.
        KVCacheError
            Other threads went on with it all the time.
        TypeError
            `file` or `model` is something else.
        OSError
            The file cannot be written.

        Notes
        -----
        Costs copying the tokens that the request still reads, with their checksums. Takes no page
        and no place in the batch.
        """
        from kvcore.snapshots.exporting import export_sequence
        from kvcore.snapshots.files import write_parts

        require_target(file)
        require_model(model)
        parts = export_sequence(self._pools(), request_id, model).packed()
        if file is None:
            return b"".join(parts)
        write_parts(file, parts)
        return None

    def import_sequence(
        self,
        ctx: TextGenerationContext | ContextLike,
        data: bytes | bytearray | memoryview | str | os.PathLike[str] | BinaryIO | SavedSequence,
        *,
        replica_idx: int | Literal["auto"] = "auto",
        model: str | None = None,
    ) -> bool:
        """Claim a request and have it go on where ``export_sequence`` saved it.

        Parameters
        ----------
        ctx : context
            Not claimed, with the saved tokens that are written and at least one more, in the same
            namespace. Its ``start_idx`` is 0, and moves behind them.
        data : bytes-like, path, binary file, or SavedSequence
            What ``export_sequence`` wrote.
        replica_idx : int or "auto"
            As for ``external_claim``.
        model : str, optional
            What the saved request must have been given as its model.

        Returns
        -------
        bool
            False when its pages do not fit now; then nothing has changed, it is not claimed.

        Raises
        ------
        ValueError
            Data that was changed or cut, of other layers, heads or windows than the manager's, or
            of a dtype that the pool's does not hold exactly; other tokens or another namespace than
            the context's, or one whose ``start_idx`` is not 0; a manager without a pool.
        TypeError
            An argument of another type.
        AlreadyClaimedError, CapacityError, IndexError
            As for ``external_claim``; it can never fit.
        OSError
            The file cannot be read.

        Notes
        -----
        Page size, replicas and, without states, the tensor parallel degree may be others than where
        it comes from. The tokens count as cached ones. Its whole pages enter the prefix cache, once
        all of them are written. Nobody else uses the request until this returns.
        """
        from kvcore.snapshots.importing import import_sequence
        from kvcore.snapshots.sequences import SavedSequence, read_sequence

        require_context(ctx)
        require_model(model)
        saved = data if isinstance(data, SavedSequence) else read_sequence(data)
        return import_sequence(self._pools(), ctx, saved, replica_idx, model)

    def snapshot(self, path: str | os.PathLike[str], *, model: str | None = None) -> SavedCache:
        """Save what is cached, of all replicas: pages, tokens, checkpoints of states.

        Parameters
        ----------
        path : str or path
            It has the whole file, or what was there before, also where the process is killed. What
            is no regular file is refused.
        model : str, optional
            Name of the weights and the revision of them, for ``restore`` to compare.

        Returns
        -------
        SavedCache
            What the file has.

        Raises
        ------
        ValueError
            The manager has no pool, or no prefix cache; `path` names a folder or a device.
        KVCacheError
            Other threads reset the caches all the time.
        TypeError
            `model` is something else.
        OSError
            The file cannot be written.

        Notes
        -----
        Other threads go on: a page that is evicted before its turn is not in the file. The call
        holds a few pages at a time, with the pages in front of them, so a reservation may find
        less room by these pages. Pages that quotas leave no room to hold are not in the file. A
        reset of the caches begins the file again: a file never has pages from before and after a
        reset. Costs copying the cached pages, with their checksums; memory for the tokens and one
        portion of pages, 8 MiB. Tiers below the device are not part of the file.
        """
        from kvcore.snapshots.saving import save_cache

        require_model(model)
        return save_cache(self._pools(), path, model)

    def restore(self, path: str | os.PathLike[str], *, model: str | None = None) -> RestoredCache:
        """Bring cached pages back that ``snapshot`` saved, to what is cached now.

        Parameters
        ----------
        path : str or path
        model : str, optional
            What the snapshot must have been given as its model.

        Returns
        -------
        RestoredCache

        Raises
        ------
        ValueError
            A file that is damaged where it says what it has, of another version, or from a manager
            of another model, dtype, page size, layout or tensor parallel degree; then nothing has
            changed. A manager without a pool or a prefix cache.
        TypeError
            `model` is something else.
        OSError
            The file cannot be read.

        Notes
        -----
        Pages are found once they are filled and their checksums were compared. A page that is
        damaged is left out, with what continues it. Takes free pages, and evicts none: where there
        are fewer than the file has, what would have been evicted last comes back. Replica `r` of
        the file goes to replica ``r % num_replicas``. Other threads go on; where they reset the
        caches meanwhile, the rest is left out. Costs reading what is not cached.
        """
        from kvcore.snapshots.restoring import restore_cache

        require_model(model)
        return restore_cache(self._pools(), path, model)
