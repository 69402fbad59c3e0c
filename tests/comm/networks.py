"""How does a test get collectives over all ranks of a job, in one stage or several?"""

import torch
from torch import Tensor

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.comm.communicator import AnyCommunicator, Communicator, SizeDispatch
from mics_strategy.comm.process_groups import ProcessGroups
from mics_strategy.comm.resources import CommResources
from mics_strategy.comm.workspace import Workspace
from mics_strategy.scopes import Codecs, Scopes
from mics_strategy.topology import Axis
from tests.ranks import RankContext

NODES_PER_SWITCH = 2  # where there are three stages
NAN_BYTE = 255  # four of them are NaN in every floating dtype: what is read before it is written shows


def scopes_of(
    ctx: RankContext,
    codec: Codec | None = None,
    links: str = "slow",
    stages: int = 2,
    per_switch: int = NODES_PER_SWITCH,
) -> Scopes:
    """Everything sharded over all ranks, in as many stages as there are kinds of links, or in one."""
    per_switch = per_switch if stages == 3 else ctx.num_nodes
    sizes = {
        "intra_node": ctx.ranks_per_node,
        "inter_node": per_switch,
        "inter_switch": ctx.num_nodes // per_switch,
    }
    strides = {"intra_node": 1, "inter_node": ctx.ranks_per_node, "inter_switch": ctx.ranks_per_node * per_switch}
    return Scopes(
        world_size=ctx.world_size,
        ranks_per_node=ctx.ranks_per_node,
        params=ctx.world_size,
        grads=ctx.world_size,
        optimizer=ctx.world_size,
        secondary=ctx.world_size,
        axes=tuple(Axis(name=name, size=size, stride=strides[name]) for name, size in sizes.items() if size > 1),
        is_hierarchical=stages != 1,
        codecs=Codecs(params=codec, first_hop=codec, is_on_all_links=links == "all"),
    )


class Network:
    """Two queues over all ranks: collectives that gather parameters, and collectives that reduce gradients.

    Attributes:
        one: The collective of the first queue; it can do all three kinds.
        other: That of the second.
    """

    def __init__(
        self,
        ctx: RankContext,
        codec: Codec | None = None,
        links: str = "slow",
        stages: int = 2,
        per_switch: int = NODES_PER_SWITCH,
    ) -> None:
        scopes = scopes_of(ctx, codec, links, stages, per_switch)
        self.groups = ProcessGroups(scopes, CommResources(ctx.world_size, "cpu"), seed=0)
        self.one = _only(self.groups.param_comm)
        self.other = _only(self.groups.grad_comm)

    @property
    def workspace(self) -> Workspace:
        """Of the first queue."""
        return self.groups.workspaces["gather"]

    def lend(self, spare_bytes: int = 0) -> None:
        """Give each queue the memory that was announced for it, and forget the announcements."""
        for workspace in self.groups.workspaces.values():
            num_bytes = max(0, workspace.needed_bytes + spare_bytes)
            workspace.bind(torch.full((num_bytes,), NAN_BYTE, dtype=torch.uint8))
            workspace.part_bytes = 0

    def values(self, index: int, numel: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
        """What the rank of that index brings."""
        return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * salt + index)).to(dtype)

    def gather(self, numel: int, label: str = "block", salt: int = 0) -> bool:
        """Gather `numel` numbers of each rank in the first queue; whether the result is right."""
        self.one.reserve("all_gather", self.one.size * numel, torch.float32, torch.float32)
        self.lend()
        out = torch.empty(self.one.size * numel)
        self.one.all_gather(out, self.values(self.one.index, numel, salt=salt), label).wait()
        return torch.equal(out, torch.cat([self.values(i, numel, salt=salt) for i in range(self.one.size)]))


def _only(comm: AnyCommunicator | None) -> Communicator:
    """The collective that is ever used."""
    assert comm is not None
    return comm.flat if isinstance(comm, SizeDispatch) else comm
