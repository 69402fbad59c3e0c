"""Over which ranks does a collective go in this job, and what carries out each of its stages?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mics_strategy.collectives.ring import RingAlgorithm
from mics_strategy.collectives.route import Algorithm, Hop, Route
from mics_strategy.collectives.stages import GroupAlgorithm, PlainAlgorithm, QuantizedAlgorithm
from mics_strategy.collectives.transport import Transport
from mics_strategy.collectives.watch import DesyncWatchdog
from mics_strategy.collectives.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteBinding:
    """A route in this job.

    Attributes:
        route: The stages, with their codecs.
        transports: Of the slow stage, and of the fast one where there is one.
        ranks: That take part, in all stages.
        watch: Knows whether ranks have parted.
    """

    route: Route
    transports: list[Transport]
    ranks: frozenset[int]
    watch: DesyncWatchdog


def make_algorithm(transport: Transport, hop: Hop, workspace: Workspace, device: torch.device) -> GroupAlgorithm:
    """What carries out one hop of a route."""
    if hop.codec is not None:
        return QuantizedAlgorithm(transport, workspace, hop.codec, device)
    if hop.algorithm is Algorithm.RING and transport.is_point_to_point:
        return RingAlgorithm(transport, workspace)
    return PlainAlgorithm(transport, workspace)
