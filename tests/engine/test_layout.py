"""Every element has exactly one place in the layout, the one that DTensor expects."""

from itertools import pairwise

import pytest
import torch
from torch.distributed.tensor import Shard

from mics_strategy.engine.layout import ALIGN_NUMEL, BucketLayout, make_layout

RANKS = (1, 2, 3, 4, 7, 8, 16, 64)
SHAPES = [
    (),
    (1,),
    (3,),
    (8,),
    (65,),
    (1, 7),
    (7, 1),
    (5, 9),
    (64, 3),
    (3, 64),
    (6, 3, 3, 3),
    (2, 3, 64),
    (0,),
    (0, 5),
    (3, 0),
]
ranks_ = pytest.mark.parametrize("ranks", RANKS)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def _plan(ranks: int, *shapes: tuple[int, ...]) -> BucketLayout:
    return make_layout([(f"p{i}", torch.Size(shape)) for i, shape in enumerate(shapes)], ranks)


def _numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).view(shape)


def _flat(layout: BucketLayout, fulls: list[torch.Tensor]) -> torch.Tensor:
    flat = torch.full((layout.full_numel,), -1.0, dtype=torch.float64)
    for position, full in enumerate(fulls):
        for piece, part in layout.copy_pairs(flat, full, position):
            piece.copy_(part)
    return flat


@ranks_
@shapes
def test_shards_are_the_chunks_of_dtensor(shape: tuple[int, ...], ranks: int) -> None:
    param_slice = _plan(ranks, shape).param_slices[0]
    full = _numbered(shape)
    if param_slice.dim is None:
        assert all(torch.equal(param_slice.narrow(full, index), full) for index in range(ranks))
        return
    chunks, _ = Shard(param_slice.dim)._split_tensor(full, ranks, with_padding=False, contiguous=True)
    for index, chunk in enumerate(chunks):
        assert param_slice.local_shape(index) == chunk.shape
        assert torch.equal(param_slice.narrow(full, index), chunk)


@ranks_
@shapes
def test_flat_buffer_holds_every_shard_in_its_row(shape: tuple[int, ...], ranks: int) -> None:
    layout = _plan(ranks, (5,), shape, (9, 2))
    full = _numbered(shape)
    flat = _flat(layout, [_numbered((5,)), full, _numbered((9, 2))])
    for index, shard in enumerate(flat.view(ranks, layout.shard_numel)):
        assert torch.equal(layout.param_slices[1].view_in(shard, index), layout.param_slices[1].narrow(full, index))


@ranks_
@shapes
def test_copy_pairs_restore_the_parameters(shape: tuple[int, ...], ranks: int) -> None:
    layout = _plan(ranks, shape)
    full, restored = _numbered(shape), torch.zeros(shape, dtype=torch.float64)
    for piece, part in layout.copy_pairs(_flat(layout, [full]), restored, 0):
        restored.copy_(piece[0]) if layout.param_slices[0].dim is None else part.copy_(piece)
    assert torch.equal(restored, full)


@ranks_
@shapes
def test_strided_view_equals_the_pairs_where_pieces_are_full(shape: tuple[int, ...], ranks: int) -> None:
    layout = _plan(ranks, (3, 2), shape)
    fulls, param_slice = [_numbered((3, 2)), _numbered(shape)], layout.param_slices[1]
    flat = torch.full((layout.full_numel,), -1.0, dtype=torch.float64)
    view = layout.strided_view(flat, 1)
    is_even = param_slice.dim == 0 and param_slice.chunk > 0 and shape[0] % param_slice.chunk == 0
    assert (view is not None) == is_even
    if view is not None:
        view.copy_(fulls[1].view(view.shape))
        expected = _flat(layout, fulls)
        for index in range(ranks):
            assert torch.equal(
                param_slice.view_in(flat.view(ranks, -1)[index], index),
                param_slice.view_in(expected.view(ranks, -1)[index], index),
            )


@ranks_
def test_copy_pairs_cover_every_element_once(ranks: int) -> None:
    layout = _plan(ranks, *SHAPES)
    fulls = [torch.zeros(shape) for shape in SHAPES]
    flat = torch.zeros(layout.full_numel)
    for position, full in enumerate(fulls):
        for piece, part in layout.copy_pairs(flat, full, position):
            piece.add_(1)
            if layout.param_slices[position].dim is not None:
                part.add_(1)
    assert all(bool((full == 1).all()) for full in fulls if full.dim())
    copies = sum(full.numel() * (1 if full.dim() else ranks) for full in fulls)
    assert flat.unique().tolist() in ([1.0], [0.0, 1.0])
    assert int(flat.sum()) == copies


