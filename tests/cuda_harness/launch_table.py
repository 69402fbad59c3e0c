"""How many collectives and kernels does a unit launch, whatever the number of nodes, and how many under FSDP2?

`python -m tests.cuda_harness.launch_table` prints the table of `docs/benchmarks.md`. Counted on the pretended GPU of
one rank, on the fake backend: collectives are calls of c10d, kernels are ATen operators on the device and the codecs'
kernels.
"""

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.cuda_harness.counting import Log, table, totals
from tests.cuda_harness.machine import Machine
from tests.cuda_harness.runs import Tower, config_of, one_of_many, start

PER_NODE = 8
NODES = (2, 16, 64)
WIDTH = 512  # so that each of 512 ranks has a row of every matrix
_CODECS = {"weight_codec": "int8", "grad_codec": "int4", "codec_links": "all"}
# Columns, and the roles of chains or the names of FSDP2's launches that belong to them.
_OF_CHAINS = {
    "gather": ("param_all_gather", "param_sync"),
    "first hop": ("grad_reduce_scatter",),
    "second hop": ("second_hop_all_reduce", "second_hop_reduce_scatter"),
}
_OF_FSDP2 = {
    "gather": ("_allgather_base_", "all_gather_copy_in", "split_with_sizes_copy"),
    "first hop": ("_reduce_scatter_base_", "chunk_cat"),
    "second hop": ("allreduce_",),
}
Row = tuple[str, ...]
HEADER: Row = ("engine", "codecs", "nodes", *_OF_CHAINS, "step")


@dataclass(frozen=True, slots=True)
class Engine:
    """A row of the table: FSDP2, or a preset with its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    codecs: str = "-"

    def __str__(self) -> str:
        return f"{self.name} {self.codecs}"

    @property
    def is_fsdp2(self) -> bool:
        return self.name.startswith("FSDP2")

    def log(self, nodes: int) -> Log:
        """The log of a step on so many nodes."""
        if self.is_fsdp2:
            return fsdp2(nodes, is_hybrid="hybrid" in self.name).log
        return log_of(self.name.split(",")[0], nodes, PER_NODE, **self.options)


ENGINES = (
    Engine("FSDP2"),
    Engine("zero3"),
    Engine("zero3", _CODECS, "INT8, INT4"),
    Engine("zeropp-hpz"),
    Engine("zeropp", {}, "INT8, INT4"),
    Engine("FSDP2 hybrid"),
    Engine("mics"),
    Engine("mics, partitions of 2 nodes", {"partition_size": 16}),
    Engine("mics, partitions of 2 nodes", {"partition_size": 16, **_CODECS, "grad_codec_hops": "all"}, "INT8, INT4"),
)


def columns_of(engine: Engine, nodes: int) -> Row:
    """What one engine launches on so many nodes: by unit and pass, and in a step of all units."""
    log = engine.log(nodes)
    collectives, kernels = totals(log)
    by_pass = _of_fsdp2(log) if engine.is_fsdp2 else _of_chains(log)
    return (*by_pass, f"{collectives} + {kernels - kernels_unsharded()}")


def rows() -> list[Row]:
    """The rows of the table; those of one engine that differ in nothing but the nodes are one."""
    found: dict[tuple[str, str, Row], list[str]] = {}
    for engine, nodes in itertools.product(ENGINES, NODES):
        found.setdefault((engine.name, engine.codecs, columns_of(engine, nodes)), []).append(str(nodes))
    return [(name, codecs, ", ".join(nodes), *columns) for (name, codecs, columns), nodes in found.items()]


def _of_chains(log: Log) -> Row:
    counts = table(log)
    found = [[counts[role][1:] for role in roles if role in counts] for roles in _OF_CHAINS.values()]
    return tuple("-" if not chains else "{} + {}".format(*chains[0]) for chains in found)


def _of_fsdp2(log: Log) -> Row:
    """By unit: the launches of a pass by the number of its collectives, each of which is that of one unit."""
    columns = []
    for names in _OF_FSDP2.values():
        kinds = [kind for kind, _, name in log if name.rpartition(" ")[2] in names]
        count = kinds.count("collective")
        columns.append(f"1 + {kinds.count('kernel') // count}" if count else "-")
    return tuple(columns)


def log_of(preset: str, nodes: int, per_node: int, **options: Any) -> Log:
    """The log of the second step of one micro-step over 5 units; the order of units is known after the first."""
    width = options.pop("width", WIDTH)
    with one_of_many(nodes * per_node) as machine:
        training = start(machine, config_of(preset, ranks_per_node=per_node, **options), width=width)
        _train(machine, training.model, training.batch)
    return machine.log


def fsdp2(nodes: int = 1, *, is_hybrid: bool = False) -> Machine:
    """Two steps of torch's own engine; the log is that of the second."""
    with one_of_many(nodes * PER_NODE) as machine:
        sizes = {"replicate": nodes, "shard": PER_NODE} if is_hybrid else {"shard": nodes * PER_NODE}
        mesh = init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        model = _tower()
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=mesh)
        _train(machine, model, torch.randn(4, WIDTH).to("cuda"))
    return machine


@functools.cache
def kernels_unsharded() -> int:
    """Kernels of a step in which nothing is sharded."""
    with one_of_many() as machine:
        model = _tower()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(machine.device)
        _train(machine, model, torch.randn(4, WIDTH).to("cuda"))
    return totals(machine.log)[1]


def _tower() -> Tower:
    torch.manual_seed(3)
    return Tower(width=WIDTH)


def _train(machine: Machine, model: nn.Module, batch: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        machine.log.clear()
        with machine.step():
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    for cells in (HEADER, tuple("---" for _ in HEADER), *rows()):
        print("|", " | ".join(cells), "|")
