"""All-gather, reduce-scatter and all-reduce of one tensor over a route.

A collective is a task of a queue (see `queue`), which runs its stages (see `stages`). `CoalescedCommunicator` takes
several tensors in one launch instead. On the CPU it makes progress while nothing waits for it. On a GPU what needs no
other rank is on the stream when the call returns, and the rest when the work has been waited for. The workspace belongs
to the queue, so that two tasks never use the same part of it.
"""

from __future__ import annotations

from functools import partial

import torch

from mics_strategy.comm import route as routes
from mics_strategy.comm import scratch, traffic
from mics_strategy.comm.kernel_warmup import KernelWarmup
from mics_strategy.comm.queue import RouteQueue
from mics_strategy.comm.stages import Stages
from mics_strategy.comm.transport import BackendTransport, Transport
from mics_strategy.comm.work import Prologue, Steps, Work, check_shapes
from mics_strategy.comm.workspace import once_per_buffer


class Communicator:
    """Collectives over one route.

    Inputs and outputs are flat, contiguous and on one device.

    Args:
        queue: Queue that runs the tasks, with the route.
        device: Device of the tensors.

    Attributes:
        route: Stages, with their codecs.
        transports: Transports of the stages, slowest links first; one where one stage is over all links.
        size: Ranks that take part.
        index: Index of this rank among them.
        coalesced: The same collectives on several tensors in one launch; None unless the backend supports it.
        warmup: Launches the kernels of what was reserved.
    """

    def __init__(self, queue: RouteQueue, device: torch.device) -> None:
        self.route = route = queue.route
        self.transports = transports = queue.transports
        self._queue = queue
        self._workspace = queue.workspace
        self._stages = Stages(route, transports, queue.workspace, device)
        self.warmup = KernelWarmup(route, transports, device)
        self.size = route.size
        self.index = self._stages.index
        self.coalesced: CoalescedCommunicator | None = None
        backend_transports = [transport for transport in transports if isinstance(transport, BackendTransport)]
        if backend_transports and not route.is_quantized:
            self.coalesced = CoalescedCommunicator(backend_transports, queue)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, label: str) -> Work:
        """Put every rank's `shard` into `out`, in the order of the ranks' index.

        Args:
            out: [size * n], same dtype as `shard`; overwritten. Its values are the reference of a codec of differences,
                the same on all ranks.
            shard: [n]; must stay unchanged until the work has been waited for.
            label: Label of the payload in errors.

        Returns:
            The work; `out` is valid after `wait()`.

        Cost:
            Sent: `traffic.all_gather_traffic`.
        """
        check_shapes(out.numel() == shard.numel() * self.size and out.dtype == shard.dtype, label, out, shard)
        payload = traffic.all_gather_traffic, out.numel(), shard.dtype
        task = partial(self._stages.all_gather, out, shard)
        return self._queue.submit("All-gather", label, payload, task, (out, shard))

    def for_bytes(self, full_bytes: int) -> Communicator:
        """This communicator, for full tensors of every size; see `SizeDispatch.for_bytes`."""
        return self

    def reserve(self, collective: str, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Reserve workspace for a collective, and announce the kernels that it launches.

        Args:
            collective: `ALL_GATHER`, `REDUCE_SCATTER` or `ALL_REDUCE` of `route`.
            numel: Elements of the full tensor.
            wire: Dtype of unquantized payloads.
            dtype: Dtype of the result.
        """
        sums_natively = self.transports[0].sums_natively
        num_bytes = scratch.scratch_bytes(self.route, collective, numel, wire, dtype, sums_natively=sums_natively)
        self._workspace.reserve(num_bytes)
        row_numel = numel // self.size
        if collective == routes.ALL_REDUCE:
            row_numel = routes.all_reduce_slice(self.route, numel) // self.route.stages[0].size
        self.warmup.announce(collective, row_numel, wire, dtype)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        accumulate: bool,
        label: str,
        residual: torch.Tensor | None = None,
        prologue: Prologue | None = None,
    ) -> Work:
        """Sum every rank's `full` and keep this rank's slice.

        Args:
            out: [n], fp32 or wider; overwritten with the sum, or added to.
            full: [size * n], the wire dtype; must stay unchanged until the work has been waited for.
            accumulate: Whether to add to `out` instead of overwriting it.
            label: Label of the payload in errors.
            residual: [residual_numel] fp32, what earlier encodings have lost, updated; None without feedback.
            prologue: Work that comes before it, on its thread or stream; None for none.

        Returns:
            The work; `out` is valid after `wait()`.

        Cost:
            Sent: `traffic.reduce_scatter_traffic`. In several stages a narrow wire dtype rounds once per stage.
        """
        check_shapes(full.numel() == out.numel() * self.size, label, out, full)
        payload = traffic.reduce_scatter_traffic, full.numel(), full.dtype
        task = partial(self._stages.reduce_scatter, out, full, accumulate, residual)
        tensors = (out, full, *([] if residual is None else [residual]))
        return self._queue.submit("Reduce-scatter", label, payload, task, tensors, prologue)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        wire: torch.dtype,
        label: str,
        residual: torch.Tensor | None = None,
        prologue: Prologue | None = None,
    ) -> Work:
        """Sum `tensor` over the ranks, in place; every rank ends with the same bits.

        Args:
            tensor: [n], fp32 or wider.
            wire: Dtype of unquantized payloads.
            label: Label of the payload in errors.
            residual: [residual_numel] fp32, what earlier encodings have lost, updated; None without feedback.
            prologue: Work that comes before it, on its thread or stream; None for none.

        Returns:
            The work; `tensor` is valid after `wait()`.

        Cost:
            Sent: `traffic.all_reduce_traffic`. A narrow wire dtype or a codec rounds once in each stage of the sum, and
            once when the sum is sent back.
        """
        payload = traffic.all_reduce_traffic, tensor.numel(), wire, tensor.dtype
        task = partial(self._stages.all_reduce, tensor, wire, residual)
        tensors = (tensor, *([] if residual is None else [residual]))
        return self._queue.submit("All-reduce", label, payload, task, tensors, prologue)


class RowViews:
    """Views of the tensors inside a slice of the flat buffer, contiguous in each of its rows.

    Args:
        rows: Rows of the slice.
        extents: Start and length of each tensor in a row, in elements.
        dtype: Dtype on the wire.

    Attributes:
        views: Views [rows, numel] of the tensors in each slice.
        numels: Elements of each tensor in a slice.
    """

    def __init__(self, rows: int, extents: list[tuple[int, int]], dtype: torch.dtype) -> None:
        self.rows = rows
        self.dtype = dtype
        self.views = once_per_buffer(
            lambda slice_: [slice_.view(rows, -1)[:, start : start + numel] for start, numel in extents]
        )
        self.numels = [rows * numel for _, numel in extents]


class CoalescedCommunicator:
    """Unquantized collectives on several tensors in one launch per stage.

    Args:
        transports: Transports of the stages, slowest links first.
        queue: Queue that runs the tasks, with the route.

    Attributes:
        size: Ranks that take part.
        num_stages: Stages, 1 to 3.
    """

    def __init__(self, transports: list[BackendTransport], queue: RouteQueue) -> None:
        self._route = queue.route
        self._transports = transports
        self._queue = queue
        self._workspace = queue.workspace
        self.size = queue.route.size
        self.num_stages = len(transports)

    def all_gather(self, outs: list[torch.Tensor], shard: torch.Tensor, parts: RowViews, label: str) -> Work:
        """Put every rank's parts of `shard` into `outs`, in the order of the ranks' index.

        Args:
            outs: [size * part] each, contiguous; overwritten.
            shard: [n]; must stay unchanged until the work has been waited for.
            parts: Views of the parts in `shard`, one for each of `outs`.
            label: Label of the payload in errors.

        Cost:
            That of `Communicator.all_gather`; padding of `shard` is counted, though not sent. A shard of several rows
            is copied once. A stage starts when the one before has ended.
        """
        for out, numel in zip(outs, parts.numels, strict=True):
            check_shapes(out.numel() == numel * self.size and out.dtype == shard.dtype, label, shard, out)
        payload = traffic.all_gather_traffic, shard.numel() * self.size, shard.dtype
        return self._queue.submit("All-gather", label, payload, partial(self._all_gather, outs, shard, parts))

    def reserve(self, collective: str, numel: int, wire: torch.dtype) -> None:
        """Reserve workspace for an all-gather or a reduce-scatter of `numel` elements in total, padding included."""
        self._workspace.reserve(scratch.coalesced_scratch_bytes(self._route, collective, numel, wire))

    def _all_gather(self, outs: list[torch.Tensor], shard: torch.Tensor, parts: RowViews, _: int) -> Steps:
        yield  # streams order it: it needs no tag
        shards = [part.view(-1) for part in parts.views(shard)] if parts.rows == 1 else self._pack(shard, parts)
        slices = [outs]  # of each tensor, by stage: the last one gathers all of it, the one before a piece of that
        for transport in reversed(self._transports[1:]):
            slices.append([slice_.view(transport.size, -1)[transport.index] for slice_ in slices[-1]])
        for transport, gathered in zip(self._transports, reversed(slices), strict=True):
            transport.all_gather_coalesced(gathered, shards)
            shards = gathered

    def _pack(self, shard: torch.Tensor, parts: RowViews) -> list[torch.Tensor]:
        """Copy the rows of each tensor into one contiguous tensor."""
        packed = self._split_scratch(parts.numels, shard.numel(), shard.dtype)
        torch._foreach_copy_([tensor.view(parts.rows, -1) for tensor in packed], parts.views(shard))
        return packed

    def _split_scratch(self, numels: list[int], total: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Allocate `total` elements of the workspace, split into tensors of `numels`."""
        return list(self._workspace.allocate(total, dtype)[: sum(numels)].split(numels))

    def reduce_scatter(
        self, out: torch.Tensor, fulls: list[torch.Tensor], parts: RowViews, accumulate: bool, label: str
    ) -> Work:
        """Sum every rank's `fulls` and keep this rank's part of each.

        Args:
            out: [n], fp32 or wider; its parts are overwritten with the sums, or added to. Padding stays unchanged.
            fulls: [size * part] each, contiguous, the wire dtype.
            parts: Views of the parts in `out`, one for each of `fulls`.
            accumulate: Whether to add to `out` instead of overwriting it.
            label: Label of the payload in errors.

        Returns:
            The work, which keeps `fulls` alive until it has been waited for.

        Cost:
            That of `Communicator.reduce_scatter`. The backend adds in the wire dtype, in an unspecified order.
        """
        for full, numel in zip(fulls, parts.numels, strict=True):
            check_shapes(full.numel() == numel * self.size and full.dtype == parts.dtype, label, out, full)
        payload = traffic.reduce_scatter_traffic, out.numel() * self.size, parts.dtype
        task = partial(self._reduce_scatter, out, fulls, parts, accumulate)
        return self._queue.submit("Reduce-scatter", label, payload, task).keep_alive(fulls)

    def _reduce_scatter(
        self, out: torch.Tensor, fulls: list[torch.Tensor], parts: RowViews, accumulate: bool, _: int
    ) -> Steps:
        yield
        sums = fulls
        for transport, rows in reversed([*zip(self._transports, self._route.strides, strict=False)]):
            numels = [tensor.numel() // transport.size for tensor in sums]
            fulls, sums = sums, self._split_scratch(numels, out.numel() * rows, parts.dtype)
            transport.reduce_scatter_coalesced(sums, fulls)
        row_sums = [tensor.view(parts.rows, -1) for tensor in sums]
        if accumulate:
            torch._foreach_add_(parts.views(out), row_sums)
        else:
            torch._foreach_copy_(parts.views(out), row_sums)


class SizeDispatch:
    """Collectives over the same ranks that use one of two routes, by size.

    Shards have the same order on both routes. Both submit to the same thread or stream, so the order in which
    collectives are submitted is also kept between them.

    Args:
        flat: Communicator for full tensors of fewer than `from_bytes` bytes, counted unquantized.
        hierarchical: Communicator for the others.
        from_bytes: Size threshold, the same on all ranks.
    """

    def __init__(self, flat: Communicator, hierarchical: Communicator, from_bytes: int) -> None:
        self.flat = flat
        self.hierarchical = hierarchical
        self.size = hierarchical.size
        self.index = hierarchical.index
        self._from_bytes = from_bytes

    @property
    def transports(self) -> list[Transport]:
        """Transports of both routes."""
        return [*self.hierarchical.transports, *self.flat.transports]

    def for_bytes(self, full_bytes: int) -> Communicator:
        """The communicator for a full tensor of this size."""
        return self.flat if full_bytes < self._from_bytes else self.hierarchical


AnyCommunicator = Communicator | SizeDispatch