@ranks_
def test_slices_are_aligned_and_disjoint(ranks: int) -> None:
    layout = _plan(ranks, *SHAPES)
    for param_slice, following in pairwise(layout.param_slices):
        assert param_slice.offset % ALIGN_NUMEL == 0
        assert param_slice.offset + param_slice.chunk_numel <= following.offset
    assert layout.param_slices[-1].offset + layout.param_slices[-1].chunk_numel <= layout.shard_numel


@ranks_
@shapes
def test_padding_is_less_than_one_row_and_one_alignment_per_rank(shape: tuple[int, ...], ranks: int) -> None:
    layout = _plan(ranks, shape)
    param_slice = layout.param_slices[0]
    row = param_slice.numel // max(1, shape[param_slice.dim]) if param_slice.dim is not None else param_slice.numel
    assert 0 <= layout.padding_numel < ranks * (row + ALIGN_NUMEL)


@ranks_
@shapes
def test_no_other_dimension_would_pad_much_less(shape: tuple[int, ...], ranks: int) -> None:
    param_slice = _plan(ranks, shape).param_slices[0]
    if param_slice.dim is None or not param_slice.numel:
        return
    padded = {dim: -(-length // ranks) * ranks / length for dim, length in enumerate(shape)}
    assert padded[param_slice.dim] <= max(min(padded.values()), 1 + 1 / 8)


def test_large_model_pads_little() -> None:
    layout = _plan(64, (4096, 4096), (11008, 4096), (4096, 11008), (4096,), (32000, 4096))
    assert layout.padding_numel < 0.001 * layout.full_numel


@ranks_
def test_shard_at_a_smaller_scope_is_a_run_of_rows(ranks: int) -> None:
    layout = _plan(ranks, *SHAPES)
    for degree in [d for d in RANKS if ranks % d == 0]:
        assert layout.numel_at(degree) * degree == layout.full_numel
        assert layout.numel_at(degree) % layout.shard_numel == 0


@ranks_
def test_unpadded_views_are_disjoint_and_have_the_shapes(ranks: int) -> None:
    layout = _plan(ranks, *SHAPES)
    buffer = torch.zeros(layout.unpadded_numel)
    views = layout.unpadded_views(buffer)
    assert [tuple(view.shape) for view in views] == SHAPES
    for view in views:
        view.add_(1)
    assert int(buffer.max()) == 1
    assert int(buffer.sum()) == sum(view.numel() for view in views)


def test_one_rank_needs_no_flat_buffer() -> None:
    """What lets whole parameters be the optimizer's own memory."""
    layout = _plan(1, *SHAPES)
    fulls = [_numbered(shape) for shape in SHAPES]
    flat = _flat(layout, fulls)
    views = layout.unpadded_views(flat)
    assert layout.unpadded_numel == layout.full_numel
    assert all(torch.equal(view, whole) for view, whole in zip(views, fulls, strict=True))


def test_bucket_of_nothing_is_empty() -> None:
    layout = make_layout([], 4)
    assert (layout.full_numel, layout.padding_numel, layout.unpadded_numel) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float32], ids=str)
def test_every_parameter_and_every_shard_of_it_starts_at_a_multiple_of_16_bytes(dtype: torch.dtype) -> None:
    shapes = [(f"p{i}", torch.Size(shape)) for i, shape in enumerate([(3, 5), (1,), (8, 3), (7,)])]
    layout = make_layout(shapes, 2, itemsize=dtype.itemsize)
    assert [param_slice.offset * dtype.itemsize % 16 for param_slice in layout.param_slices] == [0] * 4
    whole = torch.zeros(layout.unpadded_numel, dtype=dtype)
    assert [(view.data_ptr() - whole.data_ptr()) % 16 for view in layout.unpadded_views(whole)] == [0] * 4


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_wider_dtypes_do_not_change_the_layout(itemsize: int) -> None:
    shapes = [(f"p{i}", torch.Size(shape)) for i, shape in enumerate([(3, 5), (1,), (8, 3), (7,)])]
    assert make_layout(shapes, 2, itemsize=itemsize) == make_layout(shapes, 2)
