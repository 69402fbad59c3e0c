"""Training for the planner: a model, a batch, and what is left to choose.

Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mics_strategy.errors import ConfigError
from mics_strategy.planner.measured import MeasuredCompute
from mics_strategy.planner.memory import StateFormat
from mics_strategy.planner.model import ModelDescription
from mics_strategy.planner.recompute import ATTENTION, Recompute, check_recompute

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training.

    Attributes:
        model: Model, at the length of its samples.
        global_batch: Samples of one optimizer step on all ranks.
        micro_batch: Samples of one forward on a rank; ``"auto"`` leaves the choice to the planner.
        recompute: Whether the layers keep only their inputs for the backward; a share of them as a number between 0
            and 1; ``"attention"`` for attention and the projections in front of it alone; ``"auto"`` leaves the choice
            between all and none to the planner.
        master_dtype: Dtype of the parameters that the optimizer updates.
        param_dtype: Dtype in which parameters are gathered and used.
        reduce_dtype: Dtype of gradients on the wire.
        optimizer_state_bytes: Bytes of optimizer states for each trained element; 8 for Adam in fp32.
        measured: Measured seconds of the model's units, which count instead of those computed from FLOP and bytes.
    """

    model: ModelDescription
    global_batch: int
    micro_batch: int | str = "auto"
    recompute: Recompute = "auto"
    master_dtype: str = "float32"
    param_dtype: str = "bfloat16"
    reduce_dtype: str = "float32"
    optimizer_state_bytes: int = 8
    measured: MeasuredCompute | None = None

    def __post_init__(self) -> None:
        """Check every value by itself."""
        for name in ("master_dtype", "param_dtype", "reduce_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ConfigError(f"`{name}={getattr(self, name)!r}` is not known. Use one of {', '.join(DTYPES)}.")
        for name, least in (("global_batch", 1), ("micro_batch", 1), ("optimizer_state_bytes", 0)):
            value, words = getattr(self, name), ("auto",) if name == "micro_batch" else ()
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_count and value not in words:
                raise ConfigError(f"`{name}={value!r}` is not a number of {least} or more. Use one{_or(words)}.")
        is_share = isinstance(self.recompute, int | float) and 0 <= self.recompute <= 1
        if not is_share and self.recompute not in (ATTENTION, "auto"):
            raise ConfigError(
                f"`recompute={self.recompute!r}` is not known. Use True, False, 'auto', 'attention' or a share of the "
                "layers between 0 and 1."
            )
        check_recompute(self.model, self.recompute)

    @property
    def master(self) -> torch.dtype:
        """`master_dtype` as torch's."""
        return DTYPES[self.master_dtype]

    @property
    def states(self) -> StateFormat:
        """Dtypes of model states."""
        return StateFormat(parameter_dtype=self.master, optimizer_bytes=self.optimizer_state_bytes)

    @property
    def param(self) -> torch.dtype:
        """`param_dtype` as torch's."""
        return DTYPES[self.param_dtype]

    def micro_batches(self, world_size: int) -> tuple[int, ...]:
        """Micro-batches to choose from, largest first.

        They divide the samples of a rank.

        Raises:
            ConfigError: The ranks do not divide the batch, or the micro-batch does not divide a rank's part.
        """
        if self.global_batch % world_size:
            lower = max(world_size, self.global_batch // world_size * world_size)
            raise ConfigError(
                f"`global_batch={self.global_batch}` samples cannot be divided among {world_size} ranks. Use a "
                f"multiple of the ranks, for example {lower} or {lower + world_size}, or fewer nodes."
            )
        per_rank = self.global_batch // world_size
        divisors = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        if self.micro_batch == "auto":
            return tuple(divisors[::-1])
        if self.micro_batch not in divisors:
            raise ConfigError(
                f"`micro_batch={self.micro_batch}` does not divide the {per_rank} samples of each of {world_size} "
                f"ranks (`global_batch={self.global_batch}`). Use {', '.join(map(str, divisors))}."
            )
        return (int(self.micro_batch),)


def _or(words: tuple[str, ...]) -> str:
    return "".join(f", or {word!r}" for word in words)
