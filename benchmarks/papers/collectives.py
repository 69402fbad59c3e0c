"""Times of single collectives on a test-bed.

Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.papers.testbed import NotPredictable, Testbed
from mics_strategy.comm.route import ALL_GATHER
from mics_strategy.comm.traffic import StageTraffic
from mics_strategy.planner.comm_time import INTER_NODE, INTRA_NODE, CommTime
from mics_strategy.topology import Axis

if TYPE_CHECKING:
    from benchmarks.papers.row import PublishedRow

_LARGE_BYTES = 2**30  # where bandwidth alone counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A predicted value in the row's unit; the fields are those of `Predicted`."""

    value: float
    assumptions: tuple[str, ...] = ()
    is_calibration: bool = False


def gather_seconds(testbed: Testbed, ranks: int, full_bytes: int, *, in_two_stages: bool) -> float:
    """Seconds of an all-gather over whole nodes, or over ranks of one."""
    per_node = min(ranks, testbed.cluster.ranks_per_node)
    nodes = ranks // per_node
    axes = (
        Axis(name=INTRA_NODE, size=per_node, stride=1),
        Axis(name=INTER_NODE, size=nodes, stride=per_node),
    )
    comm_time = CommTime(testbed.cluster.with_nodes(max(nodes, 1)), axes)

    def seconds(name: str, size: int, num_bytes: int) -> float:
        return comm_time.of(StageTraffic(ALL_GATHER, name, size, torch.bfloat16, num_bytes)).seconds

    if nodes == 1:
        return seconds(INTRA_NODE, per_node, full_bytes)
    if in_two_stages:
        return seconds(INTER_NODE, nodes, full_bytes // per_node) + seconds(INTRA_NODE, per_node, full_bytes)
    return seconds(f"{INTRA_NODE}+{INTER_NODE}", ranks, full_bytes)


def _ranks(row: PublishedRow) -> int:
    stated = re.search(r"\bp\s*=\s*(\d+)", row.words("partition_config"))
    ranks = int(stated[1]) if stated else row.world_size
    if not ranks:
        raise NotPredictable("the ranks of the collective are not stated")
    return ranks


def _message_bytes(row: PublishedRow) -> int | None:
    for column in ("metric", "partition_config", "notes", "quote"):
        stated = re.search(r"(\d+(?:\.\d+)?)\s*([mg])i?b\b", row.words(column))
        if stated:
            return round(float(stated[1]) * {"m": 2**20, "g": 2**30}[stated[2]])
    return None


def bandwidth(row: PublishedRow, testbed: Testbed) -> Value:
    """Bytes per second that a rank receives in a large all-gather."""
    ranks = _ranks(row)
    seconds = gather_seconds(testbed, ranks, _LARGE_BYTES, in_two_stages=False)
    received = _LARGE_BYTES * (ranks - 1) / ranks
    note = "the efficiency of the test-bed's links is from this measurement"
    is_calibration = "mics" in row.words("paper")
    return Value(value=received / seconds / 1e9, assumptions=(note,), is_calibration=is_calibration)


def hierarchical_share(row: PublishedRow, testbed: Testbed) -> Value:
    """Time of an all-gather in two stages over that in one, in the row's unit."""
    ranks = _ranks(row)
    stated = _message_bytes(row)
    num_bytes = stated or 128 * 2**20
    ratio = _two_stages_over_one(testbed, ranks, num_bytes)
    notes = () if stated else ("message not stated: 128 MB",)
    return Value(value=ratio * 100 if row.text("unit") == "%" else ratio, assumptions=notes)


def _two_stages_over_one(testbed: Testbed, ranks: int, num_bytes: int) -> float:
    seconds = [gather_seconds(testbed, ranks, num_bytes, in_two_stages=both) for both in (True, False)]
    return seconds[0] / seconds[1]


def gather_cost_ratio(row: PublishedRow, testbed: Testbed) -> Value:
    """Time of an all-gather over all ranks over that over a partition (MiCS 3.2)."""
    if "measured" in row.words("system") and _message_bytes(row) is None:
        raise NotPredictable("the messages of the measurement are not stated")
    world_size = row.world_size or (row.count("nodes") or 0) * testbed.cluster.ranks_per_node
    nodes = re.search(r"group\s*=\s*(\d+)\s*node", row.words("partition_config"))
    partition = int(nodes[1]) * testbed.cluster.ranks_per_node if nodes else _ranks(row)
    if not world_size:
        raise NotPredictable("the number of ranks is not stated")
    stated = _message_bytes(row)
    num_bytes = stated or 128 * 2**20
    all_s, part_s = (gather_seconds(testbed, size, num_bytes, in_two_stages=False) for size in (world_size, partition))
    return Value(value=all_s / part_s, assumptions=() if stated else ("message not stated: 128 MB",))
