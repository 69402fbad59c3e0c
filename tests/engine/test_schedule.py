"""The rules that the engine and the plan share."""

from types import SimpleNamespace

import pytest
import torch

from mics_strategy import ShardConfig, Topology
from mics_strategy.engine.layout import make_layout
from mics_strategy.engine.schedule import (
    ParamVersions,
    full_numel,
    needs_unshard,
    reduces_every_unit,
    reduction_order,
    second_hop_order,
    shard_numel,
    unshard_role,
)
from mics_strategy.scopes import ROLES, Scopes, resolve_scopes

PRESETS = [preset for preset in ShardConfig.PRESETS if preset != "auto"]


def _scopes(preset: str, **options: object) -> Scopes:
    return resolve_scopes(ShardConfig.preset(preset, **options), Topology(ranks_per_node=4), 8)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("role", ROLES)
def test_shards_of_a_collective_are_as_many_as_its_ranks(preset: str, role: str) -> None:
    scopes = _scopes(preset)
    layout = make_layout([("weight", torch.Size((24, 5))), ("bias", torch.Size((3,)))], scopes.optimizer)
    if role == "second_hop_all_reduce":
        assert full_numel(role, layout, scopes) == layout.shard_numel
        return
    num_ranks = scopes.span_of(role).size
    assert full_numel(role, layout, scopes) == num_ranks * shard_numel(role, layout, scopes)


def test_a_bucket_is_synced_once_per_version() -> None:
    versions = ParamVersions()
    assert versions.needs_sync(0)
    versions.param_shard = 0
    assert not versions.needs_sync(0)
    assert versions.needs_sync(1)


@pytest.mark.parametrize("has_secondary", [False, True])
def test_a_gather_takes_the_secondary_shard_that_one_of_the_same_version_left(has_secondary: bool) -> None:
    versions = ParamVersions(has_secondary=has_secondary, param_shard=3)
    assert versions.note_gather() == "param_all_gather", "nothing was gathered yet"
    versions.keep_secondary()
    expected = "secondary_all_gather" if has_secondary else "param_all_gather"
    assert [versions.note_gather() for _ in range(3)] == [expected] * 3
    versions.param_shard = 4
    assert versions.note_gather() == "param_all_gather", "the secondary shard is stale"
    assert versions.unsharded == 4


def test_a_unit_is_gathered_unless_its_slot_holds_current_values() -> None:
    buckets = [SimpleNamespace(version=2, versions=ParamVersions(unsharded=unsharded)) for unsharded in (2, 2)]
    assert not needs_unshard(buckets, is_resident=True)
    assert needs_unshard(buckets, is_resident=False)
    buckets[1].version = 3
    assert needs_unshard(buckets, is_resident=True)


def test_parameters_are_unsharded_by_the_last_of_their_collectives() -> None:
    assert unshard_role(_scopes("ddp")) == unshard_role(_scopes("zero1")) == "param_sync"
    assert unshard_role(_scopes("mics")) == unshard_role(_scopes("zero3")) == "param_all_gather"
    assert unshard_role(_scopes("zero3", secondary_params="partition")) == "secondary_all_gather"


def test_units_are_reduced_by_their_first_forward_latest_first() -> None:
    assert reduction_order([0, 1, 2, 1, 3]) == [3, 2, 1, 0]
    assert second_hop_order({2, 0, 1}) == [2, 1, 0]


def test_every_unit_is_reduced_where_ranks_may_run_different_ones() -> None:
    assert [reduces_every_unit(_scopes(preset)) for preset in ("ddp", "zero1", "zero2", "mics", "zero3")] == [
        *(True, True, True, False, False)
    ]
