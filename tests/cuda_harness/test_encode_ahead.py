"""Is a unit encoded while the one before it is on the wire? By what streams and events order, not by time."""

from typing import Any
from unittest import mock

import pytest
import torch

from mics_strategy.comm.workspace import Workspace
from tests.cuda_harness.happens_before import Clock
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.runs import config_of, one_of_many, start
from tests.cuda_harness.streams import current_stream

CODECS = {"weight_codec": "int8", "grad_codec": "int4", "codec_links": "all", "grad_codec_hops": "all"}
# Roles of quantized collectives; between nodes alone, that of the first hop inside nodes is none.
QUANTIZED = [
    ("zero3", {}, "param_all_gather"),
    ("zero3", {}, "grad_reduce_scatter"),
    ("zeropp", {}, "param_all_gather"),
    ("zeropp", {}, "grad_reduce_scatter"),
    ("mics", {}, "grad_reduce_scatter"),
    ("mics", {}, "second_hop_all_reduce"),
    ("mics", {"codec_links": "slow", "weight_codec": "none"}, "second_hop_all_reduce"),
    ("paro-iig", {}, "second_hop_reduce_scatter"),
]


class Watched(Machine):
    """A machine that notes what each encoding is ordered behind, and when each collective ends.

    Attributes:
        events: For an encoding, its clock; for a collective, its role, the stream that it runs on and its end there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.events: list[tuple[str, Clock]] = []

    def kernel(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        super().kernel(name, reads, writes)
        if name == "encode":
            self.events.append((name, self.orders.record(current_stream(self.device).number)))

    def launch(self, name: str, group: Any, *rest: Any) -> Clock:
        end = super().launch(name, group, *rest)
        stream = self._nccl[group.group_name]
        self.events.append((group.group_desc.split(".")[1], {stream: end[stream]}))
        return end


def encoded_ahead(preset: str, role: str, **options: Any) -> list[bool]:
    """Whether nothing orders an encoding behind the last collective of its role, for each encoding but the first."""
    with mock.patch("tests.cuda_harness.runs.Machine", Watched), one_of_many(8) as machine:
        training = start(machine, config_of(preset, **(CODECS | options)))
        for _ in range(2):
            machine.events = []
            training.step()
    events, ahead = machine.events, []
    for index, (kind, clock) in enumerate(events):
        before = [(at, end) for at, (of, end) in enumerate(events[:index]) if of == role]
        is_of_role = kind == "encode" and index + 1 < len(events) and events[index + 1][0] == role
        if is_of_role and before:
            ((stream, tick),) = before[-1][1].items()
            ahead.append(clock.get(stream, 0) < tick)
    return ahead


@pytest.mark.parametrize(("preset", "options", "role"), QUANTIZED)
def test_a_unit_is_encoded_behind_no_collective_of_the_one_before(
    preset: str, options: dict[str, Any], role: str
) -> None:
    ahead = encoded_ahead(preset, role, **options)
    assert len(ahead) >= 4
    assert sum(ahead) > len(ahead) / 2


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
