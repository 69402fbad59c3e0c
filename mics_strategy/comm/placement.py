"""How are masters stored over the ranks, and what is drawn into them?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from mics_strategy.comm.communicator import AnyCommunicator

_PRIME = 1_000_003
_NUM_SEEDS = 1 << 62


class ReplicaRandom:
    """Seeds for what one rank draws into its shards: the same on all replicas of a shard, others on every shard.

    Whoever draws into shards (an optimizer with noise or stochastic rounding, `nn.init` on sharded parameters, noise on
    gradients) would otherwise give replicas different values, as each rank has a generator of its own.

    Args:
        seed: The same on all ranks.
        index: Of the shard; the same on its replicas.
        device: Of the shards.
    """

    def __init__(self, seed: int, index: int, device: torch.device) -> None:
        self._seed = seed
        self._index = index
        self._devices = [device] if device.type == "cuda" else []
        self.num_draws = 0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw the next numbers inside; the rank's own generators go on afterwards as if nothing had been drawn.

        Ranks enter it equally often.
        """
        before = self.begin()
        try:
            yield
        finally:
            self.end(before)

    def begin(self) -> list[torch.Tensor]:
        """Seed the generators for the next numbers. Returns their states of before."""
        self.num_draws += 1
        before = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]
        seed = ((self._seed + _PRIME * self.num_draws) * _PRIME + self._index) % _NUM_SEEDS
        torch.default_generator.manual_seed(seed)
        for device in self._devices:
            torch.cuda.default_generators[
                torch.cuda.current_device() if device.index is None else device.index
            ].manual_seed(seed)
        return before

    def end(self, before: list[torch.Tensor]) -> None:
        """Put the generators back."""
        torch.set_rng_state(before[0])
        for device, state in zip(self._devices, before[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlacement:
    """How the masters of trained, or of frozen, parameters lie over the ranks.

    Attributes:
        degree: Ranks over which they are sharded.
        index: Which shard this rank holds.
        device_mesh: Labels them; replicas by shards, axes of one rank left out.
        sync_comm: Gathers them over what the parameter scope lacks; None where that is nothing.
        random: For what is drawn into them.
    """

    degree: int
    index: int
    device_mesh: DeviceMesh
    sync_comm: AnyCommunicator | None
    random: ReplicaRandom


def digest(values: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's words, an int64 scalar on its device: other where a few numbers are others."""
    flat = values.detach().reshape(-1)
    word = torch.int32 if flat.numel() * flat.element_size() % 4 == 0 and flat.element_size() <= 4 else torch.uint8
    return flat.view(word).sum(dtype=torch.int64)


def digest_weight(place: int, count: int) -> int:
    """What to multiply equal numbers of `count` ranks with so that they add up to 0."""
    return count - 1 if place == 0 else -1
