"""What share of the peak learning rate applies at each optimizer step?

Pure functions of the step: nothing to save, nothing to restore, the same on every rank.
"""

import math
from typing import Literal

ScheduleName = Literal["linear", "cosine", "wsd", "constant"]


def lr_share(name: ScheduleName, step: int, *, total: int, warmup: int, decay: int, floor: float) -> float:
    """Return the learning rate at a step, as a share of its peak.

    Args:
        name: shape after the warm-up: `linear` and `cosine` fall from 1 to `floor` at step `total`; `wsd`
            (warm-up, stable, decay) stays at 1 and falls linearly during the last `decay` steps; `constant`
            stays at 1.
        step: optimizer steps already taken; the first step has 0.
        total: steps over which the schedule runs; beyond it the share stays at its last value.
        warmup: steps of linear growth; the first step has 1 / warmup of the peak, not nothing.
        decay: steps of the fall of `wsd`.
        floor: share at the end of the fall.

    Returns:
        A number from 0 to 1.

    Source:
        WSD: MiniCPM (arXiv:2404.06395).
    """
    if step < warmup:
        return (step + 1) / warmup
    if name == "constant":
        return 1.0
    start = total - decay if name == "wsd" else warmup
    progress = min(1.0, max(0.0, (step - start) / max(1, total - start)))
    fall = 0.5 * (1.0 + math.cos(math.pi * progress)) if name == "cosine" else 1.0 - progress
    return floor + (1.0 - floor) * fall
