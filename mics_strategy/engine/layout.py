"""Where does each parameter sit in its unit's buffer?

A *bucket* is the part of a unit that travels together: its parameters of one dtype, trainable or frozen. Its
flat form is ``[ranks, shard_numel]``: for every rank of the optimizer scope the chunk which that rank owns of
each parameter, one after the other. A shard at any smaller scope is a contiguous run of those rows, so every
gather and reduction between scopes is one contiguous collective; only the step between the flat form and the
parameters themselves copies.

A parameter is cut along one dimension into ``ceil(length / ranks)`` pieces (the last ones may be shorter or
empty), exactly as DTensor's ``Shard(dim)`` does: along dimension 0 unless that would pad more than an eighth
and another dimension pads less. A scalar is repeated for every rank.

Pure: shapes and numbers only, plus views of tensors that a caller passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

ALIGN_NUMEL = 8  # regions start at multiples of 16 bytes in bf16; whole blocks for vectorised kernels
_ALIGN_BYTES = 16  # what matrix products of fp8, and compiled kernels, want of an address
_MAX_PADDING = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSlice:
    """One parameter inside its bucket's shard."""

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
        """Elements that one rank's full chunk takes in the shard."""
        return self.numel if self.dim is None else self.numel // self._length * self.chunk

    @property
    def _length(self) -> int:
        return max(1, self.shape[self.dim]) if self.dim is not None else 1

    def shard_range(self, index: int) -> tuple[int, int]:
        """Start and number of positions along `dim` that shard `index` owns."""
        if self.dim is None:
            return 0, 1
        start = min(index * self.chunk, self.shape[self.dim])
        return start, min(self.chunk, self.shape[self.dim] - start)

    def local_shape(self, index: int) -> torch.Size:
        """Shape of the piece that shard `index` owns."""
        if self.dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.dim] = self.shard_range(index)[1]
        return torch.Size(shape)

    def view_in(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """The piece that shard `index` owns, as a contiguous view of the flat `shard` [shard_numel]."""
        shape = self.local_shape(index)
        return shard[self.offset : self.offset + shape.numel()].view(shape)

    def narrow(self, full: torch.Tensor, index: int) -> torch.Tensor:
        """The piece that shard `index` owns, as a view of the whole parameter `full`."""
        if self.dim is None:
            return full
        start, length = self.shard_range(index)
        return full.narrow(self.dim, start, length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Elements of one parameter that are side by side in the flat form.

    Attributes:
        position: Which region.
        row: Of the flat form.
        numel: How many.
        offset: Where they begin, counted from the first of the rows that were asked for.
        start: Where they begin in the parameter; None where they are not side by side there.
    """

    position: int
    row: int
    numel: int
    offset: int
    start: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """Where the parameters of one bucket sit, for `ranks` ranks of the optimizer scope.

    Each begins at a multiple of `align` elements.
    """

    param_slices: tuple[ParamSlice, ...]
    ranks: int
    shard_numel: int
    align: int = ALIGN_NUMEL

    @property
    def full_numel(self) -> int:
        """Elements of the flat form, padding included."""
        return self.shard_numel * self.ranks

    @property
    def padding_numel(self) -> int:
        """Elements of the flat form that belong to no parameter."""
        return self.full_numel - sum(region.numel for region in self.param_slices)

    def numel_at(self, degree: int) -> int:
        """Elements of a shard over `degree` ranks; `degree` divides `ranks`."""
        return self.full_numel // degree

    @property
    def unpadded_numel(self) -> int:
        """Elements of the parameters side by side, each whole, every one aligned; on one rank the shard itself."""
        if self.ranks == 1:
            return self.shard_numel
        return sum(_aligned(region.numel, self.align) for region in self.param_slices)

    def unpadded_views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The whole parameters side by side, as contiguous views of `buffer` [unpadded_numel]."""
        views, offset = [], 0
        for region in self.param_slices:
            start = region.offset if self.ranks == 1 else offset
            views.append(buffer[start : start + region.numel].view(region.shape))
            offset += _aligned(region.numel, self.align)
        return views

    def padding_views(self, slice_: torch.Tensor, rows: range) -> list[torch.Tensor]:
        """What belongs to no parameter in a slice of the flat form, as few views.

        Args:
            slice_: [len(rows) * shard_numel].
            rows: Of the flat form, which the slice holds.
        """
        table, found = slice_.view(len(rows), self.shard_numel), []
        starts = [region.offset for region in self.param_slices]
        for region, end in zip(self.param_slices, [*starts[1:], self.shard_numel], strict=True):
            rest = region.offset + region.chunk_numel
            found.append(table[:, rest:end])
            if region.dim is None or not region.chunk:
                continue
            shorter = region.shape[region.dim] // region.chunk  # has less than a chunk; rows behind it have nothing
            if shorter in rows:
                numel = region.local_shape(shorter).numel()
                found.append(table[shorter - rows.start, region.offset + numel : rest])
            found.append(table[max(0, shorter + 1 - rows.start) :, region.offset : rest])
        return [view for view in found if view.numel()]

    @property
    def is_evenly_divisible(self) -> bool:
        """Whether every parameter is its chunks in the order of the ranks, so that none is padded."""
        return all(region.dim == 0 and 0 < region.chunk * self.ranks == region.shape[0] for region in self.param_slices)

    def strided_view(self, flat: torch.Tensor, position: int) -> torch.Tensor | None:
        """Where one parameter is in the flat form, as one view, [chunks, elements of each]; None where it takes more.

        One is enough where all chunks along dimension 0 are whole; the parameter itself, if it is contiguous, is in the
        same order then.

        Args:
            flat: [full_numel], the flat form.
            position: Which region.
        """
        region = self.param_slices[position]
        if region.dim != 0 or not region.chunk or region.shape[0] % region.chunk:
            return None
        table = flat.view(self.ranks, self.shard_numel)[: region.shape[0] // region.chunk]
        return table[:, region.offset : region.offset + region.chunk_numel]

    def shard_slices(self, count: int) -> list[range]:
        """The rows of the flat form that each of `count` ranks has as its slice; `count` divides `ranks`."""
        each = self.ranks // count
        return [range(index * each, (index + 1) * each) for index in range(count)]

    def extents(self, rows: range) -> list[Extent]:
        """What lies side by side in some rows of the flat form, one row after the other; padding is in none."""
        found = []
        for place, row in enumerate(rows):
            for position, region in enumerate(self.param_slices):
                numel, offset = region.local_shape(row).numel(), self.shard_numel * place + region.offset
                if numel:
                    start = None if region.dim else region.shard_range(row)[0] * (region.chunk_numel // region.chunk)
                    found.append(Extent(position=position, row=row, numel=numel, offset=offset, start=start))
        return found

    def copy_pairs(
        self, flat: torch.Tensor, full: torch.Tensor, position: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of equal-shaped views (in the flat form, in the whole parameter) that cover one parameter.

        One pair where all chunks are whole, which is the rule along dimension 0: the copy between the two
        forms is then a single strided copy. Empty pairs are left out.

        Args:
            flat: [full_numel], the flat form.
            full: The whole parameter, or a tensor of its shape.
            position: Which region.
        """
        region = self.param_slices[position]
        table = flat.view(self.ranks, self.shard_numel)[:, region.offset : region.offset + region.chunk_numel]
        if region.dim is None:
            yield table.view(self.ranks, *region.shape), full.expand(self.ranks, *region.shape)
            return
        whole = region.shape[region.dim] // region.chunk if region.chunk else 0
        if region.dim == 0 and whole and full.is_contiguous():  # the common case, without views of views
            yield table[:whole], full.narrow(0, 0, whole * region.chunk).view(whole, -1)
            yield from self._rest(table, full, region, whole)
            return
        outer, inner = region.shape[: region.dim], region.shape[region.dim + 1 :]
        if whole:
            cut = full.narrow(region.dim, 0, whole * region.chunk).unflatten(region.dim, (whole, region.chunk))
            yield table[:whole].unflatten(1, (*outer, region.chunk, *inner)), cut.movedim(region.dim, 0)
        yield from self._rest(table, full, region, whole)

    def _rest(
        self, table: torch.Tensor, full: torch.Tensor, region: ParamSlice, whole: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The chunk that is shorter than the others, when there is one."""
        if whole < self.ranks and (rest := region.local_shape(whole)).numel():
            yield table[whole, : rest.numel()].view(rest), region.narrow(full, whole)


def make_layout(
    parameters: list[tuple[str, torch.Size]], ranks: int, block_numel: int = 1, *, itemsize: int = 2
) -> BucketLayout:
    """Lay out the parameters of one bucket, in their order.

    Args:
        parameters: Name and shape of each.
        ranks: Ranks of the optimizer scope.
        block_numel: Elements of a block that is never to hold two parameters, nor parts of two shards.
        itemsize: Bytes of the narrowest dtype in which they are kept.

    Cost:
        Padding: less than one block, or `ALIGN_NUMEL` elements, for each parameter and rank.
    """
    align = max(ALIGN_NUMEL, _ALIGN_BYTES // itemsize)
    block_numel = math.lcm(align, block_numel)
    regions: list[ParamSlice] = []
    offset = 0
    for name, shape in parameters:
        dim = _choose_dim(shape, ranks)
        chunk = 1 if dim is None else -(-shape[dim] // ranks)
        region = ParamSlice(name=name, shape=shape, dim=dim, chunk=chunk, offset=offset)
        regions.append(region)
        offset += _aligned(region.chunk_numel, block_numel)
    return BucketLayout(param_slices=tuple(regions), ranks=ranks, shard_numel=offset, align=align)


def _choose_dim(shape: torch.Size, ranks: int) -> int | None:
    if len(shape) == 0:
        return None
    if shape.numel() == 0:
        return 0
    padding = [-(-length // ranks) * ranks / length - 1 for length in shape]
    return 0 if padding[0] <= _MAX_PADDING else min(range(len(shape)), key=lambda dim: (padding[dim], dim))


def _aligned(numel: int, align: int = ALIGN_NUMEL) -> int:
    return -(-numel // align) * align
