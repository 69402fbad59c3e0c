"""Ranks that go on after a loss, and the scopes that they have then.

Ranks stay or leave in blocks: whole nodes, and whole groups over which optimizer states are sharded. So every rank that
stays has the shards that it had before, and nothing has to be sent.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.mesh_axis import make_axes
from mics_strategy.scopes import Scopes
from mics_strategy.topology import Topology


def block_size(scopes: Scopes) -> int:
    """Consecutive ranks that stay or leave together."""
    has_several_nodes = scopes.world_size > scopes.ranks_per_node
    return max(scopes.optimizer, scopes.ranks_per_node if has_several_nodes else 1)


def remaining(members: Sequence[int], lost: Collection[int], block: int) -> list[int]:
    """The members of blocks that have lost none, in the order of their ranks.

    Args:
        members: Members in the order of their ranks.
        lost: Members that are gone.
        block: Ranks of a block.
    """
    blocks = [members[start : start + block] for start in range(0, len(members), block)]
    return [member for whole in blocks if not set(whole).intersection(lost) for member in whole]


def shrink(scopes: Scopes, world_size: int) -> Scopes:
    """The scopes of a job that has fewer ranks, in whole blocks. Degrees stay; all links between nodes count alike."""
    per_node = min(scopes.ranks_per_node, world_size)
    degrees = {scopes.params, scopes.grads, scopes.optimizer, scopes.secondary}
    axes = make_axes({*degrees, world_size}, Topology(ranks_per_node=per_node), world_size)
    return dataclasses.replace(scopes, world_size=world_size, ranks_per_node=per_node, axes=axes)


def check_recoverable(config: ShardConfig, scopes: Scopes) -> None:
    """Check that a job can lose ranks and go on with what the others have in memory.

    Raises:
        ConfigError: It cannot. The error says why.
    """
    asked = "`Recovery` continues with the copies of the states that other ranks have"
    if scopes.world_size == block_size(scopes):
        raise ConfigError(
            f"{asked}, and this job has one: optimizer states are sharded over {scopes.optimizer} of its "
            f"{scopes.world_size} ranks, and {scopes.ranks_per_node} are a node. Use a smaller `partition_size`, more "
            "nodes, or checkpoints and a restart."
        )
    problems = {
        "`optimizer_layout='tensors'` sends in the middle of an optimizer's step": config.optimizer_layout == "tensors"
        and scopes.optimizer > 1,
        "`outer_every` lets islands have different values": config.outer_every > 0,
        "`second_hop='delayed'` keeps sums of steps before in flight": config.second_hop == "delayed",
        "`overlap` without 'update' sends behind an optimizer's step": "update" not in config.overlap,
        "error feedback keeps what a step that is run again has sent": any(
            codec is not None and codec.feedback for codec in (scopes.codecs.first_hop, scopes.codecs.second_hop)
        ),
        "differences of parameters keep what a step that is run again has sent": scopes.codecs.has_differences,
        f"`world_size={config.world_size}` allows no other number of ranks": config.world_size != "any",
    }
    for problem, is_met in problems.items():
        if is_met:
            raise ConfigError(f"{asked}, but {problem}. Change this option, or use checkpoints and a restart.")
