"""How do pieces get from rank to rank? The only file that names torch's primitives.

On gloo pieces are sent point to point: every receive is posted before the first send, into the place where the piece
belongs, so nothing is copied and nothing allocated (gloo's own gather has a hidden copy of the whole, its own
reduce-scatter is an all-reduce and sends twice as much). Elsewhere, as on NCCL, torch's collectives move them.

A piece has a tag made of what it belongs to. Ranks that are at different transfers therefore never put one's numbers
into another's memory, and gloo, which ends the process on a message of the wrong size, never sees one.

Ranks of one node that can read one another's memory do without gloo (see `neighbour`).
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # DTensor imports it later, and then its default arguments keep the default group alive
from torch.distributed.constants import default_pg_timeout

from mics_strategy.comm.desync import CollectiveFingerprint
from mics_strategy.comm.peer_memory import connection
from mics_strategy.comm.peer_memory.connection import PeerConnection
from mics_strategy.comm.peer_memory.readv import GatherTarget, ScatterTarget, SourceVec
from mics_strategy.comm.work import BackendWork

T = TypeVar("T")
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_HANDSHAKE_TAG = 0
_CARRIED = frozenset(  # by gloo's and NCCL's own collectives; others travel as bytes
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)
)


class PendingExchange:
    """One piece from every rank, under way.

    Args:
        arrivals: By the index of the rank it comes from; ranks may share one.
        departures: Of what this rank sends.
    """

    __slots__ = ("_recvs", "_sends")

    def __init__(self, arrivals: dict[int, BackendWork], departures: list[BackendWork]) -> None:
        self._recvs = arrivals
        self._sends = departures

    def wait_recv(self, index: int) -> None:
        """Make the piece of one rank valid."""
        work = self._recvs.pop(index, None)
        if work is not None:
            work.wait()

    def wait(self) -> None:
        """Make all pieces valid, and what was sent free to be overwritten."""
        for index in list(self._recvs):
            self.wait_recv(index)
        for work in self._sends:
            work.wait()
        self._sends = []


class Transport:
    """One process group and the ways to move pieces within it.

    Args:
        group: Ranks in the order of their shard index.
        axis: Names of the axes that the group spans.
        device_type: Of the tensors that will travel.
    """

    def __init__(self, group: dist.ProcessGroup, axis: str, device_type: str) -> None:
        self.group = group
        self.size = group.size()
        self.index = group.rank()
        self.axis = axis
        ranks = dist.get_process_group_ranks(group)
        self.description = f"{axis} (ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''})"
        self.fingerprint = CollectiveFingerprint(ranks=tuple(ranks), index=self.index)
        self.is_point_to_point = is_gloo(group, device_type)
        self._others = [(self.index + step) % self.size for step in range(1, self.size)]
        self._connections: dict[int, PeerConnection] = {}

    def enable_peer_memory(self) -> None:
        """Let the ranks, all of one node, read one another's memory, if each can. Collective; nothing is under way.

        Cost:
            See `greeting.meet`. None where gloo is not in use.
        """
        if self.is_point_to_point:
            patience = timeout_of(self.group, "cpu")
            self._connections = connection.handshake(
                self.fingerprint.ranks, self.index, self._gather_handshakes, patience
            )

    @property
    def has_peer_memory(self) -> bool:
        """Whether ranks read what they need where the others have it."""
        return bool(self._connections)

    def _gather_handshakes(self, own: torch.Tensor) -> torch.Tensor:
        rows = own.new_zeros(self.size, own.numel())
        self.all_gather(list(rows), own, _HANDSHAKE_TAG).wait()
        return rows

    def all_gather(self, rows: list[torch.Tensor], own: torch.Tensor, tag: int) -> PendingExchange:
        """Put every rank's `own` into its row, this rank's, too.

        Args:
            rows: [n] for each rank, contiguous.
            own: [n], same dtype; may be its row.
            tag: Of the transfer, the same on all ranks.

        Cost:
            (size - 1) * n sent.
        """
        mine = rows[self.index]
        if own.data_ptr() != mine.data_ptr():
            mine.copy_(own)
        if self.is_point_to_point:
            return self._post_p2p(rows, [mine] * self.size, tag)
        rows, mine = [as_wire_dtype(row) for row in rows], as_wire_dtype(mine)
        out = as_one_view(rows)
        if out is not None:
            return self._as_pending(_all_gather(out, mine, group=self.group, async_op=True))
        return self._as_pending(dist.all_to_all(rows, [mine] * self.size, group=self.group, async_op=True))

    def all_gather_into(self, rows: list[ScatterTarget], own: torch.Tensor, tag: int) -> PendingExchange:
        """Put every rank's `own` where the elements of its row belong. Where ranks read one another's memory.

        Args:
            rows: For each rank, this one, too.
            own: [n], as many as each row.
            tag: Of the transfer, the same on all ranks.

        Cost:
            (size - 1) * n read.
        """
        if not own.numel():
            return PendingExchange({}, [])
        departures = [self.send(own, index, tag) for index in self._others]
        rows[self.index].copy(own)
        arrivals: dict[int, BackendWork] = {
            o: self._connections[o].post_recv(rows[o], tag) for o in reversed(self._others)
        }
        return PendingExchange(arrivals, departures)

    def all_to_all_scattered(
        self, incoming: dict[int, GatherTarget], outgoing: list[SourceVec], tag: int
    ) -> PendingExchange:
        """Let every other rank read its row of `outgoing`, and read what each has for this one.

        Args:
            incoming: By the index of the rank it comes from.
            outgoing: For each rank by its index; must stay unchanged until all has been waited for.
            tag: Of the transfer, the same on all ranks.

        Cost:
            What `incoming` has is read.
        """
        departures: list[BackendWork] = [self._connections[o].post_send(outgoing[o], tag) for o in self._others]
        arrivals: dict[int, BackendWork] = {
            o: self._connections[o].post_recv(incoming[o], tag) for o in reversed(self._others)
        }
        return PendingExchange(arrivals, departures)

    def exchange(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor], tag: int) -> PendingExchange:
        """Send every rank its row of `outgoing`, and put into a row of `incoming` what its rank has sent.

        Args:
            incoming: [n] for each rank, contiguous; what this rank's own row holds afterwards is not said.
            outgoing: [n] for each rank, contiguous, same dtype.
            tag: Of the transfer, the same on all ranks.

        Cost:
            (size - 1) * n sent.
        """
        if self.is_point_to_point:
            return self._post_p2p(incoming, outgoing, tag)
        full, received = as_one_view(outgoing), as_one_view(incoming)
        if full is not None and received is not None:
            return self._as_pending(dist.all_to_all_single(received, full, group=self.group, async_op=True))
        return self._as_pending(dist.all_to_all(incoming, outgoing, group=self.group, async_op=True))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> BackendWork:
        """Send to the rank of that index, or let it read. Where messages go point to point."""
        if self._connections:
            return self._connections[to].post_send(tensor, tag)
        return self.group.send([tensor], to, tag)

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> BackendWork:
        """Receive from the rank of that index. Messages of one tag arrive in the order in which they were sent."""
        if self._connections:
            return self._connections[source].post_recv(tensor, tag)
        return self.group.recv([tensor], source, tag)

    def _post_p2p(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor], tag: int) -> PendingExchange:
        if not outgoing[self.index].numel():
            return PendingExchange({}, [])
        arrivals: dict[int, BackendWork] = {}
        for index in reversed(self._others):
            arrivals[index] = self.recv(incoming[index], index, tag)
        return PendingExchange(arrivals, [self.send(outgoing[index], index, tag) for index in self._others])

    def barrier(self, tag: int) -> None:
        """Block until all ranks are at the same transfer, before one of gloo's own collectives, which have no tags.

        Each rank hears from those 1, 2, 4, ... places before it, each of which has heard from others by then.

        Args:
            tag: Of the transfer, the same on all ranks.

        Cost:
            Messages of no bytes, one after the other: log2(size), rounded up. None where gloo is not in use.
        """
        step = 1
        while self.is_point_to_point and step < self.size:
            arrival = self.group.recv([torch.empty(0)], (self.index - step) % self.size, tag)
            self.group.send([torch.empty(0)], (self.index + step) % self.size, tag).wait()
            arrival.wait()
            step *= 2

    def _as_pending(self, work: Any) -> PendingExchange:
        return PendingExchange(dict.fromkeys(range(self.size), work), [])

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor) -> BackendWork:
        """Sum every rank's `full` and keep this rank's slice, in their dtype, in no said order. On NCCL."""
        work: BackendWork = _reduce_scatter(out, full, group=self.group, async_op=True)
        return work

    def all_gather_coalesced(self, outs: list[torch.Tensor], owns: list[torch.Tensor]) -> BackendWork:
        """Gather several tensors in one launch, the ranks' side by side, [size * n] each. Elsewhere than on gloo."""
        outs, owns = [as_wire_dtype(out) for out in outs], [as_wire_dtype(own) for own in owns]
        work: BackendWork = self.group.allgather_into_tensor_coalesced(outs, owns)
        return work

    def reduce_scatter_coalesced(self, outs: list[torch.Tensor], fulls: list[torch.Tensor]) -> BackendWork:
        """Several reduce-scatters in one launch, see `reduce_scatter`. Elsewhere than on gloo."""
        work: BackendWork = self.group.reduce_scatter_tensor_coalesced(outs, fulls)
        return work

    def all_reduce(self, tensor: torch.Tensor) -> BackendWork:
        """Sum `tensor` over the ranks in place, in its dtype; every rank ends with the same bits."""
        work: BackendWork = dist.all_reduce(tensor, group=self.group, async_op=True)
        return work

    def all_to_all(
        self, out: torch.Tensor, out_numels: list[int], full: torch.Tensor, full_numels: list[int]
    ) -> BackendWork:
        """Exchange pieces of any sizes."""
        work: BackendWork = dist.all_to_all_single(out, full, out_numels, full_numels, group=self.group, async_op=True)
        return work

    def broadcast(self, tensor: torch.Tensor, source: int) -> BackendWork:
        """Copy the tensor of one rank, contiguous, to all, in place."""
        work: BackendWork = dist.broadcast(as_wire_dtype(tensor), group=self.group, group_src=source, async_op=True)
        return work

    def broadcast_object(self, value: T, source: int) -> T:
        """The object of one rank, on all."""
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=source)
        return values[0]

    def all_reduce_scalar(self, value: torch.Tensor, *, is_max: bool) -> BackendWork:
        """The sum or the maximum of a tensor over the ranks, in place."""
        op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        work: BackendWork = dist.all_reduce(value, op=op, group=self.group, async_op=True)
        return work

    def cancel(self) -> None:
        """End everything that is under way in the group, on its other ranks, too, with an error. On gloo.

        Nothing else wakes a thread that waits for a message which will never come; when the interpreter ends around
        such a thread, the process is aborted.
        """
        for neighbour in self._connections.values():
            neighbour.cancel()
        for other in self._others:  # until one is alive: where none is, nothing waits
            with suppress(RuntimeError):  # as meant: a receive that is late closes the connections of its group
                self.group.recv([torch.empty(1)], other, 2**31 - 1).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Let go of the group. Not collective; nothing may be under way."""
        for neighbour in self._connections.values():
            neighbour.close()
        if dist.is_initialized():
            with suppress(ValueError):  # of a default group that is gone
                dist.destroy_process_group(self.group)
        del self.group


def as_wire_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that is only to be copied, as one whose dtype every backend knows."""
    return tensor if tensor.dtype in _CARRIED else tensor.view(-1).view(torch.uint8)


def is_gloo(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether gloo moves the tensors of this device."""
    return device_type == "cpu" and moves(group, device_type) == "gloo"


def moves(group: dist.ProcessGroup | None, device_type: str) -> str | None:
    """The backend that moves the tensors of this device."""
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(",") if ":" in each)
    return backends.get(device_type)


def timeout_of(group: dist.ProcessGroup | None, device_type: str) -> timedelta:
    """How long ranks of a group wait for one another; torch's default where its backend does not say."""
    try:
        group = dist.distributed_c10d._get_default_group() if group is None else group
        options = group._get_backend(torch.device(device_type)).options
    except RuntimeError:  # no backend of that device, or one that has no options
        return default_pg_timeout
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout


def as_one_view(rows: list[torch.Tensor]) -> torch.Tensor | None:
    """The rows as one tensor without a copy; None where they do not lie side by side."""
    first = rows[0]
    storage = first.untyped_storage().data_ptr()
    for place, row in enumerate(rows):
        offset = first.storage_offset() + place * first.numel()
        if row.storage_offset() != offset or row.untyped_storage().data_ptr() != storage:
            return None
    return first.as_strided((len(rows) * first.numel(),), (1,))
