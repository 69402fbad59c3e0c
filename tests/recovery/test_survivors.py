"""Which ranks go on, with which scopes, and what is refused before the first step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mics_strategy import Codec, ConfigError, MemorySnapshots, MiCSError, Recovery, ShardConfig, Topology, shard
from mics_strategy.recovery.survivors import block_size, check_recoverable, remaining, resize
from mics_strategy.scopes import Scopes, resolve_scopes
from tests.ranks import RankContext, RankPool


def scopes_of(preset: str, world_size: int, ranks_per_node: int, **fields: Any) -> Scopes:
    topology = Topology(ranks_per_node=ranks_per_node)
    return resolve_scopes(ShardConfig.preset(preset, **fields), topology, world_size)


@pytest.mark.parametrize(
    ("preset", "world_size", "ranks_per_node", "fields", "expected"),
    [
        ("mics", 8, 2, {}, 2),
        ("mics", 8, 2, {"partition_size": 4}, 4),
        ("mics", 8, 4, {"partition_size": 2}, 4),
        ("mics", 4, 4, {"partition_size": 2}, 2),
        ("ddp", 4, 4, {}, 1),
        ("ddp", 4, 2, {}, 2),
        ("zero3", 8, 2, {}, 8),
    ],
)
def test_ranks_stay_or_leave_by_nodes_and_partitions(
    preset: str, world_size: int, ranks_per_node: int, fields: dict[str, Any], expected: int
) -> None:
    assert block_size(scopes_of(preset, world_size, ranks_per_node, **fields)) == expected


def test_blocks_without_a_loss_stay_in_order() -> None:
    assert remaining([0, 1, 2, 3, 4, 5], {3}, 2) == [0, 1, 4, 5]
    assert remaining([0, 1, 4, 5], {0, 5}, 2) == []
    assert remaining([0, 2, 5], {2}, 1) == [0, 5]


@pytest.mark.parametrize(
    ("preset", "before", "after", "per_node"), [("mics", 8, 4, 2), ("hsdp", 6, 2, 2), ("ddp", 4, 3, 4)]
)
def test_the_scopes_of_fewer_ranks_are_those_of_a_job_that_began_with_them(
    preset: str, before: int, after: int, per_node: int
) -> None:
    fewer = scopes_of(preset, after, min(per_node, after))
    assert resize(scopes_of(preset, before, per_node), after, is_one_node=preset == "ddp") == fewer


@pytest.mark.parametrize(
    ("preset", "fields", "words"),
    [
        ("zero3", {}, "this job has one: optimizer states are sharded over 4 of its 4 ranks"),
        ("mics", {"partition_size": 4}, "this job has one"),
        ("mics", {"optimizer_layout": "tensors"}, "sends in the middle of an optimizer's step"),
        ("mics", {"outer_every": 2}, "`outer_every` lets islands have different values"),
        ("mics", {"overlap": "none"}, "`overlap` without 'update'"),
        ("mics", {"second_hop": "delayed"}, "`second_hop='delayed'` keeps sums"),
        ("mics", {"grad_codec": Codec(bits=8, feedback=True)}, "error feedback keeps"),
        ("mics", {"world_size": 4}, "`world_size=4` allows no other number of ranks"),
    ],
)
def test_a_job_that_cannot_be_recovered_is_refused(preset: str, fields: dict[str, Any], words: str) -> None:
    scopes = scopes_of(preset, 4, 2, **{k: v for k, v in fields.items() if k not in ("outer_every", "world_size")})
    with pytest.raises(ConfigError) as refused:
        check_recoverable(ShardConfig.preset(preset, **fields), scopes)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("preset", "fields", "words"),
    [
        ("zero3", {}, "a scope of 'world' is another one with more ranks"),
        ("mics", {"grad_codec": "int8"}, "codecs align parameters in another way where there are more nodes"),
    ],
)
def test_a_job_of_one_copy_that_cannot_grow_is_refused(preset: str, fields: dict[str, Any], words: str) -> None:
    config, scopes = ShardConfig.preset(preset, **fields), scopes_of(preset, 2, 2, **fields)
    with pytest.raises(ConfigError, match=words):
        check_recoverable(config, scopes, allows_one_copy=True)
    check_recoverable(ShardConfig.preset("mics"), scopes_of("mics", 2, 2), allows_one_copy=True)


def test_nodes_stay_nodes_and_one_node_stays_one() -> None:
    assert resize(scopes_of("mics", 2, 2), 6, is_one_node=False) == scopes_of("mics", 6, 2)
    assert resize(scopes_of("ddp", 3, 3), 5, is_one_node=True) == scopes_of("ddp", 5, 5)


def refusals(ctx: RankContext, folder: str) -> list[str]:
    """What `Recovery` refuses in a job, and in a step."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = shard(model, "mics", topology=Topology(ranks_per_node=1))
    sharded.adopt(optimizer)
    messages = []

    def refuse(action: Any) -> None:
        try:
            action()
        except MiCSError as error:
            messages.append(f"{type(error).__name__}: {error}")

    refuse(lambda: Recovery(sharded, [], lost_after_s=1.0))
    refuse(lambda: Recovery(sharded, [torch.optim.SGD([model.weight], lr=0.1)], lost_after_s=1.0))
    refuse(lambda: Recovery(sharded, [optimizer], lost_after_s=0.0 if ctx.rank == 1 else 1.0))
    snapshots = MemorySnapshots(sharded, [optimizer], job="a-job", folder=folder)
    refuse(lambda: Recovery(sharded, [optimizer]))
    snapshots.close()
    recovery = Recovery(sharded, [optimizer])
    refuse(lambda: MemorySnapshots(sharded, [optimizer], job="a-job", folder=folder))
    refuse(optimizer.step)

    def with_closure() -> None:
        with recovery.attempt():
            optimizer.step(lambda: 0.0)

    def two_steps() -> None:
        with recovery.attempt():
            for _ in range(2):
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()

    def fails_by_itself() -> None:
        with recovery.attempt():
            raise ConfigError("of a script")

    refuse(with_closure)
    refuse(two_steps)
    refuse(fails_by_itself)
    with recovery.attempt() as attempt:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    messages.append(f"completed {attempt.completed}")
    recovery.close()
    optimizer.step()  # as without it
    MemorySnapshots(sharded, [optimizer], job="a-job", folder=folder).close()
    return messages


def test_what_recovery_refuses_is_refused_by_name_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    words = (
        "ConfigError: `optimizers=[]` are no optimizers",
        "ConfigError: `optimizers` lack the trained parameter `bias`",
        "ConfigError: `lost_after_s=0.0`: a heart beats every 0.2 s. Use 1.0 or more. (found on rank 1)",
        "ConfigError: `Recovery` ends all process groups when a rank is lost, and `MemorySnapshots`",
        "ConfigError: `MemorySnapshots` has a process group of its own, and `Recovery`",
        "LifecycleError: An optimizer stepped outside of `Recovery.attempt()`",
        "ConfigError: `SGD.step` got a closure",
        "LifecycleError: A second backward and optimizer step began in one `Recovery.attempt()`",
        "ConfigError: of a script",
        "completed True",
    )
    for messages in ranks(2, refusals, str(tmp_path)):
        for message, expected in zip(messages, words, strict=True):
            assert message.startswith(expected)
