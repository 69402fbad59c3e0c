"""Synchronization of module buffers, which are not sharded.

Training changes some buffers from each rank's own data (running statistics of BatchNorm, codebooks). As in plain data
parallel training, rank 0's buffers count. Rank 0 broadcasts them when the model is sharded, before a training forward
that follows one with synchronized gradients (as `DistributedDataParallel` with ``broadcast_buffers=True`` and
``no_sync``), and before the model is evaluated or saved.

Where parameters are not sharded, ranks may run different forwards. Their only common event is that gradients become
final, once per optimizer step. There rank 0 broadcasts the buffers in that event. What a script writes to them between
it and the next forward must be the same on all ranks; the next step compares it.

One broadcast sends all buffers that may have changed. torch does not count writes by kernels and through ``.data``, so
every small buffer is sent. Large ones (masks, tables) are compared with the values last sent, and one small all-reduce
determines which of them are sent.

Ranks have agreed on the buffers in a broadcast, so its size is the same on all ranks whatever happens to the modules.
Where a persistent buffer is registered or replaced later by one of another shape, all ranks must do so, and agree anew.
A non-persistent one is then a cache of its rank, such as a table that grows with the longest sequence so far. It is not
synchronized, and neither are sparse buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor

from mics_strategy.comm.consensus import Rendezvous, gather_objects
from mics_strategy.comm.control import ControlGroup, as_dense
from mics_strategy.comm.placement import compare_value
from mics_strategy.comm.transport import timeout_of
from mics_strategy.engine.build import BuildContext
from mics_strategy.engine.lifecycle import UnitPhase
from mics_strategy.engine.step import Engine
from mics_strategy.engine.storage_guard import explain_refusal
from mics_strategy.engine.tensor_memory import digest_of_places
from mics_strategy.errors import ConfigError, LifecycleError

LARGE_BYTES = 1 << 16  # size from which a buffer is compared before it is sent


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Properties of a buffer that ranks must share before it can be sent.

    Attributes:
        shape: Its shape; 1 in dimensions that are expanded.
        dtype: Its dtype.
        is_persistent: Whether it is part of the state dict.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_persistent: bool

    @property
    def num_bytes(self) -> int:
        """Bytes that a broadcast of it sends."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"shape {self.shape}, {self.dtype}"


def buffer_specs(model: nn.Module) -> dict[str, BufferSpec]:
    """Specs of the buffers of a model that a broadcast can send."""
    return {name: spec for name, (spec, _) in _dense_buffers(model).items()}


def agreed_specs(by_rank: Sequence[dict[str, BufferSpec]]) -> dict[str, BufferSpec]:
    """The buffers that rank 0 sends. All ranks must have the same persistent ones.

    Args:
        by_rank: Specs of each rank's buffers, by name.

    Raises:
        ConfigError: A rank has another shape or dtype, or lacks one. The error names the buffer and both ranks.
    """
    persistent = [{name: spec for name, spec in specs.items() if spec.is_persistent} for specs in by_rank]
    for rank, specs in enumerate(persistent):
        for name in (*persistent[0], *specs):
            if specs.get(name) != persistent[0].get(name):
                first, other = (one.get(name, "none") for one in (persistent[0], specs))
                raise ConfigError(
                    f"The buffer `{name}` differs between ranks: {first} on rank 0, {other} on rank {rank}. Rank 0's "
                    "buffers count on all ranks. Register it with the same shape on every rank, or with "
                    "`persistent=False`: then each rank keeps its own."
                )
    return by_rank[0]


def _check_own_memory(buffer: torch.Tensor, name: str) -> None:
    """Check that a buffer does not share the memory of resharded parameters.

    Raises:
        LifecycleError: It does: a forward has kept a parameter.
    """
    try:
        buffer.data_ptr()
    except RuntimeError as error:
        if explain_refusal(error) is None:
            return  # a class of tensor without memory of its own
        raise LifecycleError(
            f"The buffer `{name}` shares memory with a parameter, which other values use now. Keep a copy: "
            "`self.weight.detach().clone()`."
        ) from error


