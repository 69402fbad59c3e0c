"""Transport of tensors within one process group, one class per kind of backend.

The collectives of a training step call torch here and nowhere else. (Values that scripts read are gathered in
`placement`, objects in `consensus`.)

`GlooTransport` exchanges rows point to point, for tensors on CPUs; its all-reduces, broadcasts and all-to-alls are
gloo's own. `BackendTransport` uses torch's collectives, on NCCL and all others.

On gloo, every receive is posted before the first send, into its destination, so that nothing is copied and nothing
allocated (gloo's own all-gather has a hidden copy of the full tensor; its own reduce-scatter is an all-reduce and sends
twice as much).

A piece has a tag made from its collective. So the data of one collective never arrives in the memory of another when
ranks diverge, and gloo, which ends the process on a message of the wrong size, never receives one.

Ranks of one node that can read one another's memory do not use gloo (see `peer_memory`).

What differs between the two, and who asks:

                                  gloo on CPUs              NCCL, and others
    `blocks_host`                 a thread waits            a stream orders: `ProcessGroups.is_stream_ordered`
    `sums_natively`               rows, added here          the backend adds: `algorithms.make_algorithm`
    several tensors in a launch   no                        `CoalescedCommunicator`
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # DTensor imports it later, and then its default arguments keep the default group alive
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from mics_strategy.comm.desync import CollectiveFingerprint
from mics_strategy.comm.peer_memory import PeerConnection
from mics_strategy.comm.work import BackendWork, Launch, Messages, Pending

T = TypeVar("T")
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
NUM_TAGS = 2**31 - 2  # of collectives
_HANDSHAKE_TAG, _PROBE_TAG, _CANCEL_TAG = 0, NUM_TAGS, NUM_TAGS + 1
_LOST_S = 0.5  # after which what a rank has sent before it ended has been taken
_CARRIED = frozenset(  # by gloo's and NCCL's own collectives; other dtypes are sent as bytes
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)
)


class Transport(ABC):
    """One process group and its communication primitives, over one backend.

    Args:
        group: Process group, its ranks in the order of their shard index.
        axis: Names of the mesh axes that the group spans.

    Attributes:
        blocks_host: Whether a wait for a work blocks the CPU, so that a thread runs collectives and a watchdog
            watches them. Otherwise the backend orders them on a stream, or has finished at once.
        sums_natively: Whether sums use the backend's own reduce-scatter and all-reduce, whose order is unspecified.
            Elsewhere rows are exchanged, and added in the order of the ranks; but for plain all-reduces, see
            `Stages.all_reduce`.
        size: Ranks of the group.
        index: Index of this rank in the group.
        description: Axes and ranks as text, for errors.
        fingerprint: Fingerprint of the group's collectives.
    """

    blocks_host: ClassVar[bool]
    sums_natively = False

    def __init__(self, group: dist.ProcessGroup, axis: str) -> None:
        self.group = group
        self.size = group.size()
        self.index = group.rank()
        self.axis = axis
        ranks = dist.get_process_group_ranks(group)
        self.description = f"{axis} (ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''})"
        self.fingerprint = CollectiveFingerprint(ranks=tuple(ranks), index=self.index)

    @abstractmethod
    def all_gather(self, table: torch.Tensor, shard: torch.Tensor, tag: int) -> Pending:
        """Put every rank's `shard` into its row, this rank's as well.

        Args:
            table: [size * n], contiguous.
            shard: [n], same dtype; may be its row.
            tag: Tag of the collective, the same on all ranks.

        Cost:
            (size - 1) * n sent.
        """

    @abstractmethod
    def exchange(self, received: torch.Tensor, sent: torch.Tensor, tag: int) -> Pending:
        """Send every rank its row of `sent`, and receive one from each.

        Args:
            received: [size * n], contiguous; this rank's own row is undefined afterwards.
            sent: [size * n], contiguous, same dtype.
            tag: Tag of the collective, the same on all ranks.

        Cost:
            (size - 1) * n sent.
        """

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor) -> None:
        """Sum every rank's `full` in its dtype by the backend, and keep this rank's slice.

        The order of the sum is unspecified.
        """
        _reduce_scatter(out, full, group=self.group)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over the ranks in place, in its dtype. Every rank ends with the same bits."""
        dist.all_reduce(tensor, group=self.group)

    @abstractmethod
    def barrier(self, tag: int) -> None:
        """Block until all ranks have reached one collective.

        Needed where the backend would start the collective without a tag.

        Args:
            tag: Tag of the collective, the same on all ranks.
        """

    def lost_ranks(self) -> list[int]:
        """Ranks that are gone, of those without which what a thread of this process waits for will not end.

        From any thread, when it has waited long.
        """
        return []

    @abstractmethod
    def cancel(self) -> None:
        """Fail the collectives for which a thread of this process may wait.

        They fail on the group's other ranks as well.
        """

    def start_all_reduce(self, tensor: torch.Tensor, *, is_max: bool = False) -> BackendWork:
        """Start the sum, or the maximum, of a tensor over the ranks, in place."""
        op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        work: BackendWork = dist.all_reduce(tensor, op=op, group=self.group, async_op=True)
        return work

    def all_to_all(
        self, out: torch.Tensor, out_numels: list[int], full: torch.Tensor, full_numels: list[int]
    ) -> BackendWork:
        """Exchange pieces of any sizes, in elements."""
        work: BackendWork = dist.all_to_all_single(out, full, out_numels, full_numels, group=self.group, async_op=True)
        return work

    def broadcast(self, tensor: torch.Tensor, source: int) -> BackendWork:
        """Copy the contiguous tensor of rank `source` to all ranks, in place."""
        work: BackendWork = dist.broadcast(as_wire_dtype(tensor), group=self.group, group_src=source, async_op=True)
        return work

    def broadcast_object(self, value: T, source: int) -> T:
        """Return the object of rank `source` on all ranks."""
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=source)
        return values[0]

    def close(self) -> None:
        """Destroy the group. Not collective; nothing may be in flight."""
        if dist.is_initialized():
            with suppress(ValueError):  # of a default group that is gone
                dist.destroy_process_group(self.group)
        del self.group


