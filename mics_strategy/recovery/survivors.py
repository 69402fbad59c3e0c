"""Ranks that go on after a loss or with newcomers, and the scopes that they have then.

Ranks stay, leave and join in blocks: whole nodes, and whole groups over which optimizer states are sharded. So every
rank that stays has the shards that it had before, and a newcomer has those of a rank in any other block.

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
    """Consecutive ranks that stay, leave or join together."""
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


def sources(members: Sequence[int], newcomers: Collection[int], block: int) -> dict[int, int]:
    """The member from which each newcomer gets its states: one in the same place of another block, in turns.

    Args:
        members: Members in the order of their ranks.
        newcomers: Those of them that have no states, in whole blocks.
        block: Ranks of a block.
    """
    complete = remaining(members, newcomers, block)
    incomplete = [member for member in members if member in newcomers]
    return {member: complete[position % len(complete)] for position, member in enumerate(incomplete)}


def resize(scopes: Scopes, world_size: int, *, is_one_node: bool) -> Scopes:
    """The scopes of a job that has more or fewer whole blocks of ranks.

    Degrees stay. All links between nodes count alike.

    Args:
        scopes: Scopes of the job.
        world_size: Its new number of ranks.
        is_one_node: Whether a block is less than a node, so that the job is one node of any number of ranks.
    """
    per_node = world_size if is_one_node else scopes.ranks_per_node
    degrees = {scopes.params, scopes.grads, scopes.optimizer, scopes.secondary}
    axes = make_axes({*degrees, world_size}, Topology(ranks_per_node=per_node), world_size)
    return dataclasses.replace(scopes, world_size=world_size, ranks_per_node=per_node, axes=axes)


def check_recoverable(config: ShardConfig, scopes: Scopes, *, allows_one_copy: bool = False) -> None:
    """Check that a job can lose ranks and go on with what the others have in memory.

    Args:
        config: Its configuration.
        scopes: Its scopes.
        allows_one_copy: Whether the states may have no second copy yet, because newcomers will bring one.

    Raises:
        ConfigError: It cannot. The error says why.
    """
    asked = "`Recovery` continues with the copies of the states that other ranks have"
    has_one_copy = scopes.world_size == block_size(scopes)
    if has_one_copy and not allows_one_copy:
        raise ConfigError(
            f"{asked}, and this job has one: optimizer states are sharded over {scopes.optimizer} of its "
            f"{scopes.world_size} ranks, and {scopes.ranks_per_node} are a node. Use a smaller `partition_size`, more "
            "nodes, or checkpoints and a restart; or `allows_one_copy=True`, if more nodes will join."
        )
    degrees = (config.partition_size, config.params, config.grads, config.optimizer, config.secondary_params)
    codecs = (scopes.codecs.params, scopes.codecs.first_hop, scopes.codecs.second_hop)
    problems = {
        "a scope of 'world' is another one with more ranks": has_one_copy and "world" in degrees,
        "codecs align parameters in another way where there are more nodes": has_one_copy and codecs != (None,) * 3,
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
