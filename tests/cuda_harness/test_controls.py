"""Would the harness find what it looks for? One thing is taken away at a time."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from mics_strategy.comm.work import Work
from mics_strategy.engine.step import Engine
from mics_strategy.engine.streams import OpChain
from tests.cuda_harness.allocations import allocation_of
from tests.cuda_harness.runs import config_of, declared, interrupted, one_of_many, run, start
from tests.cuda_harness.streams import Stream
from tests.cuda_harness.works import Works

COALESCED: dict[str, Any] = {"coalesce": True, "param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
TAKEN_AWAY: dict[str, tuple[object, str, Callable[..., Any], dict[str, Any]]] = {
    "chains are waited for": (OpChain, "wait", lambda chain: None, {}),
    "streams wait for streams": (Stream, "wait_stream", lambda *_: None, {}),
    "streams wait for events": (Stream, "wait_event", lambda *_: None, {}),
    "collectives are waited for": (Works, "waited_for", lambda *_: None, {}),
    "gradients are kept": (Work, "keep_alive", lambda handle, tensors: handle, COALESCED),
}


@pytest.mark.parametrize("what", TAKEN_AWAY)
@pytest.mark.parametrize("preset", ["mics", "zero3"])
def test_without_it_something_is_found(what: str, preset: str) -> None:
    owner, name, instead, options = TAKEN_AWAY[what]
    with mock.patch.object(owner, name, instead):
        found = run(config_of(preset, **options), declared).races
    assert any(line.startswith("freed while in use" if name == "keep_alive" else "race") for line in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_write_to_masters_that_are_gathered_is_found(dtype: str) -> None:
    with mock.patch.object(Engine, "settle_params"):
        found = run(config_of("mics", param_dtype=dtype), interrupted).races
    assert any(line.startswith("race") for line in found)


def test_sharded_parameters_are_the_memory_of_the_masters() -> None:
    with one_of_many() as machine:
        sharded = start(machine, config_of("mics")).sharded
        for bucket in (bucket for unit in sharded.internals.units for bucket in unit.buckets):
            for parameter in bucket.sharded_params:
                assert allocation_of(parameter.local) is allocation_of(bucket.master_shard)


def test_it_was_there() -> None:
    for preset in ("mics", "zero3"):
        for options in ({}, COALESCED):
            assert run(config_of(preset, **options), declared).races == []


def test_a_model_on_another_device_than_the_current_one_is_waited_for() -> None:
    with one_of_many(index=1) as machine:
        declared(start(machine, config_of("mics")))
    assert machine.races == []