class GlooTransport(Transport):
    """Messages from point to point over gloo, or reads of the peers' memory."""

    blocks_host = True

    def __init__(self, group: dist.ProcessGroup, axis: str) -> None:
        super().__init__(group, axis)
        self._others = [(self.index + step) % self.size for step in range(1, self.size)]
        self._connections: dict[int, PeerConnection] = {}
        self._awaited: list[int] = []

    def read_peers(self, connections: dict[int, PeerConnection]) -> None:
        """Read the memory of the peers instead of receiving messages; none for messages.

        Nothing is in flight.

        Args:
            connections: Connections to all other ranks by their index, as every rank of the group has them.
        """
        self._connections = connections

    def gather_row(self, values: torch.Tensor) -> torch.Tensor:
        """The small tensors [n] of all ranks, as rows [size, n]."""
        rows = values.new_zeros(self.size, values.numel())
        self.all_gather(rows.view(-1), values, _HANDSHAKE_TAG).wait()
        return rows

    @override
    def all_gather(self, table: torch.Tensor, shard: torch.Tensor, tag: int) -> Messages:
        rows = list(table.view(self.size, -1))
        if shard.data_ptr() != rows[self.index].data_ptr():
            rows[self.index].copy_(shard)
        return self._post(rows, [rows[self.index]] * self.size, tag)

    @override
    def exchange(self, received: torch.Tensor, sent: torch.Tensor, tag: int) -> Messages:
        return self._post(list(received.view(self.size, -1)), list(sent.view(self.size, -1)), tag)

    def _post(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor], tag: int) -> Messages:
        if not outgoing[self.index].numel():
            return Messages([], self.set_awaited)
        recvs = [(index, self.recv(incoming[index], index, tag)) for index in reversed(self._others)]
        sends = [(index, self.send(outgoing[index], index, tag)) for index in self._others]
        return Messages([*recvs, *sends], self.set_awaited)

    def send(self, tensor: torch.Tensor, dest: int, tag: int) -> BackendWork:
        """Send to the rank of index `dest`, or let it read."""
        if self._connections:
            return self._connections[dest].post_send(tensor, tag)
        return self.group.send([tensor], dest, tag)

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> BackendWork:
        """Receive from the rank of index `source`. Messages of one tag arrive in the order of their sends."""
        if self._connections:
            return self._connections[source].post_recv(tensor, tag)
        return self.group.recv([tensor], source, tag)

    @override
    def barrier(self, tag: int) -> None:
        """See `Transport.barrier`.

        Cost:
            Empty messages, one after the other: log2(size), rounded up.
        """
        self._meet(torch.empty(0, dtype=torch.uint8), tag)

    def any_of(self, flag: bool, tag: int) -> bool:
        """A barrier, behind which all ranks know whether any of them has come with its flag set.

        Args:
            flag: Flag of this rank.
            tag: Tag of the barrier, the same on all ranks.

        Cost:
            Messages of one byte, one after the other: log2(size), rounded up.
        """
        return bool(self._meet(torch.tensor([flag], dtype=torch.uint8), tag))

    def _meet(self, flags: torch.Tensor, tag: int) -> torch.Tensor:
        """Wait for all ranks, and collect the flags of all of them in `flags`.

        Each rank receives from those 1, 2, 4, ... places before it, each of which has received from others by then.
        """
        received = torch.empty_like(flags)
        step = 1
        while step < self.size:
            recv = self.group.recv([received], (self.index - step) % self.size, tag)
            self.group.send([flags], (self.index + step) % self.size, tag).wait()
            recv.wait()
            flags |= received
            step *= 2
        return flags

    def set_awaited(self, peers: list[int]) -> None:
        """Note for which ranks, by their indices, a thread waits now. Each wait has a list of its own."""
        self._awaited = peers

    @override
    def lost_ranks(self) -> list[int]:
        """See `Transport.lost_ranks`.

        Gloo refuses a receive from a rank whose connection is closed. That rank may have ended after it had sent all:
        then the wait ends, too.
        """
        awaited = self._awaited
        for peer in () if self._connections else awaited:
            try:
                self.group.recv([torch.empty(1)], peer, _PROBE_TAG)  # which stays posted: nobody sends it
            except RuntimeError:
                time.sleep(_LOST_S)
                return [self.fingerprint.ranks[peer]] if self._awaited is awaited else []
        return []

    @override
    def cancel(self) -> None:
        """See `Transport.cancel`.

        Nothing else wakes a thread that waits for a message which will never come. When the interpreter ends while
        such a thread waits, the process is aborted.
        """
        for peer in self._connections.values():
            peer.cancel()
        with suppress(AttributeError):  # another thread has closed it meanwhile
            cancel_group(self.group)

    @override
    def close(self) -> None:
        for peer in self._connections.values():
            peer.close()
        super().close()


