"""The engine's side of optimizer steps on one sharded model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from mics_strategy.comm.traffic import StageTraffic
from mics_strategy.engine.build import BuildContext
from mics_strategy.engine.hooks import EngineLink
from mics_strategy.engine.module_buffers import ModuleBuffers
from mics_strategy.engine.optimizer.owner_exchange import OwnerExchange, assign_owners_by_bucket
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.engine.schedule import NONE_REPEATED, RepeatedHops
from mics_strategy.engine.step import Engine
from mics_strategy.errors import LifecycleError


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStep:
    """What an optimizer step was made of.

    Attributes:
        num_backwards: Backwards of the step.
        repeated: Second hops that others followed.
        issued: Collectives of the step, with their counts.
        outer_units: Units of which an outer step started behind it, by index.
    """

    num_backwards: int
    repeated: RepeatedHops
    issued: Counter[StageTraffic]
    outer_units: tuple[int, ...] = ()


class OptimizerTarget:
    """Engine's side of the optimizer steps on one sharded model.

    Args:
        engine: Engine of the model.
        context: Configuration, groups, device and memory.
        sharded_params: The sharded parameter that replaced each plain one.

    Attributes:
        engine: Engine of the model.
        device: Device of the parameters.
        random: Random states of the shards.
        optimizer_layout: The layout that the user configured, `"rows"` or `"tensors"`.
        update_locality: The locality that the user declared, or `"auto"`.
        has_whole_states: Whether every rank holds complete optimizer states.
        steps_done: Optimizer steps so far.
        last_step: Backwards and collectives of the last step.
        last_exchanges: Exchanges of the tensors that the last step updated on their owners.
        is_check_due: Whether the next forward first checks that the model still has its sharded parameters.
        is_step_over: Whether no forward has started the next step yet.
    """

    def __init__(
        self,
        engine: Engine,
        context: BuildContext,
        sharded_params: WeakIdKeyDictionary,
    ) -> None:
        self.engine = engine
        self.device = context.device
        self.random = context.groups.trainable_placement.random
        self.optimizer_layout = context.config.optimizer_layout
        self.update_locality = context.config.update_locality
        self.has_whole_states = context.groups.scopes.optimizer == 1
        self.steps_done = 0
        self.last_step = LastStep(num_backwards=1, repeated=NONE_REPEATED, issued=Counter())
        self.last_exchanges: list[OwnerExchange] = []
        self.is_check_due = self.is_step_over = True
        self._groups = context.groups
        self._memory = context.memory
        self._sharded_params = sharded_params
        self._owners: dict[ShardedParameter, int] = {}

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter` is one of the model's sharded parameters."""
        return (
            isinstance(parameter, ShardedParameter)
            and isinstance(parameter.mics_link, EngineLink)
            and parameter.mics_link.belongs_to(self.engine)
        )

    def sharded_param_for(self, parameter: torch.Tensor) -> ShardedParameter | None:
        """The sharded parameter that replaced a plain one; None for any other tensor."""
        return cast("ShardedParameter | None", self._sharded_params.get(parameter))

    def assign_owners(self, parameters: list[ShardedParameter]) -> OwnerExchange:
        """Assign trainable parameters to owners in the optimizer scope; allocate memory.

        Raises:
            LifecycleError: Every rank holds whole tensors already.
        """
        comm = self._groups.shard_group
        if comm is None:
            raise LifecycleError(
                "Owners were requested, but every rank holds whole tensors. This is a defect of the engine. Please "
                "report it."
            )
        buckets = [bucket for unit in self.engine.units for bucket in unit.trainable_buckets]
        owned = assign_owners_by_bucket(buckets, set(parameters), self._owners, self._groups.scopes.optimizer)
        return OwnerExchange(owned, comm, self._groups.trainable_placement.index, self._memory, self.device)

    def follow(self, model: nn.Module, buffers: ModuleBuffers) -> None:
        """Connect with the model and its buffers, once it is sharded."""

    def pre_forward(self, *, is_training: bool) -> None:
        """A forward of the model begins.

        Args:
            is_training: Whether the model is in training mode.
        """

    def begin_body(self, optimizer: Optimizer) -> None:
        """The body of a step begins, or goes on. The optimizer holds sharded parameters."""

    def check_steps_others(self, optimizer: Optimizer) -> None:
        """Raise for an optimizer that steps another one, if that is not supported."""

    def show_committed(self) -> None:
        """Let parameters be those of the last optimizer step that counts. Local."""

    def restart(self) -> None:
        """Parameters were loaded, the same on all ranks: forget what depends on those of before."""

    def finish_delayed(self) -> bool:
        """Finish what is delayed; see the function of this name. Returns whether gradients wait for a step."""
        return False

    def check_no_gradients(self) -> None:
        """Raise if gradients of a backward wait for their step."""
        if self.engine.reducer.is_dirty:
            raise LifecycleError(
                "`finish_delayed()` was called between a backward and its optimizer step. Call it behind the last step "
                "of the training."
            )

    def post_step(self, parameters: Iterable[ShardedParameter], exchanges: list[OwnerExchange]) -> None:
        """Record that an optimizer has changed its parameters.

        Args:
            parameters: Parameters of this model that the optimizer has.
            exchanges: Exchanges of the tensors that the optimizer updated on their owners.
        """
        self.engine.post_step(parameters)
        self.is_check_due = self.is_step_over = True
        if num_backwards := self.engine.reducer.window.num_backwards:
            self.last_step = LastStep(
                num_backwards=num_backwards,
                repeated=self.engine.reducer.end_step(),
                issued=self._groups.traffic_log.drain(),
            )
            self.last_exchanges = [*exchanges]
            self.steps_done += 1
        else:  # another optimizer of the same step
            self.last_step.issued.update(self._groups.traffic_log.drain())
            self.last_exchanges += exchanges
