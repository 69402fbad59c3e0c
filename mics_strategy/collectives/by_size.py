"""Which of two collectives over the same ranks moves a tensor of this size?"""

from __future__ import annotations

import torch

from mics_strategy.collectives.collective import Collective
from mics_strategy.collectives.ops import Handle
from mics_strategy.collectives.transport import Transport


class BySize:
    """Collectives over the same ranks, shards in the same order, that go in one of two ways. Used as one `Collective`.

    Both are in one lane and lend one workspace, so the order in which they are asked for is kept between them, too.

    Args:
        small: Moves whole tensors of fewer than `from_bytes` bytes, counted as they travel unencoded.
        large: Moves the others.
        from_bytes: The same on all ranks.
    """

    def __init__(self, small: Collective, large: Collective, from_bytes: int) -> None:
        self.small = small
        self.large = large
        self.size = large.size
        self.index = large.index
        self._from_bytes = from_bytes

    @property
    def transports(self) -> list[Transport]:
        """Of both."""
        return [*self.large.transports, *self.small.transports]

    def of(self, full_bytes: int) -> Collective:
        """What moves a whole tensor of this size."""
        return self.small if full_bytes < self._from_bytes else self.large

    def gather(self, out: torch.Tensor, shard: torch.Tensor, what: str) -> Handle:
        """See `Collective.gather`."""
        return self.of(out.numel() * out.itemsize).gather(out, shard, what)

    def reserve_gather(self, numel: int, dtype: torch.dtype) -> None:
        """See `Collective.reserve_gather`."""
        self.of(self.size * numel * dtype.itemsize).reserve_gather(numel, dtype)

    def reduce(self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, what: str) -> Handle:
        """See `Collective.reduce`."""
        return self.of(full.numel() * full.itemsize).reduce(out, full, accumulate, what)

    def reserve_reduce(self, full_numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """See `Collective.reserve_reduce`."""
        self.of(full_numel * wire.itemsize).reserve_reduce(full_numel, wire, dtype)

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, what: str) -> Handle:
        """See `Collective.all_reduce`."""
        return self.of(tensor.numel() * wire.itemsize).all_reduce(tensor, wire, what)

    def reserve_all_reduce(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """See `Collective.reserve_all_reduce`."""
        self.of(numel * wire.itemsize).reserve_all_reduce(numel, wire, dtype)


AnyCollective = Collective | BySize
