"""Every chain of scopes into which a topology divides."""

from collections.abc import Iterator
from itertools import pairwise, product

from mics_strategy import ShardConfig, Topology

REAL = ((1, 1), (1, 4), (2, 2), (4, 1))  # nodes, ranks on each
SIMULATED = ((2, 4), (4, 4), (2, 8))


def chains(nodes: int, per_node: int) -> Iterator[ShardConfig]:
    """Configurations with all model states at every degree that the rules allow.

    A degree is a divisor of a node's ranks, or a number of whole nodes; each divides the next larger one; none is
    larger than the optimizer's; the secondary copy's is smaller than that of the parameters.
    """
    world = nodes * per_node
    degrees = [d for d in range(1, world + 1) if world % d == 0 and (per_node % d == 0 or d % per_node == 0)]
    for params, grads, optimizer in product(degrees, repeat=3):
        if max(params, grads) > optimizer:
            continue
        for secondary in ("none", *(d for d in degrees if d < params)):
            if _nest({params, grads, optimizer, *([] if secondary == "none" else [secondary])}):
                yield ShardConfig(
                    params=params,
                    grads=grads,
                    optimizer=optimizer,
                    secondary_params=secondary,
                    topology=Topology(ranks_per_node=per_node),
                )


def _nest(degrees: set[int]) -> bool:
    return all(large % small == 0 for small, large in pairwise(sorted(degrees)))
