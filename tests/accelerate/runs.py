"""How does an `Accelerator` run on a rank of the pool?

The ranks and their process group exist already, as under torchrun in a program that has made the group itself. What
Accelerate keeps for the whole process is taken away after each job. `test_launching.py` starts ranks as users do.
"""

import logging
import warnings
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn

from mics_strategy.accelerate import MiCSPlugin
from tests.lightning.runs import assert_same, full
from tests.ranks import RankContext, RankPool

__all__ = ["assert_same", "full"]
logging.getLogger("accelerate").setLevel(logging.ERROR)


def run(ranks: RankPool, world_size: int, fn: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
    """`ranks(world_size, fn, *args)` for a job that makes Accelerators."""
    env = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return ranks(world_size, in_accelerate, fn, *args, env=env, **options)


def in_accelerate(ctx: RankContext, fn: Callable[..., Any], *args: object) -> Any:
    """Run a job, and take its trace away."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fn(ctx, *args)
    finally:
        forget()


def forget() -> None:
    """Let the next Accelerator be the first of its process."""
    AcceleratorState._reset_state()
    PartialState._reset_state()
    GradientState._reset_state()


def accelerator(config: Any = "mics", **options: Any) -> Accelerator:
    """An Accelerator on the CPU ranks of this job.

    Args:
        config: A preset, or "ddp by Accelerate" for plain data parallel training.
        **options: Fields of `MiCSPlugin`, and arguments of `Accelerator` as `accelerator_<name>`.
    """
    prefix = "accelerator_"
    own = {name.removeprefix(prefix): options.pop(name) for name in [*options] if name.startswith(prefix)}
    if config == PLAIN:
        return Accelerator(cpu=True, **own)
    return Accelerator(fsdp_plugin=MiCSPlugin(config, **options), **own)


PLAIN = "ddp by Accelerate"


def values(model: nn.Module) -> dict[str, Tensor]:
    """The plain parameters, on every rank. Collective."""
    named = ((name.removeprefix("module."), p) for name, p in model.named_parameters())
    return {name: full(parameter) for name, parameter in named}
