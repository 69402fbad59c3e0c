"""How does each engine train the model?

One small class each, written as its users are told to write it: no engine gets a signal that another one could have
had, too. All use AdamW and a loss divided by the micro-steps of an optimizer step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.entries import Entry
from benchmarks.workload import AWAY, Batch, Workload

_INSIDE, _BETWEEN = "intra_node", "inter_node"  # in the names of our plans' axes
_LAST_PHASES = ("second_hop", "update")  # of a plan, after the backwards
_SMALL = 0.01


class RefusedError(ValueError):
    """The engine says that it does not offer this configuration."""


class Engine(Protocol):
    """A model that can make an optimizer step."""

    @property
    def facts(self) -> dict[str, float]:
        """Numbers that the engine knows of the last step."""
        ...

    def step(self, batches: list[Batch]) -> float:
        """Train on one batch in each micro-step; the mean loss of this rank."""
        ...


class _Plain:
    """The loop that all engines but DeepSpeed share; by itself, every rank for itself, with nothing sent.

    The fact ``micro_steps_s`` is the time of all forwards and backwards.
    """

    def __init__(self, model: torch.nn.Module, workload: Workload, *, is_cast: bool = False) -> None:
        self._timed: dict[str, float] = {}
        self._model: Any = model
        self._dtype = workload.torch_dtype if is_cast else torch.float32
        is_fused = workload.compute == AWAY  # a fourth of the time: cores are for what is sent
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, fused=is_fused)

    def step(self, batches: list[Batch]) -> float:
        """Train on one batch in each micro-step; the mean loss of this rank."""
        start = time.perf_counter()
        losses = []
        for index, batch in enumerate(batches):
            with self._micro_step(index, len(batches)):
                with torch.autocast("cpu", torch.bfloat16, enabled=self._dtype == torch.bfloat16):
                    loss = self._model(batch.inputs, batch.targets)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        self._timed["micro_steps_s"] = time.perf_counter() - start
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).mean())

    @property
    def facts(self) -> dict[str, float]:
        """See `Engine.facts`."""
        return self._timed

    def _micro_step(self, index: int, of: int) -> AbstractContextManager[object]:
        return nullcontext()


class _Ddp(_Plain):
    """DistributedDataParallel, with `no_sync` in all micro-steps but the last."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(DistributedDataParallel(workload.model()), workload, is_cast=True)

    def _micro_step(self, index: int, of: int) -> AbstractContextManager[object]:
        return nullcontext() if index == of - 1 else self._model.no_sync()


class _Fsdp2(_Plain):
    """`fully_shard` for each block and the root.

    Args:
        workload: The model.
        mesh_shape: (ranks,) for full sharding; (nodes, ranks of a node) for hybrid.
        is_deferred: Gradients are reduced between nodes in the last micro-step only.
        is_tuned: Reduce-scatters have a group of their own and two input buffers, which torch offers from 2.13 on.

    Raises:
        RefusedError: `is_tuned` with an older torch.
    """

    def __init__(
        self, workload: Workload, mesh_shape: tuple[int, ...], *, is_deferred: bool, is_tuned: bool = False
    ) -> None:
        names = ("shard",) if len(mesh_shape) == 1 else ("replicate", "shard")
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        options: dict[str, Any] = {"mesh": mesh}
        if workload.dtype != "float32":
            dtype = workload.torch_dtype
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        model = workload.model()
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        if is_tuned:
            fsdp_module: Any = model
            if not hasattr(fsdp_module, "set_separate_reduce_scatter_group"):
                raise RefusedError("FSDP2 of torch before 2.13 has no group of its own for reduce-scatters.")
            fsdp_module.set_separate_reduce_scatter_group()
            fsdp_module.set_reduce_scatter_max_input_buffers(2)
        super().__init__(model, workload)
        self._is_deferred = is_deferred

    def _micro_step(self, index: int, of: int) -> AbstractContextManager[object]:
        if self._is_deferred:
            self._model.set_requires_all_reduce(index == of - 1)
        return nullcontext()


class _Ours(_Plain):
    """`mics_strategy.shard` with a preset.

    The fact ``planned_bytes`` is what the plan of the step says that this rank sends out of its node, and
    ``planned_last_bytes`` what it sends after the backwards. Both are missing where flat collectives over both kinds of
    links send more than a hundredth of that: the plan does not say how much of those leaves. ``planned AXIS`` and
    ``issued AXIS`` are the bytes that this rank sends over one axis, by the plan and as submitted.
    """

    def __init__(self, workload: Workload, preset: str, overrides: dict[str, Any]) -> None:
        from mics_strategy import ConfigError, ShardConfig, shard

        self._declares = overrides.pop("declares", True)
        dtypes = {} if workload.dtype == "float32" else {"param_dtype": workload.dtype, "reduce_dtype": workload.dtype}
        model = workload.model()
        try:
            self._sharded = shard(model, ShardConfig.preset(preset, **{**dtypes, **overrides}))
        except ConfigError as error:
            raise RefusedError(str(error)) from error
        super().__init__(model, workload)

    @property
    def facts(self) -> dict[str, float]:
        """See `Engine.facts`. Asked for after a step, so that planning is no part of it."""
        plan = self._sharded.plan
        leaving = sum(item.sent_bytes for item in plan.collectives if _INSIDE not in item.axis)
        last = sum(p.sent_bytes for p in plan.collectives if _INSIDE not in p.axis and p.phase in _LAST_PHASES)
        mixed = sum(item.sent_bytes for item in plan.collectives if _INSIDE in item.axis and _BETWEEN in item.axis)
        axes: dict[str, float] = {}
        for row in self._sharded.traffic():
            for name, num_bytes in (("planned", row.planned_bytes), ("issued", row.sent_bytes)):
                axes[f"{name} {row.axis}"] = axes.get(f"{name} {row.axis}", 0.0) + num_bytes
        if mixed > _SMALL * leaving:
            return {**self._timed, **axes}
        return {**self._timed, **axes, "planned_bytes": float(leaving), "planned_last_bytes": float(last)}

    def _micro_step(self, index: int, of: int) -> AbstractContextManager[object]:
        return self._sharded.micro_step(index, of=of) if self._declares else nullcontext()


def build(entry: Entry, workload: Workload, *, world_size: int, ranks_per_node: int) -> Engine:
    """Make the engine of `entry` on this rank; the process group exists.

    Raises:
        RefusedError: On every rank, when the engine does not offer what the entry says.
    """
    if entry.is_ours:
        return _Ours(workload, entry.name, dict(entry.overrides))
    hybrid = (world_size // ranks_per_node, ranks_per_node)
    makers: dict[str, Callable[[], Engine]] = {
        "compute": lambda: _Plain(workload.model(), workload, is_cast=True),
        "ddp": lambda: _Ddp(workload),
        "fsdp2": lambda: _Fsdp2(workload, (world_size,), is_deferred=False),
        "fsdp2-hybrid": lambda: _Fsdp2(workload, hybrid, is_deferred=False),
        "fsdp2-hybrid-deferred": lambda: _Fsdp2(workload, hybrid, is_deferred=True),
        "fsdp2-hybrid-tuned": lambda: _Fsdp2(workload, hybrid, is_deferred=True, is_tuned=True),
        "deepspeed-mics": lambda: _deepspeed(workload, world_size, ranks_per_node),
    }
    return makers[entry.name]()


def _deepspeed(workload: Workload, world_size: int, ranks_per_node: int) -> Engine:
    from benchmarks.deepspeed_peer import DeepSpeedMics

    return DeepSpeedMics(workload, world_size=world_size, ranks_per_node=ranks_per_node)
