"""Which of two collectives over the same ranks moves a tensor of this size?"""

from __future__ import annotations

import torch

from mics_strategy.collectives.collective import Communicator
from mics_strategy.collectives.ops import Work
from mics_strategy.collectives.transport import Transport


class SizeDispatch:
    """Collectives over the same ranks, shards in the same order, that go in one of two ways. Used as one `Collective`.

    Both are in one lane and lend one workspace, so the order in which they are asked for is kept between them, too.

    Args:
        flat: Moves whole tensors of fewer than `from_bytes` bytes, counted as they travel unencoded.
        hierarchical: Moves the others.
        from_bytes: The same on all ranks.
    """

    def __init__(self, small: Communicator, large: Communicator, from_bytes: int) -> None:
        self.flat = small
        self.hierarchical = large
        self.size = large.size
        self.index = large.index
        self._from_bytes = from_bytes

    @property
    def transports(self) -> list[Transport]:
        """Of both."""
        return [*self.hierarchical.transports, *self.flat.transports]

    def for_bytes(self, full_bytes: int) -> Communicator:
        """What moves a whole tensor of this size."""
        return self.flat if full_bytes < self._from_bytes else self.hierarchical

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, what: str) -> Work:
        """See `Collective.gather`."""
        return self.for_bytes(out.numel() * out.itemsize).all_gather(out, shard, what)

    def reserve_all_gather(self, numel: int, dtype: torch.dtype) -> None:
        """See `Collective.reserve_all_gather`."""
        self.for_bytes(self.size * numel * dtype.itemsize).reserve_all_gather(numel, dtype)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, what: str) -> Work:
        """See `Collective.reduce`."""
        return self.for_bytes(full.numel() * full.itemsize).reduce_scatter(out, full, accumulate, what)

    def reserve_reduce_scatter(self, full_numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """See `Collective.reserve_reduce_scatter`."""
        self.for_bytes(full_numel * wire.itemsize).reserve_reduce_scatter(full_numel, wire, dtype)

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, what: str) -> Work:
        """See `Collective.all_reduce`."""
        return self.for_bytes(tensor.numel() * wire.itemsize).all_reduce(tensor, wire, what)

    def reserve_all_reduce(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """See `Collective.reserve_all_reduce`."""
        self.for_bytes(numel * wire.itemsize).reserve_all_reduce(numel, wire, dtype)


AnyCommunicator = Communicator | SizeDispatch
