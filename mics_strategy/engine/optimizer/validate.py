"""Checks of an optimizer before it steps on a sharded model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from mics_strategy.engine.optimizer.locality import UpdateLocality
from mics_strategy.engine.parameter import ShardedParameter
from mics_strategy.errors import ConfigError

_KEEPS_PARAMETERS = ("LBFGS",)  # keep a second list of the parameters, which a step hook cannot swap
_SHARDS_BY_ITSELF = "ZeroRedundancyOptimizer"
_ELEMENTWISE = "an elementwise optimizer (AdamW, SGD, ...)"


def check_no_foreign_params(optimizer: Optimizer) -> None:
    """Raise for an optimizer with both sharded and plain parameters.

    Gradients of plain parameters are not synchronized, so the plain parameters would diverge between ranks.

    Args:
        optimizer: Optimizer that is about to step.

    Raises:
        ConfigError: A trainable parameter belongs to no sharded model. The error names the first one.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    if not any(isinstance(parameter, ShardedParameter) for group in groups for parameter in group):
        return
    for index, group in enumerate(groups):
        for position, parameter in enumerate(group):
            if parameter.requires_grad and not isinstance(parameter, ShardedParameter):
                raise ConfigError(
                    f"Parameter {position} of group {index} of {type(optimizer).__name__}, shape "
                    f"{tuple(parameter.shape)}, belongs to no sharded model. Its gradient would not be synchronized. "
                    "Make it a parameter of the model before `shard()`, or give it its own optimizer."
                )


def check_not_stale(optimizer: Optimizer, sharded_param_for: Callable[[torch.Tensor], ShardedParameter | None]) -> None:
    """Raise for an optimizer that holds plain parameters from before `shard()`.

    The model no longer uses them, so steps on them would train nothing and raise no error.

    Args:
        optimizer: Optimizer that is about to step.
        sharded_param_for: Function from a plain parameter to the sharded one that replaced it, or None.

    Raises:
        ConfigError: A parameter was replaced. The error names the first one.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        sharded = sharded_param_for(parameter)
        if sharded is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} was built before `shard()` and still holds the plain "
                f"`{sharded.mics_name}`. The model no longer uses that parameter. Call `optimizer = "
                "sharded.adopt(optimizer)`, or build the optimizer after `shard()`."
            )


def check_param_groups_only(optimizer: Optimizer) -> None:
    """Raise for optimizers with references to parameters outside of `param_groups`.

    Args:
        optimizer: Optimizer that is about to step.

    Raises:
        ConfigError: The optimizer is one of those known to do so.
    """
    if any(cls.__name__ == _SHARDS_BY_ITSELF for cls in type(optimizer).__mro__):
        inner = getattr(optimizer, "_optim_constructor", None)
        name = getattr(inner, "__name__", "its `optimizer_class`")
        raise ConfigError(
            f"{_SHARDS_BY_ITSELF} assigns whole parameters to ranks, but these parameters are sharded already. Use "
            f"{name} itself. `ShardConfig.optimizer` shards its states."
        )
    if any(cls.__name__ in _KEEPS_PARAMETERS for cls in type(optimizer).__mro__):
        raise ConfigError(
            f"{type(optimizer).__name__} needs whole tensors of all parameters together. No scope provides them. Use "
            f"{_ELEMENTWISE}."
        )


def check_locality(optimizer: Optimizer, localities: list[UpdateLocality], optimizer_layout: str) -> None:
    """Raise for an optimizer whose update depends on more than the tensors on a rank.

    Args:
        optimizer: Optimizer that is about to step.
        localities: Update locality of each parameter group.
        optimizer_layout: `ShardConfig.optimizer_layout`, `"rows"` or `"tensors"`.

    Raises:
        ConfigError: A group needs whole tensors and the layout is `"rows"`, or needs all tensors together.
    """
    name = type(optimizer).__name__
    if UpdateLocality.GLOBAL in localities:
        raise ConfigError(
            f"{name} couples parameters: in a dry run on small tensors, the update of one tensor depended on other "
            f"tensors. Each rank steps on its own shards only. Use {_ELEMENTWISE}, or replicate the optimizer states "
            "with `optimizer='none'`."
        )
    if UpdateLocality.PER_TENSOR in localities and optimizer_layout == "rows":
        raise ConfigError(
            f"{name} needs whole tensors, but each rank holds rows of them. Assign whole tensors to ranks with "
            "`optimizer_layout='tensors'`, replicate the optimizer states with `optimizer='none'`, or use "
            f"{_ELEMENTWISE}."
        )
