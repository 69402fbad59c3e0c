"""Do snapshots hold what they should, on the nodes where they should, and refuse what they must?

Each rank of the pool plays a node, or two ranks do, with a folder of their own. Jobs are named by hand.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mics_strategy import CheckpointError, ConfigError, MemorySnapshots, Sharded, Topology, save_checkpoint, shard
from mics_strategy.snapshots.job import SnapshotJob
from tests.ranks import RankContext, RankPool, assert_refused, raises_on_every_rank, refusal

WORLD_SIZE, PER_NODE, WIDTH = 4, 2, 32
NUMEL = 2 * (WIDTH * WIDTH + WIDTH)


def training(preset: str, seed: int = 0) -> tuple[Sharded, torch.optim.Optimizer]:
    """A model of two layers and AdamW, after one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    topology = Topology(ranks_per_node=PER_NODE)
    sharded = shard(model, preset, topology=topology, hierarchical=False, units=[nn.Linear])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(sharded, optimizer)
    return sharded, optimizer


def step(sharded: Sharded, optimizer: torch.optim.Optimizer) -> None:
    sharded.model(torch.ones(2, WIDTH)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def states(sharded: Sharded, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """This rank's shards of everything, in one order."""
    local = [p.to_local() for p in sharded.model.parameters()]
    for parameter in sharded.model.parameters():
        local += [v.to_local() if hasattr(v, "to_local") else v for _, v in sorted(optimizer.state[parameter].items())]
    return [tensor.detach().numpy().tobytes() for tensor in local]


def node_of(ctx: RankContext, folder: str) -> Path:
    node = Path(folder, f"node{ctx.rank // PER_NODE}")
    node.mkdir(parents=True, exist_ok=True)
    return node


def snapshots_of(ctx: RankContext, folder: str, sharded: Sharded, optimizer: Any, **options: Any) -> MemorySnapshots:
    return MemorySnapshots(sharded, [optimizer], job="a-job", folder=node_of(ctx, folder), **{"every": 1, **options})


def files_in(node: Path) -> list[Path]:
    return sorted(path for path in node.glob("mics_strategy-*/*/*-*/*") if path.is_file())


def take_and_lose(ctx: RankContext, folder: str, preset: str, lost: int | None) -> dict[str, Any]:
    """Take a snapshot, lose the memory of a node, and continue with another model."""
    sharded, optimizer = training(preset)
    snapshots = snapshots_of(ctx, folder, sharded, optimizer)
    assert snapshots.load({"step": 5}) == {"step": 5}
    snapshots.after_step({"step": 1, "average": torch.arange(3.0)})
    expected, generator = states(sharded, optimizer), torch.get_rng_state()
    snapshots.finish()
    cost = snapshots.cost
    snapshots.close(keep=True)
    modes = {oct(path.stat().st_mode & 0o777) for path in files_in(node_of(ctx, folder))}
    dist.barrier()
    if lost is not None and ctx.rank == PER_NODE * lost:
        shutil.rmtree(node_of(ctx, folder))
    dist.barrier()
    other, other_optimizer = training(preset, seed=1)
    job = SnapshotJob(every=1, job="a-job", folder=node_of(ctx, folder))
    opened = job.open()
    assert opened is not None
    opened.load(other, [other_optimizer])
    opened.close()
    found = states(other, other_optimizer)
    return {
        "equal": found == expected and torch.equal(torch.get_rng_state(), generator),
        "extra": opened.extra["step"] == 1 and torch.equal(opened.extra["average"], torch.arange(3.0)),
        "received": opened.received_bytes,
        "cost": cost,
        "modes": modes,
        "steps": other.steps_done,
    }


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("lost", [None, 0, 1])
@pytest.mark.parametrize("preset", ["zero3", "mics"])
def test_a_lost_node_loses_nothing(ranks: RankPool, tmp_path: Path, preset: str, lost: int | None) -> None:
    results = ranks(WORLD_SIZE, take_and_lose, str(tmp_path), preset, lost)
    for rank, result in enumerate(results):
        assert result["equal"]
        assert result["extra"]
        assert result["steps"] == 1
        assert result["modes"] == {"0o600"}
        own_states = 12 * NUMEL // (WORLD_SIZE if preset == "zero3" else PER_NODE)
        if rank // PER_NODE == lost:
            assert result["received"] >= own_states
        elif lost is None:
            assert result["received"] < (4096 if rank // PER_NODE else 1)  # the extra state of rank 0


def test_the_bytes_for_a_buddy_are_those_that_no_other_node_has(ranks: RankPool, tmp_path: Path) -> None:
    """ZeRO-3: parameters and two states in fp32, a quarter each. MiCS: nothing but random states."""
    for preset, planned in (("zero3", 12 * NUMEL // WORLD_SIZE), ("mics", 0)):
        results = ranks(WORLD_SIZE, take_and_lose, str(tmp_path / preset), preset, None)
        for result in results:
            cost = result["cost"]
            assert cost.planned_buddy_bytes == planned
            assert planned < cost.sent_bytes < planned + 60_000  # random states, the report, and torch's file format
            assert cost.num_bytes > (12 * NUMEL // WORLD_SIZE)


def damage_and_load(ctx: RankContext, folder: str, kind: str) -> int:
    """Two snapshots, of which the later one is damaged; returns the step from which the job continues."""
    sharded, optimizer = training("zero3")
    snapshots = snapshots_of(ctx, folder, sharded, optimizer)
    snapshots.after_step({"step": 1})
    snapshots.finish()
    kept = node_of(ctx, folder).parent / f"kept{ctx.rank // PER_NODE}"
    if ctx.rank % PER_NODE == 0:
        shutil.copytree(node_of(ctx, folder), kept)
    dist.barrier()
    step(sharded, optimizer)
    snapshots.after_step({"step": 2})
    snapshots.finish()
    snapshots.close(keep=True)
    dist.barrier()
    if ctx.rank % PER_NODE == 0:
        shutil.copytree(kept, node_of(ctx, folder), dirs_exist_ok=True)  # as it is until the next one is whole
        damage(node_of(ctx, folder), kind)
    dist.barrier()
    snapshots = snapshots_of(ctx, folder, sharded, optimizer)
    found = snapshots.load()["step"]
    snapshots.close()
    return int(found)


def damage(node: Path, kind: str) -> None:
    """Change every copy of rank 1's file of the later snapshot."""
    for path in node.glob("mics_strategy-*/*/000000000002-*/__1_sole_0.distcp"):
        if kind == "a bit":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        elif kind == "the end":
            os.truncate(path, path.stat().st_size - 1)
        elif kind == "a link":
            path.rename(path.with_suffix(".moved"))
            path.symlink_to(path.with_suffix(".moved"))
        elif kind == "a mode":
            path.chmod(0o604)
        elif kind == "a pipe":
            path.unlink()
            os.mkfifo(path, 0o600)
        else:
            path.unlink()


@pytest.mark.wide(every=2)
@pytest.mark.parametrize("kind", ["a bit", "the end", "a link", "a mode", "a pipe", "all of it"])
def test_a_damaged_snapshot_is_not_read(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert ranks(WORLD_SIZE, damage_and_load, str(tmp_path), kind) == [1] * WORLD_SIZE


def test_an_intact_snapshot_is_read(ranks: RankPool, tmp_path: Path) -> None:
    """What the damages above are compared with: a file that is not there does not change."""
    assert ranks(WORLD_SIZE, keep_and_load, str(tmp_path)) == [2] * WORLD_SIZE


def keep_and_load(ctx: RankContext, folder: str) -> int:
    sharded, optimizer = training("zero3")
    snapshots = snapshots_of(ctx, folder, sharded, optimizer)
    for number in (1, 2):
        snapshots.after_step({"step": number})
    snapshots.close(keep=True)
    snapshots = snapshots_of(ctx, folder, sharded, optimizer)
    found = snapshots.load()["step"]
    snapshots.close()
    assert files_in(node_of(ctx, folder)) == []
    return int(found)


def choose(ctx: RankContext, folder: str, saved_step: int, *, is_damaged: bool = False) -> tuple[int, int]:
    """A checkpoint on the disk beside a snapshot of step 3."""
    sharded, optimizer = training("mics")
    sharded.steps_done = saved_step
    save_checkpoint(Path(folder, "disk", "saved"), sharded, [optimizer], {"step": saved_step})
    if is_damaged and ctx.rank == 0:
        Path(folder, "disk", "saved", ".metadata").write_bytes(b"")
    sharded.steps_done = 3
    snapshots = snapshots_of(ctx, folder, sharded, optimizer)
    snapshots.take({"step": 3})
    found = snapshots.load(checkpoints=Path(folder, "disk"))["step"]
    steps = sharded.steps_done
    snapshots.close()
    return int(found), steps


@pytest.mark.parametrize(("saved", "expected"), [(2, 3), (3, 3), (4, 4)])
def test_the_later_of_snapshot_and_checkpoint_counts(
    ranks: RankPool, tmp_path: Path, saved: int, expected: int
) -> None:
    assert ranks(2, choose, str(tmp_path), saved) == [(expected, expected)] * 2


def choose_beside_a_damaged_one(ctx: RankContext, folder: str) -> tuple[int, int]:
    return choose(ctx, folder, 4, is_damaged=True)


def test_a_snapshot_counts_where_a_later_checkpoint_is_damaged(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, choose_beside_a_damaged_one, str(tmp_path)) == [(3, 3)] * 2


def other_job(ctx: RankContext, folder: str) -> Any:
    sharded, optimizer = training("mics")
    first = MemorySnapshots(sharded, [optimizer], job="first", folder=folder)
    first.take({"step": 1})
    first.close(keep=True)
    for job in ("second", None):
        second = MemorySnapshots(sharded, [optimizer], job=job, folder=folder)
        assert second.load({"step": 0}) == {"step": 0}
        second.close()
    return None


def test_another_job_does_not_find_it(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, other_job, str(tmp_path))


def two_at_once(ctx: RankContext, folder: str) -> list[object]:
    first = MemorySnapshots(training("mics")[0], job="first", folder=folder)
    refused = [
        refusal(ctx, lambda _, job=job: MemorySnapshots(training("mics")[0], job=job, folder=folder))
        for job in ("first", "second")
    ]
    first.close()
    MemorySnapshots(training("mics")[0], job="second", folder=folder).close()
    return refused


def test_models_that_are_trained_together_get_no_snapshots_of_different_steps(ranks: RankPool, tmp_path: Path) -> None:
    for errors in zip(*ranks(2, two_at_once, str(tmp_path)), strict=True):
        assert_refused(errors, CheckpointError, r"already keeps snapshots of the job `first`.*of different steps")


def objects_are_refused(ctx: RankContext, folder: str) -> None:
    sharded, optimizer = training("mics")
    snapshots = snapshots_of(ctx, folder, sharded, optimizer)
    snapshots.take({"step": 1})
    snapshots.take({"path": Path("x")} if ctx.rank == 0 else {})
    with pytest.raises(CheckpointError, match=r"Rank 0 could not.*no plain data"):
        snapshots.finish()
    assert snapshots.load() == {"step": 1}
    snapshots.close()


def test_objects_in_the_extra_state_are_refused_when_they_are_saved(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, objects_are_refused, str(tmp_path))


def intervals(ctx: RankContext, folder: str) -> list[bool]:
    sharded, optimizer = training("mics")
    snapshots = snapshots_of(ctx, folder, sharded, optimizer, every=3)
    taken = [snapshots.after_step(lambda: {"step": 1}) for _ in range(7)]
    snapshots.close()
    return taken


def test_a_snapshot_is_taken_every_so_many_steps(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, intervals, str(tmp_path)) == [[False, False, True, False, False, True, False]] * 2


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no step": ({"every": 0}, ConfigError, "every=0"),
    "a flag": ({"every": True}, ConfigError, "every=True"),
    "a path": ({"job": "../x"}, ConfigError, "job='../x'"),
    "no folder": ({"folder": "/proc/none"}, CheckpointError, "/proc/none.*folder"),
}


def make(ctx: RankContext, folder: str, options: dict[str, Any]) -> None:
    sharded, optimizer = training("mics")
    MemorySnapshots(sharded, [optimizer], **{"folder": folder, **options})


@pytest.mark.parametrize(("options", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_an_option_is_refused(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    raises_on_every_rank(lambda: ranks(2, make, str(tmp_path), options), error, match)
