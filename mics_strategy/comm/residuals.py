"""Residuals of error feedback: what a rank's encodings have lost, by route.

Pure.
"""

from __future__ import annotations

import torch

from mics_strategy.comm.route import REDUCE_SCATTER, Route, all_reduce_slice


def residual_numel(route: Route, collective: str, numel: int) -> int:
    """Elements of the residual of a collective's error feedback; 0 without feedback.

    A rank encodes every element of its full tensor once at most: in one of the stages of a sum or, in an all-reduce, in
    the share of the sum that it sends back. So one residual serves all stages, with an element for each of the slice
    with which the first quantized stage begins.

    Args:
        route: Route of the collective.
        collective: REDUCE_SCATTER or ALL_REDUCE.
        numel: Elements of the full tensor.
    """
    if not route.has_feedback:
        return 0
    full_numel = numel if collective == REDUCE_SCATTER else route.num_slices * all_reduce_slice(route, numel)
    return full_numel * route.strides[route.num_quantized] // route.size


def residuals_by_stage(route: Route, index: int, residual: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Parts of a residual by stage.

    None where a stage encodes nothing, or without feedback.

    Before stage k a rank has a slice of the full tensor, of which it sends each rank of the stage a piece. The residual
    of its own piece, which it sends nobody, is that of the slice of stage k - 1.

    Args:
        route: Route of the collective.
        index: Index of this rank.
        residual: [residual_numel] fp32, or None.
    """
    parts: list[torch.Tensor | None] = [None] * len(route.stages)
    for stage in reversed(range(route.num_quantized if residual is not None else 0)):
        parts[stage] = residual
        if residual is not None:
            size = route.stages[stage].size
            residual = residual.view(size, -1)[index // route.strides[stage] % size]
    return parts
