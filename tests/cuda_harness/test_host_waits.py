"""Does the host wait for the device inside a step? It must not: then everything after starts on an idle GPU.

Where it has to, the reason is here. Start-up may wait: nothing of it is inside a step.
"""

import itertools
from typing import Any

import pytest
import torch

from tests.cuda_harness.happens_before import HOST
from tests.cuda_harness.runs import (
    PRESETS,
    Loop,
    Training,
    config_of,
    declared,
    left_out,
    one_of_many,
    reading,
    run,
    start,
    undeclared,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "no_overlap": {"overlap": "none"},
    "codecs": {"grad_codec": "int8", "codec_links": "all"},
    "coalesced": {"coalesce": True},
}
COUNTS = "mics_strategy/engine/rank_agreement.py"
START_UP = 4  # steps: in the first ones the engine looks at once whether ranks agree


def _waits(preset: str, loop: Loop, **options: Any) -> list[str]:
    def after_start_up(training: Training) -> None:
        for _ in range(START_UP):
            training.backward()
            training.update()
        loop(training)

    return run(config_of(preset, **options), after_start_up).waits


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_host_waits_for_nothing_in_a_step(preset: str) -> None:
    assert _waits(preset, declared) == []


@pytest.mark.parametrize("preset", ["mics", "ddp"])
def test_the_host_waits_for_nothing_where_the_last_micro_step_is_not_known(preset: str) -> None:
    assert _waits(preset, undeclared) == []


@pytest.mark.parametrize("option", OPTIONS)
def test_the_host_waits_for_nothing_with_other_options(option: str) -> None:
    assert _waits("mics", declared, **OPTIONS[option]) == []


@pytest.mark.parametrize("preset", ["mics", "ddp"])
@pytest.mark.parametrize(("numel", "num_waits"), [(100, 0), (20_000, 1)], ids=["small", "large"])
def test_the_host_waits_once_for_all_large_buffers_and_for_no_small_ones(
    preset: str, numel: int, num_waits: int
) -> None:
    with one_of_many() as machine:
        training = start(machine, config_of(preset), buffers=(numel, numel))
        for _ in range(START_UP):
            training.backward()
            training.update()
        training.step()
    found = [wait for wait in machine.waits if COUNTS not in wait]
    assert len(found) == num_waits
    assert all("module_buffers.py" in wait for wait in found)


@pytest.mark.wide(every=5)
@pytest.mark.parametrize(("preset", "loop"), list(zip(PRESETS, itertools.cycle((reading, left_out)), strict=False)))
def test_the_host_waits_for_the_counts_of_users_and_nothing_else(preset: str, loop: Loop) -> None:
    """Where it must know: a rank that has left a layer out asks whether another rank has used it."""
    assert [wait for wait in _waits(preset, loop) if COUNTS not in wait] == []


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("preset", ["mics", "ddp", "zeropp", "paro-iig"])
def test_with_a_second_hop_in_every_backward_the_host_waits_for_the_one_before(preset: str) -> None:
    """For all of it, at the end of this one, so the device has all of this one to do meanwhile."""
    waits, seen, ends = [], [], []
    with one_of_many() as machine:
        training = start(machine, config_of(preset, second_hop="micro_step"))
        for _ in range(START_UP):
            training.backward()
            training.update()
        compute, clocks = machine.default_stream(0).number, machine.orders.clocks
        with machine.step():
            for index in range(3):
                ends.append(clocks[compute][compute])
                with training.sharded.micro_step(index, of=3):
                    training.loss().backward()
                seen.append(clocks[HOST][compute])
                waits.append(list(machine.waits))
                machine.waits.clear()
            training.update()
    line = f"synchronisation of an event of the same step at {COUNTS}"
    assert [[wait.rpartition(":")[0] for wait in found] for found in waits] == [[], [line], [line]]
    assert seen[0] < ends[0]  # the update of the step before follows its last backward
    assert seen[1:] == ends[1:]
    assert machine.waits == []


def _with_item(training: Training) -> None:
    training.model.layers[1].register_forward_hook(lambda module, args, out: out.sum().item() and None)
    training.step()


def _with_print_of_the_norm(training: Training) -> None:
    with training.machine.step():
        training.backward()
        training.sharded.clip_grad_norm_(1.0, error_if_nonfinite=True)


PLANTED: dict[str, tuple[Loop, str]] = {
    "item": (_with_item, "`_local_scalar_dense`"),
    "a check of the norm": (_with_print_of_the_norm, "`_local_scalar_dense`"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_found(what: str) -> None:
    loop, name = PLANTED[what]
    found = [wait for wait in _waits("mics", loop) if COUNTS not in wait]
    assert len(found) == 1
    assert name in found[0]


def test_start_up_and_evaluation_are_no_step() -> None:
    with one_of_many() as machine:
        training = start(machine, config_of("mics"))
        with torch.no_grad():
            training.loss().item()
    assert machine.waits == []
