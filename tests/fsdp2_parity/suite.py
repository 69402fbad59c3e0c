"""Every scenario, fact and refusal, by the area of FSDP2's tests that it is from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mics_strategy.errors import MiCSError
from tests.fsdp2_parity import (
    autograd,
    clip_grad_norm,
    communication,
    frozen,
    grad_scaler,
    hybrid,
    init,
    mixed_precision,
    state,
    state_dict,
    training,
)
from tests.fsdp2_parity.runner import Scenario
from tests.rank_report import RankContext


@dataclass(frozen=True, slots=True)
class Area:
    """The cases of one area.

    Attributes:
        scenarios: Trainings that are compared with a plain process, by name.
        facts: Jobs with the number of their ranks, by name. They raise where the fact does not hold.
        refused: Jobs of two ranks that are refused, by name: the job, the error, and a part of its sentence.
    """

    scenarios: Mapping[str, Scenario] = field(default_factory=dict)
    facts: Mapping[str, tuple[int, Callable[[RankContext], None]]] = field(default_factory=dict)
    refused: Mapping[str, tuple[Callable[[RankContext], Any], type[MiCSError], str]] = field(default_factory=dict)


AREAS = {
    "training": Area(training.SCENARIOS),
    "hybrid": Area(hybrid.SCENARIOS),
    "autograd": Area(autograd.SCENARIOS, refused=autograd.REFUSED),
    "frozen": Area(frozen.SCENARIOS),
    "mixed precision": Area(mixed_precision.SCENARIOS),
    "grad scaler": Area(grad_scaler.SCENARIOS),
    "clip grad norm": Area(clip_grad_norm.SCENARIOS),
    "init": Area(init.SCENARIOS, init.FACTS, init.REFUSED),
    "state": Area(state.SCENARIOS, state.FACTS, state.REFUSED),
    "state dict": Area(facts=state_dict.FACTS),
    "communication": Area(facts=communication.FACTS),
}
