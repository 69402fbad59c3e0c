"""How is one tensor gathered, summed, or summed for all, over one or two stages?

In two stages a slice goes in pieces, one behind the other: while a piece is on the slow links, the one before it is on
the fast ones, so that a collective takes about as long as the slower of its stages and not as long as both.

A collective is a program (see `lane`): on the CPU it goes on while nobody waits for it, on a GPU it is on the stream
when the call returns. The workspace is that of the lane, so the programs of one lane never share it at one time.
"""

from __future__ import annotations

import torch

from mics_strategy.comm import route as routes
from mics_strategy.comm.algorithms import Completion, GroupAlgorithm, PlainAlgorithm, QuantizedAlgorithm
from mics_strategy.comm.coalesced import CoalescedCommunicator
from mics_strategy.comm.codecs.quantizer import Quantizer
from mics_strategy.comm.peer_memory.communicator import PeerMemoryCommunicator
from mics_strategy.comm.queue import CollectiveQueue, Executor, RouteBinding, make_algorithm
from mics_strategy.comm.route import Algorithm
from mics_strategy.comm.traffic_log import TrafficLog
from mics_strategy.comm.transport import Transport
from mics_strategy.comm.work import Work, check_shapes
from mics_strategy.comm.workspace import Workspace, aligned_bytes


