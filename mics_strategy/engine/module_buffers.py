"""Synchronization of module buffers, which are not sharded.

Training changes some buffers from each rank's own data (running statistics of BatchNorm, codebooks). As in plain data
parallel training, rank 0's buffers count. Rank 0 broadcasts them when the model is sharded, before a training forward
that follows one with synchronized gradients (as `DistributedDataParallel` with ``broadcast_buffers=True`` and
``no_sync``), and before the model is evaluated or saved.

Where parameters are not sharded, ranks may run different forwards. Their only common event is that gradients become
final, once per optimizer step. There rank 0 broadcasts the buffers in that event.

One broadcast sends all buffers that may have changed. torch does not count writes by kernels and through ``.data``, so
every small buffer is sent. Large ones (masks, tables) are compared with the values last sent, and one small all-reduce
determines which of them are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from mics_strategy.comm.control import ControlGroup, as_dense
from mics_strategy.engine.lifecycle import UnitPhase

if TYPE_CHECKING:
    from mics_strategy.engine.build import BuildContext
    from mics_strategy.engine.step import Engine

LARGE_BYTES = 1 << 16  # size from which a buffer is compared before it is sent


class ModuleBuffers:
    """Buffers of one model, and their synchronization.

    Args:
        model: Model whose buffers are moved to the device.
        context: Configuration, process groups and device of the model.
        engine: Engine of the model.
    """

    def __init__(self, model: nn.Module, context: BuildContext, engine: Engine) -> None:
        self._model = model
        self._groups = context.groups
        self._device = device = context.device
        self._engine = engine
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)
        in_training, is_whole = context.config.broadcast_buffers, context.groups.param_comm is None
        self._syncs_with_gradients = in_training and is_whole
        self._syncs_with_forwards = in_training and not is_whole
        self._is_sync_due = True  # before the first training forward, and after one with synchronized gradients
        self._may_differ = True  # before the first synchronization, and after every training forward
        self._last_sent: dict[str, torch.Tensor] = {}  # values of large buffers when they were last sent
        self._flat = torch.empty(0, dtype=torch.uint8, device=device)
        engine.on_gradients = self._on_gradients

    def pre_forward(self) -> None:
        """Synchronize buffers before evaluations, and after synchronized gradients.

        Called for every forward of the root, and by callers that use the model without one. A forward inside of another
        one and a recomputation use the same values as the outer forward.
        """
        if self._engine.is_recomputing or self._engine.units[0].phase is UnitPhase.FORWARD:
            return
        if not self._model.training:
            self.synchronize()
            return
        if self._syncs_with_forwards and self._is_sync_due:
            self.synchronize()
        self._may_differ = True
        self._is_sync_due = torch.is_grad_enabled() and not self._is_deferring

    def _on_gradients(self) -> None:
        """Synchronize buffers when gradients become final, if forwards may differ."""
        self._may_differ = True
        if self._syncs_with_gradients and not self._is_deferring:
            self.synchronize()

    @property
    def _is_deferring(self) -> bool:
        """Whether the loop declared that more micro-steps follow before synchronization."""
        return self._engine.reducer.boundary.declared is False

    def synchronize(self) -> None:
        """Broadcast rank 0's buffers if training may have changed them. Collective.

        Cost:
            One broadcast of all small and all changed large buffers; with large buffers, one all-reduce of a flag each.
            Memory: a copy of the sent buffers, and one of each large buffer.
        """
        if self._may_differ and self._groups.world_group is not None:
            named = {name: buffer for name, buffer in self._model.named_buffers() if buffer.numel()}
            if named:
                versioned = tuple(buffer for buffer in named.values() if not buffer.is_inference())
                # Inference tensors may be written in inference mode only, and have no version.
                with torch.inference_mode(), _unsafe_preserve_version_counter(versioned):
                    dense = {name: as_dense(buffer) for name, buffer in named.items()}
                    self._broadcast_values(dense, self._groups.world_group)
        self._may_differ = False

    def _broadcast_values(self, named: dict[str, torch.Tensor], control: ControlGroup) -> None:
        large = {name: buffer for name, buffer in named.items() if _num_bytes(buffer) >= LARGE_BYTES}
        for name in self._unchanged(large, control):
            del named[name], large[name]
        buffers = sorted(named.values(), key=lambda buffer: -buffer.itemsize)  # aligns every view
        size = sum(map(_num_bytes, buffers))
        if self._flat.numel() != size:
            self._flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        pieces = _carve(self._flat, buffers)
        if control.index == 0:
            for piece, buffer in zip(pieces, buffers, strict=True):
                piece.copy_(buffer)
        if size:
            control.broadcast(self._flat, "buffers")
        if control.index:
            for piece, buffer in zip(pieces, buffers, strict=True):
                buffer.copy_(piece)
        self._last_sent.update({name: buffer.clone() for name, buffer in large.items()})

    def _unchanged(self, large: dict[str, torch.Tensor], control: ControlGroup) -> list[str]:
        """Names of large buffers with the last sent values on all ranks. Collective."""
        if not large:
            return []
        changed = torch.tensor(
            [not _is_same(buffer, self._last_sent.get(name)) for name, buffer in large.items()],
            dtype=torch.int32,
            device=self._device,
        )
        flags = control.all_reduce_scalar(changed, is_max=True).tolist()
        return [name for name, flag in zip(large, flags, strict=True) if not flag]


def _num_bytes(buffer: torch.Tensor) -> int:
    return buffer.numel() * buffer.itemsize


def _is_same(buffer: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two tensors have the same bits, so that NaN equals itself."""
    if other is None or other.shape != buffer.shape or other.dtype != buffer.dtype:
        return False
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (buffer, other)))


def _carve(flat: torch.Tensor, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `flat` with the dtypes and shapes of `buffers`."""
    sizes = [_num_bytes(buffer) for buffer in buffers]
    return [
        piece.view(buffer.dtype).view(buffer.shape) for piece, buffer in zip(flat.split(sizes), buffers, strict=True)
    ]
