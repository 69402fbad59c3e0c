"""Is a unit encoded while the one before it is on the wire? By what streams and events order, not by time."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from mics_strategy.comm.queue import RouteQueue
from mics_strategy.comm.workspace import Workspace
from tests.cuda_harness.happens_before import Clock
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.runs import config_of, one_of_many, start
from tests.cuda_harness.streams import current_stream, here

CODECS = {"weight_codec": "int8", "grad_codec": "int4", "codec_links": "all", "grad_codec_hops": "all"}
# Units in the order in which they are encoded in a step of two micro-steps, but for the first one, before which there
# is none. A unit is encoded ahead of the end of the one before; or behind it, where the compute stream has waited for
# that one already, and so for all of the role.
FORWARD = ["layers.0", "layers.1", "layers.2", "layers.3"]
BACKWARD = ["layers.2", "layers.1", "layers.0", "(root)"]
# The last two layers are unsharded still when the backward begins, and the first two when the next forward begins.
GATHERED_AGAIN = ["layers.1 behind layers.3", "layers.0"]
GATHERS = [*FORWARD, *GATHERED_AGAIN, "layers.2 behind layers.0", "layers.3", *GATHERED_AGAIN]
REDUCED = [*BACKWARD, "layers.3 behind (root)", *BACKWARD]
# Roles of quantized collectives; between nodes alone, that of the first hop inside nodes is none. The secondary copies
# of ZeRO++ are not quantized, and second hops are those of the last micro-step.
QUANTIZED = [
    ("zero3", {}, "param_all_gather", GATHERS),
    ("zero3", {}, "grad_reduce_scatter", REDUCED),
    ("zeropp", {}, "param_all_gather", FORWARD),
    ("zeropp", {}, "grad_reduce_scatter", REDUCED),
    ("mics", {}, "grad_reduce_scatter", REDUCED),
    ("mics", {}, "second_hop_all_reduce", BACKWARD),
    ("mics", {"codec_links": "slow", "weight_codec": "none"}, "second_hop_all_reduce", BACKWARD),
    ("paro-iig", {}, "second_hop_reduce_scatter", BACKWARD),
]


@dataclass(frozen=True, slots=True)
class Event:
    """An encoding, or a collective.

    Attributes:
        kind: `encode`, or the role of the collective.
        unit: Unit to which it belongs.
        clock: What an encoding is ordered behind; the end of a collective on the stream that it runs on.
    """

    kind: str
    unit: str
    clock: Clock


class Watched(Machine):
    """A machine that notes what each encoding is ordered behind, and when each collective ends.

    Attributes:
        unit: Unit of the collective that has been submitted last.
        events: Encodings and collectives, in the order of the host.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.unit = ""
        self.events: list[Event] = []

    def kernel(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        super().kernel(name, reads, writes)
        if name == "encode":
            self.events.append(Event(name, self.unit, self.orders.record(current_stream(self.device).number)))

    def launch(self, name: str, group: Any, *rest: Any) -> Clock:
        end = super().launch(name, group, *rest)
        stream = self._nccl.get(group.group_name, current_stream(self.device).number)
        role = group.group_desc.removeprefix("mics.").partition(".")[0]
        self.events.append(Event(role, self.unit, {stream: end[stream]}))
        return end


def _noting_units(submit: Callable[..., Any]) -> Callable[..., Any]:
    """The unit of what is submitted, for the events that follow: a queue encodes at once."""

    def noting(queue: RouteQueue, kind: str, label: str, *args: Any) -> Any:
        watched = here().machine
        assert isinstance(watched, Watched)
        watched.unit = label
        return submit(queue, kind, label, *args)

    return noting


def encoded_units(preset: str, role: str, **options: Any) -> list[str]:
    """The units that are encoded for a role in a step, but for the first, and the unit that each is behind, if any.

    Sums that a collective encodes for its later stages, behind its own first one, are left out.
    """
    submit = mock.patch.object(RouteQueue, "submit", _noting_units(RouteQueue.submit))
    with mock.patch("tests.cuda_harness.runs.Machine", Watched), submit, one_of_many(8) as machine:
        training = start(machine, config_of(preset, **(CODECS | options)))
        for _ in range(2):
            machine.events = []
            training.step()
    units: list[str] = []
    before: Event | None = None
    for event, following in itertools.pairwise(machine.events):
        if event.kind == role:
            before = event
        elif event.kind == "encode" and following.kind == role and before is not None and before.unit != event.unit:
            ((stream, tick),) = before.clock.items()
            is_ahead = event.clock.get(stream, 0) < tick
            units.append(event.unit if is_ahead else f"{event.unit} behind {before.unit}")
    return units


@pytest.mark.wide(every=2)
@pytest.mark.parametrize(
    ("preset", "options", "role", "units"), QUANTIZED, ids=[f"{preset} {role}" for preset, _, role, _ in QUANTIZED]
)
def test_units_are_encoded_while_those_before_them_are_on_the_wire(
    preset: str, options: dict[str, Any], role: str, units: list[str]
) -> None:
    assert encoded_units(preset, role, **options) == units


def races(preset: str) -> list[str]:
    with one_of_many(8) as machine:
        training = start(machine, config_of(preset, prefetch=3, **CODECS))
        for _ in range(2):
            training.step()
    return machine.races


@pytest.mark.parametrize("preset", ["zero3", "zeropp", "mics"])
def test_a_race_is_found_where_parts_are_reused_without_their_event(preset: str) -> None:
    """Three gathers in flight use two parts."""

    def release(workspace: Workspace, index: int) -> None:
        workspace._parts[index].is_taken = False

    assert races(preset) == []
    with mock.patch.object(Workspace, "release", release):
        assert any("encode" in race for race in races(preset))
