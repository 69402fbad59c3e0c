"""Optimizer steps of an island, every few of which an outer step follows.

The ranks of an island synchronize gradients as a job of their own. Rounds are counted in steps of the optimizer. All
islands count equally: a `GradScaler` skips a step on all ranks of the job or on none (see `engine.grad_scaler`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from mics_strategy.comm.placement import digest
from mics_strategy.comm.work import Work
from mics_strategy.engine.build import BuildContext
from mics_strategy.engine.grad_scaler import JOB_MESH
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.module_buffers import ModuleBuffers
from mics_strategy.engine.optimizer.owner_exchange import OwnerExchange
from mics_strategy.engine.optimizer.target import OptimizerTarget
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.engine.step import Engine
from mics_strategy.errors import LifecycleError
from mics_strategy.outer.state import OuterSGD, make_outer_buckets


class OptimizersOfStep:
    """The optimizers that step behind one backward: an outer step comes behind the last of them.

    There are as many as in the first step. That one is complete when its optimizers have all trained parameters.

    Args:
        parameters: Parameters that were trained when the model was sharded.
    """

    def __init__(self, parameters: list[ShardedParameter]) -> None:
        self._names = {id(parameter): parameter.mics_name for parameter in parameters}
        self._left = set(self._names)  # in the first step
        self._num_expected = 0  # 0 in the first step
        self._num_stepped = 0

    def begin_step(self, *, is_late: bool) -> None:
        """The first optimizer behind a backward has stepped.

        Args:
            is_late: Whether an outer step was due behind the step before, and did not come.
        """
        is_short = self._num_expected and self._num_stepped < self._num_expected
        if is_late or is_short:
            problem = f"{self._num_stepped} optimizers stepped behind one backward, and {self._num_expected} before"
            if not self._num_expected:
                problem = f"no optimizer has `{next(iter(self._names[key] for key in self._left), '')}`"
            raise LifecycleError(
                f"An outer step comes behind the last optimizer of a step, but {problem}. Give all trained parameters "
                "to optimizers, let the same number step behind every backward (with fp16 a scaler may skip one of "
                "several: use bf16), or use outer_every=0."
            )
        self._num_expected, self._num_stepped = self._num_expected or self._num_stepped, 0

    def take(self, parameters: list[ShardedParameter]) -> bool:
        """An optimizer with `parameters` has stepped. Returns whether it is the last one of this step."""
        self._num_stepped += 1
        if not self._num_expected:
            was_complete = not self._left
            self._left.difference_update(map(id, parameters))
            return not self._left and not was_complete
        if self._num_stepped > self._num_expected:
            raise LifecycleError(
                f"An outer step comes behind the last optimizer of a step, and {self._num_stepped} stepped behind one "
                f"backward, {self._num_expected} before. Let the same number step behind every backward, or use "
                "outer_every=0."
            )
        return self._num_stepped == self._num_expected


class OuterTarget(OptimizerTarget):
    """Engine's side of the optimizer steps of an island.

    Attributes:
        buckets: Outer state of the trainable buckets.
        num_in_round: Optimizer steps since the last outer step.
    """

    def __init__(self, engine: Engine, context: BuildContext, sharded_params: WeakIdKeyDictionary) -> None:
        super().__init__(engine, context, sharded_params)
        config = context.config
        self.buckets = make_outer_buckets(engine.units, context.memory, context.device)
        self.num_in_round = 0
        self._every = config.outer_every
        self._sgd = OuterSGD(lr=config.outer_lr, momentum=config.outer_momentum)
        self._broadcasts_buffers = config.broadcast_buffers
        self._optimizers = OptimizersOfStep([p for outer in self.buckets for p in outer.bucket.sharded_params])
        self._has_anchor = False  # taken before the first step, after whatever is loaded
        self._is_late = False  # an outer step was due, and its last optimizer has not stepped

    @override
    def follow(self, model: nn.Module, buffers: ModuleBuffers) -> None:
        self._buffers = buffers
        setattr(self._groups.trainable_placement.device_mesh, JOB_MESH, self._groups.island.job_mesh)
        on_gradients = self.engine.on_gradients

        def begin_round() -> None:
            if not self._has_anchor:
                self._check_equal()
                self.fill()
                self._has_anchor = True
            on_gradients()

        self.engine.on_gradients = begin_round

        def on_load(_: nn.Module, incompatible: Any) -> None:
            self.check_load(incompatible.missing_keys)
            self.restart()

        for module in model.modules():  # also of a part of the model, which is loaded by itself
            module.register_load_state_dict_post_hook(on_load)

    def fill(self) -> None:
        """Set the outer state to that of a round which begins with the present parameters, unless one has begun."""
        for outer in self.buckets if not self._has_anchor else ():
            outer.set_anchor()

    def _check_equal(self) -> None:
        """Raise if islands begin a round with different parameters. Collective over all ranks."""
        digests = [int(digest(outer.bucket.master_shard)) for outer in self.buckets]
        shard = self._groups.trainable_placement.index
        by_rank = self._groups.agree_on((shard, digests), "parameters with which a round begins")
        first = {index: found for index, found in reversed(by_rank)}
        for rank, (index, found) in enumerate(by_rank):
            for outer, own, other in zip(self.buckets, found, first[index], strict=True):
                if own != other:
                    raise LifecycleError(
                        f"Islands begin a round with different parameters: unit `{outer.bucket.spec.name}` on rank "
                        f"{rank}. They were loaded from a checkpoint that was saved between outer steps, or written "
                        "on some ranks alone. Load optimizers with the model, or the same values on all ranks."
                    )

    @override
    def restart(self) -> None:
        self._has_anchor, self._is_late, self.num_in_round = False, False, 0

    def resume(self, num_in_round: int) -> None:
        """Continue a round: the outer state was loaded."""
        self._has_anchor, self._is_late, self.num_in_round = True, False, num_in_round

    def check_load(self, missing: Sequence[str]) -> None:
        """Raise if a part of the parameters is loaded while the others differ between islands.

        Args:
            missing: Names that are not loaded.
        """
        if self.num_in_round and missing:
            raise LifecycleError(
                f"A state dict without `{missing[0]}` was loaded {self.num_in_round} steps after an outer step, when "
                f"the islands' parameters differ. Load it after a step whose number is a multiple of {self._every} "
                "(`outer_every`), or load all parameters."
            )

    @override
    def post_step(self, parameters: Iterable[ShardedParameter], exchanges: list[OwnerExchange]) -> None:
        stepped = list(parameters)
        if self.engine.reducer.window.num_backwards:
            self._optimizers.begin_step(is_late=self._is_late)
            self.num_in_round += 1
        is_last, is_round_over = self._optimizers.take(stepped), self.num_in_round >= self._every  # a loaded one: more
        is_due, self._is_late = is_last and is_round_over, is_round_over and not is_last
        if is_due:
            self._outer_step()
        super().post_step(stepped, exchanges)
        if is_due:
            self.last_step = dataclasses.replace(self.last_step, has_outer_step=True)

    def _outer_step(self) -> None:
        """Average over islands, and step. Collective over all ranks; see `outer.state`."""
        comm = self._groups.island.outer_comm
        if comm is None:
            raise LifecycleError("There is one island only. This is a defect of the engine. Please report it.")
        self._check_trained()
        with torch.no_grad():
            works: list[Work] = []
            for outer in self.buckets:
                works.append(outer.start(comm))
                if not comm.transports[0].blocks_host:  # one after the other, in one workspace, on the stream
                    works[-1].wait()
            for outer, work in zip(self.buckets, works, strict=True):
                work.wait()
                outer.finish(self._sgd, self._groups.scopes.num_islands)
        if self._broadcasts_buffers:
            self._buffers.synchronize_islands()
        self.num_in_round = 0

    def _check_trained(self) -> None:
        """Raise for a parameter that was frozen later: momentum would still move it."""
        for outer in self.buckets:
            for sharded in outer.bucket.sharded_params:
                if not sharded.requires_grad:
                    raise LifecycleError(
                        f"`{sharded.mics_name}` was frozen after `shard()`, and the momentum of the outer step would "
                        "still move it. Freeze it before `shard()`, or use outer_every=0."
                    )


def outer_of(sharded: Sharded) -> OuterTarget | None:
    """The outer steps of a sharded model; None without `outer_every`."""
    target = sharded.internals.target
    return target if isinstance(target, OuterTarget) else None
