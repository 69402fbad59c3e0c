"""The configurations that a planner chooses from.

Every scope of every state that the engine allows, with the secondary copy where it can help, every micro-batch that
divides the batch, and recomputation. Codecs change results, so that they are searched only where a caller asks.

Pure.

Source:
    Constraints of sharding factors: AMSP (arXiv:2311.00257) section V-B, without its rule that gradients are sharded no
    coarser than parameters: PaRO (arXiv:2310.06003) table 1 has points on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from mics_strategy.comm.codecs.format import Codec
from mics_strategy.config import ShardConfig
from mics_strategy.errors import ConfigError
from mics_strategy.mesh_axis import allowed_degrees
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.memory import Overheads
from mics_strategy.scopes import Scopes, resolve_scopes
from mics_strategy.topology import Topology

EQUAL = 0.01  # share of a step by which times count as equal; the models are far less exact
_SYSTEMS = {"paro-nnn": "ddp", "paro-nng": "zero1", "paro-ngg": "zero2", "paro-ggg": "zero3", "paro-iii": "mics"}
SYSTEM_PRESETS = (*_SYSTEMS.values(), "zeropp-hpz")  # names of `preset_of` that are not triples of letters

# Triples with a mark in PaRO's table 1 for a least share of trained parameters, the last of all shares below.
_ADVISED = (
    (1 / 6, "nnn nni nng nii nig ngg iii iig igg ggg"),
    (0.03, "nnn nni nng nii nig ngg ini ing iii iig igg gng gig ggg"),
    (0.0, "nnn nni nng ini ing gng"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may be chosen.

    Attributes:
        codecs: Pairs of `weight_codec` and `grad_codec`; the first one is that of no codecs.
        has_secondary: Whether secondary copies of the parameters may be kept.
        degrees: Triples of ranks of parameters, gradients and optimizer states; none for all that the engine allows.
        base: Fields of every configuration that the planner does not choose.
    """

    codecs: tuple[tuple[str | Codec, str | Codec], ...] = (("none", "none"),)
    has_secondary: bool = True
    degrees: frozenset[tuple[int, int, int]] = frozenset()
    base: ShardConfig = field(default_factory=ShardConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopedConfig:
    """One configuration with its ranks and axes."""

    config: ShardConfig
    scopes: Scopes


def topology_of(cluster: Cluster) -> Topology:
    """The placement of the cluster's ranks."""
    return Topology(ranks_per_node=cluster.ranks_per_node, nodes_per_switch=cluster.nodes_per_switch)


def overheads_of(cluster: Cluster) -> Overheads:
    """Memory of the cluster's ranks outside torch's allocator."""
    return Overheads.of(cluster.backend, cluster.device.communicator_bytes)


def scopes_of(config: ShardConfig, cluster: Cluster) -> Scopes:
    """Ranks and axes of a configuration on a cluster.

    Raises:
        ConfigError: The engine refuses the configuration in this job.
    """
    _refuse_other_algorithms(config)
    topology = topology_of(cluster)
    return resolve_scopes(config.replace(topology=topology), topology, cluster.world_size)


def _refuse_other_algorithms(config: ShardConfig) -> None:
    if config.outer_every:
        raise ConfigError(
            f"`outer_every={config.outer_every}` is another algorithm than the synchronous training that the planner "
            "predicts and compares. Plan with outer_every=0; `mics estimate --outer-every` counts memory."
        )
    if config.second_hop == "delayed":
        raise ConfigError(
            "`second_hop='delayed'` is another algorithm than the synchronous training that the planner predicts and "
            "compares. Plan with second_hop='boundary'; `mics estimate --second-hop delayed` counts memory."
        )


def scoped_configs(space: Space, cluster: Cluster) -> Iterator[ScopedConfig]:
    """Every configuration of the space that the engine accepts in this job."""
    _refuse_other_algorithms(space.base)
    topology, world_size = topology_of(cluster), cluster.world_size
    base = space.base.replace(topology=topology, world_size=world_size)
    topology.check_world(world_size)
    degrees = allowed_degrees(topology, world_size)
    for optimizer in degrees:
        nested = [degree for degree in degrees if optimizer % degree == 0]
        for params in nested:
            for grads in nested:
                if max(params, grads) % min(params, grads):
                    continue
                if space.degrees and (params, grads, optimizer) not in space.degrees:
                    continue
                for secondary in _secondaries(params, cluster.ranks_per_node, space):
                    for weight_codec, grad_codec in space.codecs:
                        config = base.replace(
                            params=params,
                            grads=grads,
                            optimizer=optimizer,
                            secondary_params=secondary,
                            weight_codec=weight_codec,
                            grad_codec=grad_codec,
                        )
                        try:
                            scopes = scopes_of(config, cluster)
                        except ConfigError:  # the space is what the engine accepts: here, a codec without payload
                            continue
                        yield ScopedConfig(config=config, scopes=scopes)


def _secondaries(params: int, ranks_per_node: int, space: Space) -> tuple[str | int, ...]:
    """Scopes of the secondary copy: none, or a node within a larger scope."""
    if space.has_secondary and params > ranks_per_node > 1:
        return ("none", ranks_per_node)
    return ("none",)


def complexity(scopes: Scopes) -> int:
    """Mesh axes, and a secondary copy, which users would rather do without."""
    return len(scopes.axes) + scopes.has_secondary


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class TieOrder:
    """What decides between points that are equally fast, the first difference first; less is better.

    Attributes:
        doublings: Logarithm of the bytes that a rank sends between nodes in a step, to the base of 2, rounded: less
            decides nothing. Links between nodes are shared with others, and times on them are predicted worst.
        complexity: Mesh axes, and a secondary copy.
        gathered: Ranks from which parameters are gathered, those of a node at least.
        memory_share: Memory of a rank beyond that of the smallest point, in whole hundredths of the device's. Less
            decides nothing: sharding the few gradients of adapters saves less, and sends them in every micro-step.
        grads: Ranks of gradients where few parameters are trained; 0 where all are.
        memory_bytes: Memory of a rank.

    Source:
        Whole gradients of few trained parameters: principle 3 of PaRO (arXiv:2310.06003).
    """

    doublings: int
    complexity: int
    gathered: int
    memory_share: int
    grads: int
    memory_bytes: int

    @classmethod
    def of(cls, scopes: Scopes, sent_bytes: float, memory_bytes: int, memory_share: int) -> TieOrder:
        """The order of a point that sends so much between nodes in a step."""
        return cls(
            doublings=round(math.log2(1 + sent_bytes)),
            complexity=complexity(scopes),
            gathered=max(scopes.params, scopes.ranks_per_node),
            memory_share=memory_share,
            grads=scopes.grads,
            memory_bytes=memory_bytes,
        )

    def reason_against(self, chosen: TieOrder) -> str:
        """Why an equally fast point that is behind the chosen one in this order was not chosen."""
        if self.doublings > chosen.doublings:
            return f"as fast, but sends about {2 ** (self.doublings - chosen.doublings)} times as much between nodes"
        if self.complexity > chosen.complexity:
            return "as fast, but its ranks form more kinds of groups"
        if self.gathered > chosen.gathered:
            return f"as fast, but gathers parameters from {self.gathered} ranks instead of {chosen.gathered}"
        if self.memory_share == chosen.memory_share and self.grads > chosen.grads:
            return f"as fast, and shards gradients over {self.grads} ranks for less than {EQUAL:.0%} of the memory"
        return f"as fast, but needs {(self.memory_bytes - chosen.memory_bytes) / 1e9:.2g} GB more"


def advised_presets(trained_share: float) -> list[str]:
    """Presets that PaRO (arXiv:2310.06003), table 1, advises where such a share of the parameters is trained.

    Few trained parameters have whole gradients; where all are trained, parameters are not spread wider than gradients.
    """
    triples = next(triples for least, triples in _ADVISED if trained_share >= least)
    return [f"paro-{letters}" for letters in triples.split()]


def preset_of(scopes: Scopes) -> str | None:
    """The preset that has these scopes, or None; a partition is a node."""
    letters = {scopes.world_size: "g", scopes.ranks_per_node: "i", 1: "n"}
    name = "paro-" + "".join(letters.get(degree, "?") for degree in scopes.degrees.values())
    name = _SYSTEMS.get(name, name)
    if scopes.has_secondary:
        return "zeropp-hpz" if name == "zero3" else None
    return name if name in ShardConfig.PRESETS else None
