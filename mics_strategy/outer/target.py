"""Optimizer steps of an island, every few of which an outer step follows.

The ranks of an island synchronize gradients as a job of their own. Rounds are counted in steps of the optimizer. All
islands count equally: a `GradScaler` skips a step on all ranks of the job or on none (see `engine.grad_scaler`).

    step of a round         ... 10     11     12     13     14     15 ...
    one fragment                start  |----- in flight ----|  end
    compute                            step   step   step      step

Each bucket starts and ends its outer steps by itself; a fragment is no more than the buckets that start behind the same
step. So a checkpoint may be continued with other fragments and delays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from mics_strategy.comm.placement import digest
from mics_strategy.engine.build import BuildContext
from mics_strategy.engine.grad_scaler import JOB_MESH
from mics_strategy.engine.handle import Sharded
from mics_strategy.engine.module_buffers import ModuleBuffers
from mics_strategy.engine.optimizer.owner_exchange import OwnerExchange
from mics_strategy.engine.optimizer.target import OptimizerTarget
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.engine.step import Engine
from mics_strategy.engine.streams import OpStream
from mics_strategy.errors import LifecycleError
from mics_strategy.outer.state import OuterBucket, OuterSGD, make_outer_buckets


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
        num_in_round: Optimizer steps of the present round; 0 where the islands' parameters are equal.
    """

    def __init__(self, engine: Engine, context: BuildContext, sharded_params: WeakIdKeyDictionary) -> None:
        super().__init__(engine, context, sharded_params)
        config, scopes = context.config, context.groups.scopes
        self._round = config.outer_round
        self.buckets = make_outer_buckets(engine.units, self._round, context.memory, context.device)
        self.num_in_round = 0
        self._stream = OpStream(context.device, encodes_ahead=scopes.is_quantized("outer_all_reduce"))
        self._sgd = OuterSGD(lr=config.outer_lr, momentum=config.outer_momentum, alpha=config.outer_alpha)
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
        for outer in self.buckets:
            outer.drop()
        self._has_anchor, self._is_late, self.num_in_round = False, False, 0

    def resume(self, num_in_round: int, in_flight: Set[OuterBucket]) -> None:
        """Continue a round: the outer state is being loaded.

        Args:
            num_in_round: Steps of the round. One that was longer ends behind the next step.
            in_flight: Buckets whose outer steps have started, and whose sums are going to be loaded.
        """
        every = self._round.every
        is_inside = num_in_round < every or (num_in_round == every and self._round.is_streaming)
        self.num_in_round = num_in_round if is_inside else every - 1
        self._has_anchor, self._is_late = True, False
        for outer in self.buckets:
            outer.drop()
            if outer in in_flight:
                outer.resume((self.num_in_round - outer.starts_behind) % every)

    @property
    def when_equal(self) -> str:
        """When the islands' parameters are equal, for errors."""
        if self._round.is_streaming:
            return "behind `finish_delayed(sharded)`"
        return f"after a step whose number is a multiple of {self._round.every} (`outer_every`)"

    def check_load(self, missing: Sequence[str]) -> None:
        """Raise if a part of the parameters is loaded while the others differ between islands.

        Args:
            missing: Names that are not loaded.
        """
        if self.num_in_round and missing:
            raise LifecycleError(
                f"A state dict without `{missing[0]}` was loaded {self.num_in_round} steps after an outer step, when "
                f"the islands' parameters differ. Load it {self.when_equal}, or load all parameters."
            )

    @override
    def post_step(self, parameters: Iterable[ShardedParameter], exchanges: list[OwnerExchange]) -> None:
        stepped = list(parameters)
        if self.engine.reducer.window.num_backwards:
            self._optimizers.begin_step(is_late=self._is_late)
            self.num_in_round = self.num_in_round % self._round.every + 1
            for outer in self.buckets:
                outer.age += 1
        is_last = self._optimizers.take(stepped)
        ending = [outer for outer in self.buckets if outer.is_in_flight and outer.age >= self._round.delay]
        starting = [outer for outer in self.buckets if outer.starts_behind == self.num_in_round and outer.age > 0]
        self._is_late = not is_last and bool(ending or starting)
        if is_last:
            self._outer_steps(ending, starting)
        super().post_step(stepped, exchanges)
        if is_last and starting:
            units = tuple(dict.fromkeys(outer.unit for outer in starting))
            self.last_step = dataclasses.replace(self.last_step, outer_units=units)

    def _outer_steps(self, ending: list[OuterBucket], starting: list[OuterBucket]) -> None:
        """End and start outer steps behind an optimizer step. Collective over all ranks; see `outer.state`."""
        _check_trained(starting)
        self._finish(ending)
        self._finish(outer for outer in starting if outer.is_in_flight)  # loaded, from another round
        self._start(starting)
        if not self._round.delay:
            self._finish(starting)
        if self.num_in_round == self._round.every:
            if self._broadcasts_buffers:
                self._buffers.synchronize_islands()
            if not self._round.is_streaming:
                self.num_in_round = 0

    def _start(self, buckets: Iterable[OuterBucket]) -> None:
        comm = self._groups.island.outer_comm
        if comm is None:
            raise LifecycleError("There is one island only. This is a defect of the engine. Please report it.")
        with torch.no_grad():
            for outer in buckets:
                outer.start(comm, self._stream)

    def _finish(self, buckets: Iterable[OuterBucket]) -> None:
        with torch.no_grad():
            for outer in buckets:
                outer.finish(self._sgd, self._groups.scopes.num_islands)

    @override
    def finish_delayed(self) -> bool:
        """End outer steps in flight; let what has stepped since take one more. See the function of this name."""
        if not self._round.is_streaming or not self.num_in_round:
            return False
        self.check_no_gradients()
        steps = self._groups.agree_on(self.num_in_round, "finish_delayed (call it on every rank)")
        if len({*steps}) > 1:
            raise LifecycleError(
                f"`finish_delayed()` was called {steps[0]} steps into a round on rank 0, and after other numbers on "
                f"other ranks: {steps}. Call it on all ranks behind the same step."
            )
        self.engine.settle_params()
        in_flight = [outer for outer in self.buckets if outer.is_in_flight]
        is_equal = {outer for outer in in_flight if not outer.age}  # behind their ends
        self._finish(in_flight)
        last = [outer for outer in self.buckets if outer not in is_equal]
        _check_trained(last)
        self._start(last)
        self._finish(last)
        if self._broadcasts_buffers:
            self._buffers.synchronize_islands()
        self.num_in_round = 0
        self.engine.global_order.restart()
        for unit in self.engine.units:
            unit.reshard_if_changed()
        return False


def _check_trained(buckets: Iterable[OuterBucket]) -> None:
    """Raise for a parameter that was frozen later: momentum would still move it."""
    for outer in buckets:
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