class Communicator:
    """Collectives over one channel. Inputs and outputs are flat, contiguous and on one device.

    Args:
        channel: Where they go.
        runner: Runs the programs.
        workspace: Of the runner's programs.
        traffic_log: Receives every stage.
        device: Of the tensors.

    Attributes:
        peer_memory: The same for what has no flat form; None where ranks do not read what they need.
        coalesced: The same for several tensors in one launch; None where the backend does not take them.
    """

    def __init__(
        self,
        channel: RouteBinding,
        runner: Executor,
        workspace: Workspace,
        traffic_log: TrafficLog,
        device: torch.device,
    ) -> None:
        self.route = route = channel.route
        self.transports = channel.transports
        self.size = route.size
        slow, *rest = channel.transports
        self._num_nodes = slow.size
        self._ranks_per_node = rest[0].size if rest else 1
        self._local_index = rest[0].index if rest else 0
        self.index = self._local_index * slow.size + slow.index
        self._queue = CollectiveQueue(channel, runner, workspace, traffic_log)
        self._workspace = workspace
        self._inter = make_algorithm(slow, route.inter, workspace, device)
        self._intra = (
            make_algorithm(rest[0], route.intra, workspace, device) if rest and route.intra is not None else None
        )
        self._unquantized = [PlainAlgorithm(transport, workspace) for transport in channel.transports]
        codec = route.all_gather_codec
        self._uses_backend_all_reduce = route.inter.algorithm is Algorithm.ALL_TO_ALL and not slow.is_point_to_point
        self._quantizer = Quantizer(codec, device, workspace.generator_for(codec, self.index)) if codec else None
        self.peer_memory: PeerMemoryCommunicator | None = None
        if slow.has_peer_memory and not rest and not route.is_quantized:
            self.peer_memory = PeerMemoryCommunicator(route, slow, self._queue, workspace)
        self.coalesced: CoalescedCommunicator | None = None
        if not slow.is_point_to_point and not route.is_quantized:
            self.coalesced = CoalescedCommunicator(route, channel.transports, self._queue, workspace)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, what: str) -> Work:
        """Put every rank's `shard` into `out`, in the order of the ranks' index.

        Args:
            out: [size * n], same dtype as `shard`; overwritten.
            shard: [n]; must stay unchanged until the handle has been waited for.
            what: Names the caller in errors.

        Cost:
            Sent: `route.all_gather_traffic`.
        """
        check_shapes(out.numel() == shard.numel() * self.size and out.dtype == shard.dtype, what, out, shard)
        asked = self._queue.next_op("Gather", what, out.numel(), shard.dtype)
        self._queue.log(routes.all_gather_traffic(self.route, out.numel(), out.dtype))
        coder = self._quantizer
        if coder is None:
            return self._queue.submit(
                asked, lambda: self._all_gather([self._inter, *self._intra_stages], out, shard, asked.tag)
            )
        return self._queue.submit(asked, lambda: self._all_gather_quantized(coder, out, shard, asked.tag))

    def reserve_all_gather(self, numel: int, dtype: torch.dtype) -> None:
        """Announce gathers of shards of `numel` elements."""
        if self._quantizer is not None:
            encoded = self._quantizer.codec.encoded_bytes(numel)
            self._workspace.reserve(aligned_bytes((self.size * encoded, torch.uint8)))
        elif numel:
            pieces = routes.chunks_of(self.route, numel, dtype.itemsize)
            self._workspace.reserve(sum(self._inter.all_gather_scratch_bytes(b - a, dtype, dtype) for a, b in pieces))

    @property
    def _intra_stages(self) -> list[GroupAlgorithm]:
        return [self._intra] if self._intra is not None else []

    def _all_gather(self, stages: list[GroupAlgorithm], out: torch.Tensor, shard: torch.Tensor, tag: int) -> None:
        """Gather.

        1. Over the slow links, piece by piece, into this rank's slice of `out`.
        2. Each piece over the fast links as soon as it is there; what is this rank's own, at once. It is taken while
           the next one is on the slow links.
        """
        slow, *fasts = stages
        slices = out.view(self._ranks_per_node, self._num_nodes, -1)
        mine, own_row = slices[self._local_index], slow.transport.index
        pieces = routes.chunks_of(self.route, shard.numel(), shard.itemsize)
        begun = [
            slow.start_all_gather([row[start:end] for row in mine], shard[start:end], shard.dtype, tag)
            for start, end in pieces
        ]

        def pass_on(row: int, start: int, end: int) -> list[Completion]:
            rows = [of_rank[row][start:end] for of_rank in slices]
            return [fast.start_all_gather(rows, mine[row][start:end], shard.dtype, tag) for fast in fasts]

        is_own_final = not isinstance(slow, QuantizedAlgorithm)
        over_fast: list[Completion] = []
        for start, end in pieces if is_own_final else []:
            over_fast += pass_on(own_row, start, end)
        for finish, (start, end) in zip(begun, pieces, strict=True):
            finish()
            before, over_fast = over_fast, []
            for row in range(self._num_nodes):
                if row != own_row or not is_own_final:
                    over_fast += pass_on(row, start, end)
            for finish_fast in before:
                finish_fast()
        for finish in over_fast:
            finish()

    def _all_gather_quantized(self, coder: Quantizer, out: torch.Tensor, shard: torch.Tensor, tag: int) -> None:
        """Encode once, gather what is encoded over all stages, decode everything, the own share, too."""
        if not shard.numel():
            return
        num_bytes = coder.codec.encoded_bytes(shard.numel())
        encoded = self._workspace.allocate(self.size * num_bytes, torch.uint8)
        rows = encoded.view(self.size, num_bytes)
        coder.encode(shard, rows[self.index])
        self._all_gather(list(self._unquantized), encoded, rows[self.index], tag)
        for row, slice_ in zip(rows, out.view(self.size, -1), strict=True):
            coder.decode(row, slice_)

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, what: str) -> Work:
        """Sum every rank's `full` and keep this rank's slice.

        Args:
            out: [n], fp32 or wider: holds the sum, or has it added.
            full: [size * n], the wire dtype; must stay unchanged until the handle has been waited for.
            accumulate: Add to `out` instead of overwriting it.
            what: Names the caller in errors.

        Cost:
            Sent: `route.reduce_scatter_traffic`. In two stages a narrow wire rounds once per stage.
        """
        check_shapes(full.numel() == out.numel() * self.size, what, out, full)
        asked = self._queue.next_op("Reduction", what, full.numel(), full.dtype)
        self._queue.log(routes.reduce_scatter_traffic(self.route, full.numel(), full.dtype))
        return self._queue.submit(asked, lambda: self._reduce_scatter(out, full, accumulate, asked.tag))

    def reserve_reduce_scatter(self, full_numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Announce reductions of `full_numel` elements to sums of `dtype`."""
        shard = full_numel // self.size
        pieces = routes.chunks_of(self.route, shard, wire.itemsize) if shard else []
        if self._intra is None:
            self._workspace.reserve(sum(self._inter.reduce_scatter_scratch_bytes(b - a, wire, wire) for a, b in pieces))
            return
        rows = 1 if len(pieces) == 1 else self._num_nodes
        numels = [(b - a) * self._num_nodes // rows for a, b in pieces]
        over_fast = sum(rows * self._intra.reduce_scatter_scratch_bytes(numel, wire, wire) for numel in numels)
        over_slow = sum(self._inter.reduce_scatter_scratch_bytes(b - a, dtype, wire) for a, b in pieces)
        self._workspace.reserve(over_fast + over_slow + aligned_bytes((self._num_nodes * shard, dtype)))

    def _reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, accumulate: bool, tag: int) -> None:
        """Sum.

        1. Over the fast links, piece by piece: this rank keeps one slice, in the dtype of the sum.
        2. Each piece of the slice over the slow links as soon as it is summed.
        """
        numel, wire = out.numel(), full.dtype
        pieces = routes.chunks_of(self.route, numel, wire.itemsize)
        if self._intra is None:
            rows = list(full.view(self.size, -1).unbind())
            if len(pieces) == 1:
                self._inter.start_reduce_scatter(rows, wire, tag)(out, accumulate)
                return
            begun = [self._inter.start_reduce_scatter([row[a:b] for row in rows], wire, tag) for a, b in pieces]
            for finish, (a, b) in zip(begun, pieces, strict=True):
                finish(out[a:b], accumulate)
            return
        sums = self._workspace.allocate(self._num_nodes * numel, out.dtype)
        slices, parts = full.view(self._ranks_per_node, self._num_nodes, -1), sums.view(self._num_nodes, -1)
        fast = self._intra
        if len(pieces) == 1:
            over_fast = [[(fast.start_reduce_scatter(list(full.view(self._ranks_per_node, -1)), wire, tag), sums)]]
        else:
            over_fast = [
                [
                    (fast.start_reduce_scatter([of_rank[row][a:b] for of_rank in slices], wire, tag), parts[row][a:b])
                    for row in range(self._num_nodes)
                ]
                for a, b in pieces
            ]
        over_slow = []
        for begun_rows, (a, b) in zip(over_fast, pieces, strict=True):
            for finish, part in begun_rows:
                finish(part, False)
            over_slow.append(self._inter.start_reduce_scatter([part[a:b] for part in parts], wire, tag))
        for finish, (a, b) in zip(over_slow, pieces, strict=True):
            finish(out[a:b], accumulate)

    def all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, what: str) -> Work:
        """Sum `tensor` over the ranks, in place; every rank ends with the same bits.

        Args:
            tensor: [n], fp32 or wider.
            wire: Dtype in which unencoded numbers travel.
            what: Names the caller in errors.

        Cost:
            Sent: `route.all_reduce_traffic`. A narrow or encoded wire rounds once going, per stage, and once coming.
        """
        asked = self._queue.next_op("All-reduce", what, tensor.numel(), wire)
        self._queue.log(routes.all_reduce_traffic(self.route, tensor.numel(), wire, tensor.dtype))
        if routes.is_plain_all_reduce(self.route, wire, tensor.dtype):
            return self._queue.submit(asked, lambda: self._all_reduce_plain(tensor, asked.tag))
        return self._queue.submit(asked, lambda: self._all_reduce(tensor, wire, asked.tag))

    def _all_reduce_plain(self, tensor: torch.Tensor, tag: int) -> None:
        """Sum for all with the transport's own."""
        self.transports[0].barrier(tag)
        self.transports[0].all_reduce(tensor).wait()

    def reserve_all_reduce(self, numel: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Announce all-reduces of `numel` elements of `dtype`."""
        if not numel or routes.is_plain_all_reduce(self.route, wire, dtype):
            return
        slice_numel = routes.all_reduce_slice(self.route, numel)
        full = self._ranks_per_node * slice_numel
        num_bytes = aligned_bytes((full, dtype), (slice_numel, dtype))
        for a, b in routes.all_reduce_chunks(self.route, slice_numel, wire.itemsize):
            row = (b - a) // self._num_nodes
            num_bytes += self._inter.reduce_scatter_scratch_bytes(
                row, dtype, wire
            ) + self._inter.all_gather_scratch_bytes(row, dtype, wire)
            num_bytes += aligned_bytes((row, dtype))
            if self._intra is not None:
                num_bytes += self._intra.reduce_scatter_scratch_bytes(b - a, dtype, wire) + self._unquantized[
                    1
                ].all_gather_scratch_bytes(b - a, dtype, wire)
        self._workspace.reserve(num_bytes)

    def _all_reduce(self, tensor: torch.Tensor, wire: torch.dtype, tag: int) -> None:
        """Sum for all.

        1. Sum over the fast links, piece by piece; this rank keeps a slice.
        2. Sum over the slow links; each rank keeps a share of the piece, and sends its sum to the others.
        3. Gather the slices over the fast links, never encoded anew, so that all nodes keep the same bits.
        """
        slice_numel = routes.all_reduce_slice(self.route, tensor.numel())
        full = self._workspace.allocate(self._ranks_per_node * slice_numel, tensor.dtype)
        full[: tensor.numel()].copy_(tensor)
        full[tensor.numel() :].zero_()
        if self._uses_backend_all_reduce and wire == tensor.dtype:
            self.transports[0].all_reduce(full).wait()
            tensor.copy_(full[: tensor.numel()])
            return
        slices = full.view(self._ranks_per_node, -1)
        mine = self._workspace.allocate(slice_numel, tensor.dtype) if self._intra is not None else full
        pieces = routes.all_reduce_chunks(self.route, slice_numel, wire.itemsize)
        summed = [self._start_intra_reduce_scatter(slices, mine, piece, wire, tag) for piece in pieces]
        over_slow = []
        for finish_fast, (a, b) in zip(summed, pieces, strict=True):
            finish_fast()
            rows = list(mine[a:b].view(self._num_nodes, -1))
            over_slow.append((self._inter.start_reduce_scatter(rows, wire, tag), rows))
        gathers = []
        for finish_sum, rows in over_slow:
            total = self._workspace.allocate(rows[0].numel(), tensor.dtype)
            finish_sum(total, False)
            gathers.append(self._inter.start_all_gather(rows, total, wire, tag))
        back: list[Completion] = []
        for finish, (a, b) in zip(gathers, pieces, strict=True):
            finish()
            before, back = back, []
            for fast in self._unquantized[1:]:
                back.append(fast.start_all_gather([each[a:b] for each in slices], mine[a:b], wire, tag))
            for finish_fast in before:
                finish_fast()
        for finish in back:
            finish()
        tensor.copy_(full[: tensor.numel()])

    def _start_intra_reduce_scatter(
        self, slices: torch.Tensor, mine: torch.Tensor, piece: tuple[int, int], wire: torch.dtype, tag: int
    ) -> Completion:
        a, b = piece
        if self._intra is None:
            return lambda: None
        finish = self._intra.start_reduce_scatter([each[a:b] for each in slices], wire, tag)
        return lambda: finish(mine[a:b], False)


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
