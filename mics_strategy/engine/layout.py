"""Layout of parameters in a bucket's flat buffer, and owners of whole tensors.

A *bucket* holds the parameters of a unit with one dtype, trainable or frozen. They share one collective. Its flat
buffer is ``[ranks, shard_numel]``: each row holds, one after the other, the pieces of all parameters that one rank of
the optimizer scope owns. A shard at any smaller scope is a contiguous run of rows. So every all-gather and
reduce-scatter between scopes is one contiguous collective, and only the conversion between the flat buffer and the
parameters copies.

A parameter is cut along one dimension into `ranks` pieces of ``ceil(length / ranks)`` positions, exactly as DTensor's
``Shard(dim)`` does. The last pieces may be shorter or empty. The dimension is 0, unless that would pad by more than an
eighth and another dimension pads less. A scalar is repeated in every row.

Tensors that an optimizer updates as a whole have owners: every such tensor is assigned to one rank of the optimizer
scope, the largest first, each to the rank with the fewest bytes so far. No rank then owns more than the mean plus one
tensor.

`MAX_BUCKET_BYTES` is no option: engine, plan and estimate derive equal buckets from it on every rank, and it bounds
nothing but staging buffers and workspaces.

Pure: shapes and numbers only, plus views of tensors that a caller passes.

Source:
    Owners: AMSP (arXiv:2311.00257) section IV-C2, inter-tensor sharding; Graham (1969), longest processing time first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

ALIGN_NUMEL = 8  # pieces start at multiples of 16 bytes in bf16; whole blocks for vectorized kernels
TENSORS_TO_OWNERS = 2  # of each parameter with an owner: value and gradient
TENSORS_TO_SHARDS = 1  # of each parameter with an owner: new value
MAX_BUCKET_BYTES = 256 * 2**20  # gathered; far above the size from which links are busy (MiCS section 4.1)
_ALIGN_BYTES = 16  # alignment that fp8 matrix products and compiled kernels require
_MAX_PADDING = 1 / 8  # share of the parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSlice:
    """Slice of one parameter in every row of its bucket's flat buffer.

    Attributes:
        name: Name of the parameter in the model.
        shape: Shape of the whole parameter.
        dim: Dimension of the cut; None for a scalar.
        chunk: Positions along `dim` in a full piece.
        offset: First element of the slice in a row.
    """

    name: str
    shape: torch.Size
    dim: int | None
    chunk: int
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return self.shape.numel()

    @property
    def chunk_numel(self) -> int:
        """Elements of a full piece."""
        return self.numel if self.dim is None else self.numel // self._length * self.chunk

    @property
    def _length(self) -> int:
        return max(1, self.shape[self.dim]) if self.dim is not None else 1

    def shard_range(self, index: int) -> tuple[int, int]:
        """First position along `dim` in shard `index`, and the number of positions."""
        if self.dim is None:
            return 0, 1
        start = min(index * self.chunk, self.shape[self.dim])
        return start, min(self.chunk, self.shape[self.dim] - start)

    def local_shape(self, index: int) -> torch.Size:
        """Shape of the piece in shard `index`."""
        if self.dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.dim] = self.shard_range(index)[1]
        return torch.Size(shape)

    def view_in(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """The piece in shard `index`, as a view of the flat `shard` [shard_numel]."""
        shape = self.local_shape(index)
        return shard[self.offset : self.offset + shape.numel()].view(shape)

    def narrow(self, full: torch.Tensor, index: int) -> torch.Tensor:
        """The piece in shard `index`, as a view of the whole parameter `full`."""
        if self.dim is None:
            return full
        start, length = self.shard_range(index)
        return full.narrow(self.dim, start, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """Layout of the parameters of one bucket.

    Attributes:
        param_slices: Slice of each parameter.
        ranks: Ranks of the optimizer scope, which are the rows of the flat buffer.
        shard_numel: Elements of a row.
        align: Elements to a multiple of which every slice begins.
    """

    param_slices: tuple[ParamSlice, ...]
    ranks: int
    shard_numel: int
    align: int = ALIGN_NUMEL

    @property
    def full_numel(self) -> int:
        """Elements of the flat buffer, including padding."""
        return self.shard_numel * self.ranks

    @property
    def padding_numel(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.full_numel - sum(param_slice.numel for param_slice in self.param_slices)

    def numel_at(self, degree: int) -> int:
        """Elements of a shard over `degree` ranks; `degree` divides `ranks`."""
        return self.full_numel // degree

    @property
    def unpadded_numel(self) -> int:
        """Elements of a buffer with all whole parameters in turn, each aligned.

        On one rank these are the elements of the shard itself.
        """
        if self.ranks == 1:
            return self.shard_numel
        return sum(_aligned(param_slice.numel, self.align) for param_slice in self.param_slices)

    def unpadded_views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The whole parameters in turn, as contiguous views of `buffer` [unpadded_numel]."""
        views, offset = [], 0
        for param_slice in self.param_slices:
            start = param_slice.offset if self.ranks == 1 else offset
            views.append(buffer[start : start + param_slice.numel].view(param_slice.shape))
            offset += _aligned(param_slice.numel, self.align)
        return views

    def padding_views(self, slice_: torch.Tensor, rows: range) -> list[torch.Tensor]:
        """Views of the padding in some rows of the flat buffer, as few as possible.

        Args:
            slice_: [len(rows) * shard_numel], the rows.
            rows: Numbers of these rows in the flat buffer.
        """
        table, views = slice_.view(len(rows), self.shard_numel), []
        starts = [param_slice.offset for param_slice in self.param_slices]
        for param_slice, end in zip(self.param_slices, [*starts[1:], self.shard_numel], strict=True):
            end_of_piece = param_slice.offset + param_slice.chunk_numel
            views.append(table[:, end_of_piece:end])
            if param_slice.dim is None or not param_slice.chunk:
                continue
            # The row of the shorter piece; later rows have none.
            short_row = param_slice.shape[param_slice.dim] // param_slice.chunk
            if short_row in rows:
                numel = param_slice.local_shape(short_row).numel()
                views.append(table[short_row - rows.start, param_slice.offset + numel : end_of_piece])
            views.append(table[max(0, short_row + 1 - rows.start) :, param_slice.offset : end_of_piece])
        return [view for view in views if view.numel()]

    @property
    def is_evenly_divisible(self) -> bool:
        """Whether every parameter has a full piece along dimension 0 for each rank."""
        return all(
            param_slice.dim == 0 and 0 < param_slice.chunk * self.ranks == param_slice.shape[0]
            for param_slice in self.param_slices
        )

    @property
    def is_one_parameter(self) -> bool:
        """Whether the flat buffer is the memory of a single contiguous parameter."""
        return len(self.param_slices) == 1 and self.is_evenly_divisible and not self.padding_numel

    def strided_view(self, flat: torch.Tensor, position: int) -> torch.Tensor | None:
        """One parameter in the flat buffer as a view [pieces, piece elements], or None.

        One view suffices if all pieces are full and cut along dimension 0. A contiguous parameter has the same order of
        elements then.

        Args:
            flat: [full_numel], the flat buffer.
            position: Position of the parameter in the bucket.
        """
        param_slice = self.param_slices[position]
        if param_slice.dim != 0 or not param_slice.chunk or param_slice.shape[0] % param_slice.chunk:
            return None
        table = flat.view(self.ranks, self.shard_numel)[: param_slice.shape[0] // param_slice.chunk]
        return table[:, param_slice.offset : param_slice.offset + param_slice.chunk_numel]

    def shard_slices(self, count: int) -> list[range]:
        """Rows of the flat buffer in each of `count` shards; `count` divides `ranks`."""
        rows_per_shard = self.ranks // count
        return [range(index * rows_per_shard, (index + 1) * rows_per_shard) for index in range(count)]

    def copy_pairs(
        self, flat: torch.Tensor, full: torch.Tensor, position: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of equal-shaped views, of the flat buffer and of the parameter.

        The pairs cover the parameter.

        If all pieces are full, which is usual along dimension 0, there is one pair, and the conversion is a single
        strided copy. Empty pairs are left out.

        Args:
            flat: [full_numel], the flat buffer.
            full: Whole parameter, or a tensor of its shape.
            position: Position of the parameter in the bucket.
        """
        param_slice = self.param_slices[position]
        shape, dim, chunk = param_slice.shape, param_slice.dim, param_slice.chunk
        end = param_slice.offset + param_slice.chunk_numel
        table = flat.view(self.ranks, self.shard_numel)[:, param_slice.offset : end]
        if dim is None:
            yield table.view(self.ranks, *shape), full.expand(self.ranks, *shape)
            return
        num_full = shape[dim] // chunk if chunk else 0
        if dim == 0 and num_full and full.is_contiguous():  # the usual case, with fewer views
            yield table[:num_full], full.narrow(0, 0, num_full * chunk).view(num_full, -1)
            yield from self._rest(table, full, param_slice, num_full)
            return
        outer, inner = shape[:dim], shape[dim + 1 :]
        if num_full:
            full_pieces = full.narrow(dim, 0, num_full * chunk).unflatten(dim, (num_full, chunk))
            yield (
                table[:num_full].unflatten(1, (*outer, chunk, *inner)),
                full_pieces.movedim(dim, 0),
            )
        yield from self._rest(table, full, param_slice, num_full)

    def _rest(
        self, table: torch.Tensor, full: torch.Tensor, param_slice: ParamSlice, num_full: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The pair of the piece that is shorter than the others, if there is one."""
        if num_full < self.ranks and (shape := param_slice.local_shape(num_full)).numel():
            yield table[num_full, : shape.numel()].view(shape), param_slice.narrow(full, num_full)


def make_layout(
    parameters: list[tuple[str, torch.Size]], ranks: int, block_numel: int = 1, *, itemsize: int = 2
) -> BucketLayout:
    """Lay out the parameters of one bucket, in their order.

    Args:
        parameters: Name and shape of each parameter.
        ranks: Ranks of the optimizer scope.
        block_numel: Elements of a codec block, which never holds parts of two parameters or of two shards.
        itemsize: Bytes per element of the narrowest dtype in which the parameters are stored.

    Cost:
        Memory: padding of less than one block, or `ALIGN_NUMEL` elements, for each parameter and rank.
    """
    align = max(ALIGN_NUMEL, _ALIGN_BYTES // itemsize)
    block_numel = math.lcm(align, block_numel)
    param_slices: list[ParamSlice] = []
    offset = 0
    for name, shape in parameters:
        dim = _choose_dim(shape, ranks)
        chunk = 1 if dim is None else -(-shape[dim] // ranks)
        param_slice = ParamSlice(name=name, shape=shape, dim=dim, chunk=chunk, offset=offset)
        param_slices.append(param_slice)
        offset += _aligned(param_slice.chunk_numel, block_numel)
    return BucketLayout(param_slices=tuple(param_slices), ranks=ranks, shard_numel=offset, align=align)


def split_into_buckets(sizes_bytes: list[int]) -> list[range]:
    """Positions of consecutive parameters that form one bucket each.

    A bucket has `MAX_BUCKET_BYTES` at most, or a single parameter.

    Args:
        sizes_bytes: Bytes of each parameter, gathered.
    """
    starts, num_bytes = [0], 0
    for position, size_bytes in enumerate(sizes_bytes):
        if position > starts[-1] and num_bytes + size_bytes > MAX_BUCKET_BYTES:
            starts.append(position)
            num_bytes = 0
        num_bytes += size_bytes
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(sizes_bytes)], strict=True)]


def num_first_hop_chunks(layout: BucketLayout, itemsize: int) -> int:
    """Chunks of a bucket's first hop.

    They have `MAX_BUCKET_BYTES`, gathered, where the bucket is a single parameter; other buckets have one.
    """
    return -(-layout.full_numel * itemsize // MAX_BUCKET_BYTES) if layout.is_one_parameter else 1


def _choose_dim(shape: torch.Size, ranks: int) -> int | None:
    if len(shape) == 0:
        return None
    if shape.numel() == 0:
        return 0
    padding = [-(-length // ranks) * ranks / length - 1 for length in shape]
    return 0 if padding[0] <= _MAX_PADDING else min(range(len(shape)), key=lambda dim: (padding[dim], dim))


def _aligned(numel: int, align: int = ALIGN_NUMEL) -> int:
    return -(-numel // align) * align


def assign_owners(sizes_bytes: list[int], owner_bytes: list[int]) -> list[int]:
    """Assign each tensor to the rank with the fewest bytes, largest tensor first.

    Args:
        sizes_bytes: Bytes of each tensor.
        owner_bytes: Bytes that each rank owns already. Updated in place.

    Returns:
        The owner of each tensor.
    """
    owners = [0] * len(sizes_bytes)
    for position in sorted(range(len(sizes_bytes)), key=lambda position: (-sizes_bytes[position], position)):
        owner = min(range(len(owner_bytes)), key=lambda rank: (owner_bytes[rank], rank))
        owner_bytes[owner] += sizes_bytes[position]
        owners[position] = owner
    return owners


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerAssignment:
    """Owners of the tensors of one bucket that are updated as a whole.

    Attributes:
        param_slices: Slice of each tensor in the bucket.
        owners: Rank of the optimizer scope that updates each tensor.
        ranks: Number of ranks of the optimizer scope.
    """

    param_slices: tuple[ParamSlice, ...]
    owners: tuple[int, ...]
    ranks: int

    def numel(self, owner: int, index: int) -> int:
        """Elements in shard `index` of the tensors of `owner`. A scalar is in every shard."""
        param_slices = (
            param_slice
            for param_slice, slice_owner in zip(self.param_slices, self.owners, strict=True)
            if slice_owner == owner
        )
        return sum(param_slice.local_shape(index).numel() for param_slice in param_slices)

    def rows_numels(self, index: int) -> list[int]:
        """Elements in shard `index`, by the owner of their tensor."""
        return [self.numel(owner, index) for owner in range(self.ranks)]

    def whole_numels(self, owner: int) -> list[int]:
        """Elements of the tensors of `owner`, by shard."""
        return [self.numel(owner, index) for index in range(self.ranks)]

    def to_owners_numels(self, index: int) -> tuple[list[int], list[int]]:
        """Elements of values and gradients that rank `index` sends and receives.

        It sends them to each owner, and receives them from each shard.
        """
        sent, received = self.rows_numels(index), self.whole_numels(index)
        return [TENSORS_TO_OWNERS * numel for numel in sent], [TENSORS_TO_OWNERS * numel for numel in received]

    def to_shards_numels(self, index: int) -> tuple[list[int], list[int]]:
        """Elements of new values that rank `index` sends and receives.

        It sends them to each shard, and receives them from each owner.
        """
        return self.whole_numels(index), self.rows_numels(index)
