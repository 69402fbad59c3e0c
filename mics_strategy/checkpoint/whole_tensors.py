"""Sharded tensors in what a script saves beside model and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mics_strategy.comm.consensus import run_and_gather
from mics_strategy.engine.state_dict import to_rank_zero
from mics_strategy.errors import CheckpointError


def whole_tensors(make_state: Callable[[], Any]) -> Any:
    """A state with whole tensors in place of sharded ones. Collective.

    They are on rank 0's CPU, and empty on other ranks.

    Args:
        make_state: Returns the state that a script saves beside model and optimizers: averages of weights, for example.

    Raises:
        CheckpointError: Ranks have different numbers of sharded tensors, or `make_state` raised on another rank. Raised
            on every rank.
    """

    def count() -> tuple[Any, int]:
        state = make_state()
        return state, sum(isinstance(leaf, DTensor) for leaf in tree_leaves(state))

    if not dist.is_initialized():  # nothing is sharded
        return make_state()
    state, nums = run_and_gather(count, CheckpointError, "whole_tensors")
    if len(set(nums)) > 1:
        raise CheckpointError(
            f"The state to save holds {min(nums)} sharded tensors on one rank and {max(nums)} on another. They are "
            "gathered for the file, so pass the same state on all ranks."
        )
    return tree_map_only(DTensor, to_rank_zero, state) if nums[0] else state
