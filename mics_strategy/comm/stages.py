"""The stages of one route, and the work of one collective over them.

On gloo the stages are pipelined; see `pipeline`. Other backends pipeline by themselves; see `native_stages`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from mics_strategy.comm.codecs.quantizer import Quantizer
    from mics_strategy.comm.work import Steps


class Stages(Protocol):
    """Runs collectives over the stages of a route.

    Each collective is a task of a queue (see `queue`): a generator that waits for no rank before its first `yield`, and
    has a part of the workspace for itself.

    Attributes:
        index: Index of this rank among those of the route.
        quantizer: Quantizer of shards that are encoded once for all stages of an all-gather; None where they are not.
    """

    index: int
    quantizer: Quantizer | None

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        """Put every rank's `shard`, or payload, into `out`; see `Communicator.all_gather`."""

    def all_gather_quantized(self, quantizer: Quantizer, out: torch.Tensor, shard: torch.Tensor, tag: int) -> Steps:
        """Encode once, gather the payloads over all stages, and decode all of them."""

    def reserve_all_gather(self, numel: int, dtype: torch.dtype) -> None:
        """Reserve workspace for all-gathers of shards of `numel` elements."""

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, tag: int) -> Steps:
        """Sum every `full` and keep this rank's slice; see `Communicator.reduce_scatter`."""

    def reserve_reduce_scatter(self, full_numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Reserve workspace for reduce-scatters of `full_numel` elements to `dtype`."""

    def all_reduce_plain(self, tensor: torch.Tensor, tag: int) -> Steps:
        """Sum `tensor` over all ranks with the backend's all-reduce, in its dtype."""

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, tag: int) -> Steps:
        """Sum `tensor` over all ranks; see `Communicator.all_reduce`."""

    def reserve_all_reduce(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Reserve workspace for all-reduces of `numel` elements of `dtype`."""