def cancel_group(group: dist.ProcessGroup) -> None:
    """Fail the operations in flight of a group on gloo, on all of its ranks. From any thread."""
    for step in range(1, group.size()):  # until one is alive: where none is, nothing waits
        with suppress(RuntimeError):  # intended: a receive that times out closes the connections of its group
            other = (group.rank() + step) % group.size()
            group.recv([torch.empty(1)], other, _CANCEL_TAG).wait(timedelta(milliseconds=1))


class BackendTransport(Transport):
    """Torch's collectives, of NCCL, or of any other backend than gloo on CPUs. They need no tags.

    Stages run on the current stream, a side stream of the engine (`async_op=False`). On a stream of NCCL's own, a
    kernel would lack the priority of the side stream, and the host would record two more events.

    Args:
        group: Process group, its ranks in the order of their shard index.
        axis: Names of the mesh axes that the group spans.
        device_type: Device type of the tensors. On a CPU sums are added in the order of the ranks, as on gloo, unless
            nothing is sent at all ("fake").
    """

    blocks_host = False

    def __init__(self, group: dist.ProcessGroup, axis: str, device_type: str) -> None:
        super().__init__(group, axis)
        self.sums_natively = device_type != "cpu" or backend_of(group, device_type) == "fake"

    @override
    def barrier(self, tag: int) -> None:
        """Nothing: the backend matches collectives by their order on its stream."""

    @override
    def cancel(self) -> None:
        """Nothing: no thread waits."""

    @override
    def all_gather(self, table: torch.Tensor, shard: torch.Tensor, tag: int) -> Launch:
        tensors = as_wire_dtype(table), as_wire_dtype(shard)
        return Launch(partial(_all_gather, *tensors, group=self.group))

    @override
    def exchange(self, received: torch.Tensor, sent: torch.Tensor, tag: int) -> Launch:
        return Launch(partial(dist.all_to_all_single, received, sent, group=self.group))

    def all_gather_coalesced(self, outs: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
        """All-gather several tensors in one launch, [size * n] each. They are in the order of the ranks."""
        outs, shards = [as_wire_dtype(out) for out in outs], [as_wire_dtype(shard) for shard in shards]
        options = AllgatherOptions()
        options.asyncOp = False
        _wait_for(self.group.allgather_into_tensor_coalesced(outs, shards, options))

    def reduce_scatter_coalesced(self, outs: list[torch.Tensor], fulls: list[torch.Tensor]) -> None:
        """Reduce-scatter several tensors in one launch, see `reduce_scatter`."""
        options = ReduceScatterOptions()
        options.asyncOp = False
        _wait_for(self.group.reduce_scatter_tensor_coalesced(outs, fulls, options))


def _wait_for(work: BackendWork | None) -> None:
    """Wait for what a backend returns that was asked to run on the current stream; NCCL returns nothing."""
    if work is not None:
        work.wait()


def make_transport(group: dist.ProcessGroup, axis: str, device_type: str) -> Transport:
    """The transport of a group for tensors of one device type; see `Transport`."""
    if is_point_to_point(group, device_type):
        return GlooTransport(group, axis)
    return BackendTransport(group, axis, device_type)


def is_point_to_point(group: dist.ProcessGroup | None, device_type: str) -> bool:
    """Whether the tensors of a group are sent point to point, by `GlooTransport`."""
    return device_type == "cpu" and backend_of(group, device_type) == "gloo"


def as_wire_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor, only to copy it, in a dtype of every backend."""
    return tensor if tensor.dtype in _CARRIED else tensor.view(-1).view(torch.uint8)


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str | None:
    """The backend that moves the tensors of this device type, or None."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    return backends.get(device_type)


def timeout_of(group: dist.ProcessGroup | None, device_type: str) -> timedelta:
    """The timeout of a group; torch's default where its backend does not say."""
    try:
        group = dist.distributed_c10d._get_default_group() if group is None else group
        options = group._get_backend(torch.device(device_type)).options
    except RuntimeError:  # no backend of that device, or one that has no options
        return default_pg_timeout
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout
