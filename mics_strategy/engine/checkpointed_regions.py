"""Checkpointed regions: forwards that autograd recomputes together.

A non-reentrant checkpoint of torch runs its region again when a backward reads the first tensor that the region saved.
The recomputation all-gathers every unit of the region, before most of their backwards. Ranks whose losses see different
units would begin it at different moments, or never, and wait for each other forever. So the engine decides when it
begins: at the last unit of the region, whether this rank's backward enters that unit or skips it.

The engine saves a tensor of its own in front of every forward in a region, through the hooks of the checkpoint. Reading
the first one begins the recomputation. As torch ends a recomputation with the last saved tensor, none ends before the
all-gather of its last unit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from mics_strategy.engine.unit import Unit

_CHECKPOINT_MODULE = "torch.utils.checkpoint"
_MARK = torch.empty(0)
_top_hooks: Callable[[bool], tuple[Any, Any] | None] = torch._C._autograd._top_saved_tensors_default_hooks
_pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks


class CheckpointedRegion:
    """One call of a checkpoint around forwards of units.

    Args:
        pack: Hook with which the checkpoint saves tensors.
        unpack: Hook with which it reads them. Both live as long as the region's graph.

    Attributes:
        units: Units of the region, in the order in which their forwards began.
        is_due: Whether no backward has reached the region.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self.units: list[Unit] = []
        self.is_due = True
        self._pack = weakref.ref(pack)
        self._unpack = weakref.ref(unpack)
        self._saved: Any = None

    def save_mark(self) -> None:
        """Save a tensor while the region runs, or is recomputed."""
        pack = self._pack()
        if pack is not None:
            saved = pack(_MARK)
            self._saved = saved if self._saved is None else self._saved

    @property
    def is_recomputing(self) -> bool:
        """Whether the backward that runs now has begun to recompute the region."""
        return torch._C._current_graph_task_id() in getattr(self._saved, "handles", ())

    def recompute(self) -> bool:
        """Recompute the region for the backward that runs now.

        Returns False where nothing of its graph is left.
        """
        unpack = self._unpack()
        if unpack is None:
            return False
        unpack(self._saved)
        return True


class CheckpointedRegions:
    """The checkpointed regions of one model.

    Attributes:
        engine_recomputes: Whether the engine has begun the recomputation that runs now.
    """

    def __init__(self) -> None:
        self.engine_recomputes = False
        self._by_hook: weakref.WeakKeyDictionary[Any, CheckpointedRegion] = weakref.WeakKeyDictionary()

    def begin_forward(self, unit: Unit) -> tuple[CheckpointedRegion, ...]:
        """Save a mark in the regions around a forward that begins.

        Returns them, outermost first. In a recomputation they are other ones than in the forward.
        """
        if _top_hooks(False) is None:
            return ()
        regions = []
        for pack, unpack in _running_hooks():
            if getattr(pack, "__module__", "") == _CHECKPOINT_MODULE:
                region = self._by_hook.get(pack)
                if region is None:
                    region = self._by_hook[pack] = CheckpointedRegion(pack, unpack)
                region.units.append(unit)
                region.save_mark()
                regions.append(region)
        return tuple(regions)

    def recompute(self, region: CheckpointedRegion) -> bool:
        """See `CheckpointedRegion.recompute`."""
        before, self.engine_recomputes = self.engine_recomputes, True
        try:
            return region.recompute()
        finally:
            self.engine_recomputes = before


def _running_hooks() -> list[tuple[Any, Any]]:
    """Pairs of hooks that save and read tensors now, outermost first."""
    stack: list[tuple[Any, Any]] = []
    while (hooks := _top_hooks(True)) is not None:
        stack.append(hooks)
        _pop_hooks()
    stack.reverse()
    for pack, unpack in stack:
        _push_hooks(pack, unpack)
    return stack
