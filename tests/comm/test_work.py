"""What does the work of a collective say when it fails?"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mics_strategy.comm.consensus import gather_objects
from mics_strategy.comm.resources import CommResources
from mics_strategy.comm.watched_work import call_watch
from mics_strategy.comm.work import Work
from mics_strategy.config import ShardConfig
from mics_strategy.errors import CommunicationError
from mics_strategy.scopes import resolve_scopes
from mics_strategy.topology import Topology
from tests.ranks import RankContext, RankPool


class Failing:
    """A transport's work whose wait ends with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def is_completed(self) -> bool:
        return True


def wait_for_work(error: Exception) -> None:
    Work("All-gather", Failing(error)).wait()


def gather(error: Exception) -> None:
    with mock.patch.object(dist, "all_gather_object", side_effect=error):
        gather_objects(1)


def call_torch(error: Exception) -> None:
    with call_watch(0).watching("full_tensor", frozenset({0, 1})):
        raise error


def broadcast(error: Exception) -> None:
    whole = resolve_scopes(ShardConfig.preset("zero3"), Topology(ranks_per_node=2), 2).span(1, 2)
    control = CommResources(2, torch.device("cpu")).control_group("control", whole)
    with mock.patch.object(dist, "broadcast_object_list", side_effect=error):
        control.broadcast_object(1, 0)


PLACES = {each.__name__: each for each in (wait_for_work, gather, call_torch, broadcast)}


def raised(ctx: RankContext, place: str, error: Exception) -> tuple[bool, bool, str]:
    """Whether the error is raised as it is, or as one of communication, and its text."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        PLACES[place](error)
    except Exception as found:
        return found is error, isinstance(found, CommunicationError), str(found)
    finally:
        dist.destroy_process_group()
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), torch.AcceleratorError("device-side assert triggered")]
)
def test_an_error_of_the_device_is_not_blamed_on_ranks(ranks: RankPool, place: str, error: Exception) -> None:
    assert ranks(1, raised, place, error, default_group=False) == [(True, False, str(error))]


@pytest.mark.parametrize("place", PLACES)
def test_another_failure_of_the_transport_is(ranks: RankPool, place: str) -> None:
    ((_, is_communication, text),) = ranks(1, raised, place, RuntimeError("lost"), default_group=False)
    assert is_communication
    assert ": lost. " in text
    assert "A rank died" in text
