"""Which optimizers cannot step on this model, and what should be done instead?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from mics_strategy.engine.optimizer.locality import UpdateLocality
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.errors import ConfigError

_KEEPS_PARAMETERS = ("LBFGS",)  # a list of its own, from which shards cannot be hidden in a step
_SHARDS_BY_ITSELF = "ZeroRedundancyOptimizer"
_ELEMENTWISE = "an optimizer that updates each element by itself (AdamW, SGD, ...)"


def check_no_foreign_params(optimizer: Optimizer) -> None:
    """Refuse sharded parameters beside others, whose gradients no rank would share: replicas would drift apart.

    Raises:
        ConfigError: Naming the first parameter that no sharded model has.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    if not any(isinstance(parameter, ShardedParameter) for group in groups for parameter in group):
        return
    for index, group in enumerate(groups):
        for position, parameter in enumerate(group):
            if parameter.requires_grad and not isinstance(parameter, ShardedParameter):
                raise ConfigError(
                    f"Parameter {position} of group {index} of {type(optimizer).__name__}, shape "
                    f"{tuple(parameter.shape)}, belongs to no sharded model, so each rank would train its own. Make "
                    "it a parameter of the model before `shard()`, or give it an optimizer of its own."
                )


def check_not_stale(optimizer: Optimizer, sharded_param_for: Callable[[torch.Tensor], ShardedParameter | None]) -> None:
    """An optimizer built before `shard()` holds parameters that no model uses: it would train nothing, in silence.

    Args:
        optimizer: About to step.
        sharded_param_for: Gives the sharded parameter that took the place of a plain one.

    Raises:
        ConfigError: Naming the first such parameter.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        sharded = sharded_param_for(parameter)
        if sharded is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} was built before `shard()` and still holds the plain "
                f"`{sharded.mics_name}`, which the model no "
                "longer uses. Call `optimizer = sharded.adopt(optimizer)`, or build the optimizer after `shard()`."
            )


def check_param_groups_only(optimizer: Optimizer) -> None:
    """Refuse optimizers that keep their parameters in more places than their groups.

    Raises:
        ConfigError: For the ones known to.
    """
    if any(cls.__name__ == _SHARDS_BY_ITSELF for cls in type(optimizer).__mro__):
        inner = getattr(optimizer, "_optim_constructor", None)
        name = getattr(inner, "__name__", "its `optimizer_class`")
        raise ConfigError(
            f"{_SHARDS_BY_ITSELF} deals whole parameters to ranks, which hold shards of them already. Use {name} "
            "itself: its states are sharded as `optimizer` of the configuration says."
        )
    if any(cls.__name__ in _KEEPS_PARAMETERS for cls in type(optimizer).__mro__):
        raise ConfigError(
            f"{type(optimizer).__name__} needs whole tensors of all parameters together, which no scope offers. Use "
            f"{_ELEMENTWISE}."
        )


def check_locality(optimizer: Optimizer, localities: list[UpdateLocality], optimizer_layout: str) -> None:
    """Refuse an optimizer that looks further than the tensors that a rank holds.

    Args:
        optimizer: About to step.
        localities: Of its groups.
        optimizer_layout: Of the configuration.

    Raises:
        ConfigError: It needs whole tensors where there are rows, or all tensors together.
    """
    name = type(optimizer).__name__
    if UpdateLocality.GLOBAL in localities:
        raise ConfigError(
            f"{name} updates a tensor by what other tensors hold, as a trial on small tensors shows, and each rank "
            f"updates a part of them. Use {_ELEMENTWISE}, or keep optimizer states whole with `optimizer='none'`."
        )
    if UpdateLocality.PER_TENSOR in localities and optimizer_layout == "rows":
        raise ConfigError(
            f"{name} needs whole tensors, and each rank holds rows of them. Deal whole tensors to ranks with "
            f"`optimizer_layout='tensors'`, keep optimizer states whole with `optimizer='none'`, or use {_ELEMENTWISE}."
        )