def _dense_buffers(model: nn.Module) -> dict[str, tuple[BufferSpec, torch.Tensor]]:
    """Spec and values of each buffer with values in dense memory, by its first name."""
    found: dict[int, tuple[str, BufferSpec, torch.Tensor]] = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DTensor) or buffer is None or id(buffer) in found:
                continue  # a DTensor is one and the same on all ranks
            if buffer.layout is torch.strided and buffer.numel():
                dense = as_dense(buffer)
                _check_own_memory(dense, name)
                spec = BufferSpec((*dense.shape,), buffer.dtype, name not in module._non_persistent_buffers_set)
                found[id(buffer)] = (f"{path}.{name}" if path else name, spec, dense)
    return {name: (spec, dense) for name, spec, dense in found.values()}


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
        self._received: dict[str, tuple[torch.Tensor, int]] = {}  # and versions after the last broadcast
        self._flat = torch.empty(0, dtype=torch.uint8, device=device)
        self._rendezvous = Rendezvous(f"buffers/{context.groups.resources.number}")
        self._agreed = agreed_specs(gather_objects(buffer_specs(model)))
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
            self._received.clear()  # DDP has no broadcast either, before the forward that follows
            return
        if self._syncs_with_forwards and self._is_sync_due:
            self.synchronize()
        if self._syncs_with_gradients and self._is_sync_due and not self._may_differ:
            self._compare_written()
        self._may_differ = True
        self._is_sync_due = torch.is_grad_enabled() and not self._is_deferring

    def _on_gradients(self) -> None:
        """Synchronize buffers when gradients become final, if forwards may differ."""
        self._may_differ = True
        if self._syncs_with_gradients and not self._is_deferring:
            self.synchronize()

    def _compare_written(self) -> None:
        """Let the next step compare the buffers that were written to since their broadcast. Sends nothing."""
        for name, (_, buffer) in _dense_buffers(self._model).items() if self._received else ():
            received, version = self._received.get(name, (buffer, _version(buffer)))
            if received.data_ptr() != buffer.data_ptr() or version != _version(buffer):  # a view is new each time
                compare_value(digest_of_places(buffer.contiguous()), self._device, name)

    @property
    def _is_deferring(self) -> bool:
        """Whether the loop declared that more micro-steps follow before synchronization."""
        return self._engine.reducer.window.declared is False

    def synchronize_islands(self) -> None:
        """Broadcast rank 0's buffers to all islands, whose values differ. Collective over all ranks of the job."""
        self._may_differ = True
        self._last_sent.clear()
        self.synchronize(self._groups.island.job_group)

    def synchronize(self, control: ControlGroup | None = None) -> None:
        """Broadcast the first rank's buffers if training may have changed them. Collective.

        Args:
            control: Ranks that take part; by default those that step together: all, or an island.

        Cost:
            One broadcast of all small and all changed large buffers; with large buffers, one all-reduce of a flag each,
            for which the host waits.
            Memory: a copy of the sent buffers, and one of each large buffer.
        """
        control = control or self._groups.world_group
        if self._may_differ and control is not None:
            found = _dense_buffers(self._model)
            self._agree(found)
            if self._agreed:
                buffers = {name: buffer for name, (spec, buffer) in found.items() if self._agreed.get(name) == spec}
                versioned = tuple(buffer for buffer in buffers.values() if not buffer.is_inference())
                # Inference tensors may be written in inference mode only, and have no version.
                with torch.inference_mode(), _unsafe_preserve_version_counter(versioned):
                    self._broadcast_values(buffers, control)
                if self._syncs_with_gradients:
                    self._received = {name: (buffer, _version(buffer)) for name, buffer in buffers.items()}
        self._may_differ = False

    def _agree(self, found: dict[str, tuple[BufferSpec, torch.Tensor]]) -> None:
        """Agree on buffers again if persistent ones have other shapes than agreed.

        Collective then.

        Raises:
            LifecycleError: Other ranks have not changed theirs.
            ConfigError: Ranks have changed theirs differently.
        """
        specs = {name: spec for name, (spec, _) in found.items()}
        changed = [
            name
            for name in {**specs, **self._agreed}
            if specs.get(name) != self._agreed.get(name) and _is_persistent(specs.get(name), self._agreed.get(name))
        ]
        if not changed:
            return
        problem = (
            f"The persistent buffer `{changed[0]}` was registered or replaced after `shard()` on rank "
            f"{self._groups.rank} ({specs.get(changed[0], 'none')}), and not on all other ranks. Rank 0's buffers "
            "count on all ranks. Register it on every rank, with one shape, or with `persistent=False`: then each rank "
            "keeps its own."
        )
        timeout_s = timeout_of(dist.group.WORLD, self._device.type).total_seconds()
        if self._rendezvous.missing_ranks(timeout_s, partial(self._groups.resources.watchdog.check_absent, problem)):
            raise LifecycleError(problem)
        self._agreed = agreed_specs(gather_objects(specs))

    def _broadcast_values(self, buffers: dict[str, torch.Tensor], control: ControlGroup) -> None:
        """Broadcast rank 0's values of the agreed buffers. A rank with others takes part.

        Args:
            buffers: This rank's buffers as agreed, by name.
            control: Group of all ranks.
        """
        sent = dict(self._agreed)
        large = [name for name, spec in sent.items() if spec.num_bytes >= LARGE_BYTES]
        for name in self._unchanged(large, buffers, control):
            del sent[name]
        names = sorted(sent, key=lambda name: -sent[name].dtype.itemsize)  # aligns every view
        local = [name for name in names if not sent[name].is_persistent]  # rank 0 may have another one now
        size = sum(sent[name].num_bytes for name in names)
        if self._flat.numel() != size + len(local):
            self._flat = torch.empty(size + len(local), dtype=torch.uint8, device=self._device)
        pieces = dict(zip(names, _carve(self._flat[:size], [sent[name] for name in names]), strict=True))
        is_sent = dict(zip(local, self._flat[size:].view(torch.bool), strict=True))
        if control.index == 0:
            for name, flag in is_sent.items():
                flag.fill_(name in buffers)
            for name in pieces.keys() & buffers.keys():
                pieces[name].copy_(buffers[name])
        if self._flat.numel():
            control.broadcast(self._flat, "buffers")
        for name in pieces.keys() & buffers.keys() if control.index else ():
            buffer = buffers[name]
            if name in is_sent:
                torch.where(is_sent[name], pieces[name], buffer, out=buffer)
            else:
                buffer.copy_(pieces[name])
        self._last_sent.update({name: buffers[name].clone() for name in large if name in sent and name in buffers})

    def _unchanged(self, large: list[str], buffers: dict[str, torch.Tensor], control: ControlGroup) -> list[str]:
        """Names of large buffers with the last sent values on all ranks. Collective.

        A buffer that this rank does not have as agreed counts as such.
        """
        if not large:
            return []
        changed = torch.stack([_differs(buffers.get(name), self._last_sent.get(name), self._device) for name in large])
        flags = control.all_reduce_scalar(changed.view(torch.uint8), is_max=True).tolist()  # the host waits here
        return [name for name, flag in zip(large, flags, strict=True) if not flag]


def _version(buffer: torch.Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def _is_persistent(*specs: BufferSpec | None) -> bool:
    return any(spec is not None and spec.is_persistent for spec in specs)


def _differs(buffer: torch.Tensor | None, last: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Whether a buffer has other bits than last, so that NaN equals itself.

    Returns [] bool, on the device; no buffer has not changed.
    """
    if buffer is None:
        return torch.zeros((), dtype=torch.bool, device=device)
    if last is None or last.shape != buffer.shape or last.dtype != buffer.dtype:
        return torch.ones((), dtype=torch.bool, device=device)
    new, old = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (buffer, last))
    return (new != old).any()


def _carve(flat: torch.Tensor, specs: Sequence[BufferSpec]) -> list[torch.Tensor]:
    """Views of `flat` with the dtypes and shapes of buffers."""
    sizes = [spec.num_bytes for spec in specs]
    return [piece.view(spec.dtype).view(spec.shape) for piece, spec in zip(flat.split(sizes), specs, strict=True)]
