"""What checkpoints and frameworks read and set of a sharded model, beside what scripts use (`handle`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

import torch
from torch.optim import Optimizer

from mics_strategy.engine.build import BuildContext
from mics_strategy.engine.feedback import GradFeedback
from mics_strategy.engine.optimizer.step import StepHooks
from mics_strategy.engine.optimizer.target import OptimizerTarget
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.engine.step import Engine

_log = logging.getLogger(__name__)


class Internals:
    """Parts of one sharded model.

    Attributes:
        engine: Its engine.
        groups: Its process groups.
        target: Engine's side of its optimizer steps.
        step_hooks: Hooks around its optimizer steps.
        units: Units in module order, the root first.
        context: Objects that the engine was built with.
        depths: Number of units around each unit.
    """

    def __init__(
        self,
        engine: Engine,
        context: BuildContext,
        depths: list[int],
        target: OptimizerTarget,
        step_hooks: StepHooks,
    ) -> None:
        self.engine = engine
        self.context = context
        self.depths = depths
        self.groups = context.groups
        self.target = target
        self.step_hooks = step_hooks
        self.units = engine.units
        self._has_warned = False

    @property
    def parameters(self) -> list[ShardedParameter]:
        """All sharded parameters, unit by unit."""
        return [sharded for unit in self.units for bucket in unit.buckets for sharded in bucket.sharded_params]

    @property
    def index(self) -> int:
        """Index of this rank's shard in the optimizer scope."""
        return self.groups.trainable_placement.index

    @property
    def replica(self) -> tuple[int, int]:
        """Index of this rank among the ranks that hold the same shards, and their number."""
        span = self.groups.scopes.span(self.groups.scopes.optimizer, self.groups.scopes.world_size)
        return span.index(self.groups.rank), span.size

    def owner_of(self, optimizer: Optimizer, parameter: torch.Tensor) -> int | None:
        """The shard index of the owner of `parameter`; None without an owner.

        Only ranks with the owner's shard index hold the optimizer states of an owned parameter.
        """
        return self.step_hooks.swap_of(optimizer).owner_of(parameter)

    def sharded_param_for(self, parameter: torch.Tensor) -> ShardedParameter | None:
        """The sharded parameter for one of this model, sharded or plain; otherwise None."""
        if self.target.owns(parameter):
            return cast("ShardedParameter", parameter)
        return self.target.sharded_param_for(parameter)

    @property
    def generators(self) -> list[torch.Generator]:
        """Random generators of this rank for stochastic rounding in codecs."""
        return self.groups.generators

    @property
    def feedback(self) -> list[GradFeedback]:
        """Residuals of error feedback of this rank, one object for each trainable bucket.

        Waits for the hops in flight, which write to them.
        """
        self.engine.reducer.wait()
        return [grad_bucket.feedback for grad_bucket in self.engine.reducer.all_grad_buckets]

    @property
    def pending_micro_steps(self) -> int:
        """Micro-steps since the last optimizer step whose gradients are still pending.

        Checkpoints do not hold pending gradients.
        """
        return self.engine.reducer.num_pending_backwards

    def warn_pending_gradients(self) -> None:
        """Warn once, on rank 0, that a checkpoint does not hold the pending gradients."""
        count, has_warned = self.pending_micro_steps, self._has_warned
        self._has_warned = has_warned or count > 0
        if count and not has_warned and self.groups.rank == 0:
            _log.warning(
                "Saved after %d micro-steps whose gradients no optimizer step has used. Gradients are not in a "
                "checkpoint: a job that resumes from it continues without them. Save right after an optimizer step.",
                count,
            )

    def set_references(self, values: Mapping[str, torch.Tensor] | None = None) -> None:
        """Set what param syncs of differences add to. Collective.

        Does nothing unless `weight_codec` encodes differences. Called where parameters have changed otherwise than by
        an optimizer: the next sync is then exact.

        Args:
            values: Values that ranks received of this rank's part of each parameter, by name; default: that part.

        Cost:
            An unencoded param sync of every bucket, outside of the plan; memory for the largest shard.
        """
        if not self.groups.scopes.codecs.has_differences:
            return
        for bucket in (bucket for unit in self.units for bucket in unit.buckets):
            shard = bucket.master_shard.to(bucket.spec.param_dtype, copy=True)
            for param_slice in bucket.layout.param_slices:
                if values is not None and param_slice.name in values:
                    param_slice.view_in(shard, bucket.placement.index).copy_(values[param_slice.name])
            bucket.set_reference(shard)
