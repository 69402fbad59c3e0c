"""Frozen parameters and buffers of any dtype and any strides become rank 0's.

Parameters are unsharded where they are needed.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import ShardConfig, shard
from mics_strategy.comm import transport
from tests.ranks import RankContext, RankPool, simulate

OF_NCCL = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8}
OF_NCCL |= {torch.uint8, torch.bool}
DTYPES = [torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.complex64, torch.bool]


class Odd(nn.Module):
    """A layer beside a frozen table and two buffers."""

    def __init__(self, dtype: torch.dtype, first: int) -> None:
        super().__init__()
        values = torch.arange(first, first + 32).view(8, 4)
        self.layer = nn.Linear(4, 4)
        self.table = nn.Parameter(values.to(dtype), requires_grad=False)
        strided = torch.arange(first, first + 4, dtype=torch.float64)[::3]
        self.one = nn.Parameter(strided[:1], requires_grad=False)  # contiguous, whatever its stride
        self.register_buffer("transposed", values.to(dtype).t())
        self.register_buffer("expanded", values[:1, :1].to(torch.float32).expand(3, 4))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [each.detach().clone() for each in (self.table, self.transposed, self.expanded)]
        return self.layer(x)


def seen_in_a_forward(ctx: RankContext, dtype: torch.dtype) -> list[list[bytes]]:
    """What each forward reads; ranks have begun with other values."""
    torch.manual_seed(0)
    model = Odd(dtype, first=1 + 7 * ctx.rank)
    shard(model, ShardConfig.preset("zero3"), units=[nn.Linear])
    found = []
    for is_training in (True, False):
        model.train(is_training)
        model(torch.ones(1, 4)).sum().backward()
        found.append([bytes(each.contiguous().view(-1).view(torch.uint8).tolist()) for each in model.seen])
    return found


def expected(dtype: torch.dtype) -> list[bytes]:
    model = Odd(dtype, first=1)
    model(torch.ones(1, 4))
    return [bytes(each.contiguous().view(-1).view(torch.uint8).tolist()) for each in model.seen]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_stride_is_rank_zeros(ranks: RankPool, dtype: torch.dtype) -> None:
    for found in ranks(2, seen_in_a_forward, dtype):
        assert found[1] == expected(dtype)
        assert found[0][0] == expected(dtype)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nccl_gets_only_dtypes_that_it_supports(dtype: torch.dtype) -> None:
    gather, broadcast = transport._all_gather, transport.dist.broadcast

    def known(*tensors: Tensor) -> None:
        assert all(tensor.dtype in OF_NCCL and tensor.is_contiguous() for tensor in tensors)

    def all_gather(out: Tensor, own: Tensor, **options: Any) -> Any:
        known(out, own)
        return gather(out, own, **options)

    def one_to_all(tensor: Tensor, **options: Any) -> Any:
        known(tensor)
        return broadcast(tensor, **options)

    with (
        mock.patch.object(transport, "_all_gather", all_gather),
        mock.patch.object(transport.dist, "broadcast", one_to_all),
    ):
        for found in simulate(2, seen_in_a_forward, dtype):
            assert found[1] == expected(dtype)
