"""FSDP2's scenarios of first values: what parameters are after `shard()`, from real devices and from meta."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from mics_strategy import ConfigError, LifecycleError, ShardConfig, shard
from tests.engine.training import assert_identical, whole, wholes
from tests.fsdp2_parity import models
from tests.fsdp2_parity.models import MLP
from tests.fsdp2_parity.runner import PLACEMENTS, Scenario, Vectors
from tests.rank_report import RankContext


class Scaled(nn.Module):
    """A scalar parameter, and first dimensions of one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.inner = nn.Linear(6, 1)
        self.row = nn.Parameter(torch.randn(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x) * self.row


def channels_last() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 2))
    return model.to(memory_format=torch.channels_last)


def one_module_twice() -> nn.Module:
    mlp = MLP(6)
    return nn.Sequential(mlp, mlp)


def shared_layer() -> nn.Module:
    model = nn.Sequential(MLP(6), MLP(6))
    model[0].in_proj = model[1].in_proj
    return model


def shared_weight() -> nn.Module:
    model = models.mlps()
    model[0].in_proj.weight = model[1].in_proj.weight
    model[2].in_proj.weight = model[1].in_proj.weight
    return model


def nested_units(module: nn.Module) -> bool:
    """The projections of the first MLP; the root holds the others."""
    return isinstance(module, nn.Linear) and getattr(module, "is_unit", False)


def first_as_units() -> nn.Module:
    model = nn.Sequential(MLP(6), MLP(6))
    model[0].in_proj.is_unit = model[0].out_proj.is_unit = True
    return model


VECTORS = Vectors((4, 6))
SCENARIOS = {
    "a scalar parameter, and single rows": Scenario(
        build=Scaled, inputs=VECTORS, fsdp2_raises="doesn't support scalar parameters"
    ),
    "channels last": Scenario(
        build=channels_last,
        inputs=Vectors((2, 2, 6, 6)),
        units=(nn.Conv2d,),
        fsdp2_raises="does not support non-contiguous parameters",
    ),
    "one module in two places": Scenario(build=one_module_twice, inputs=VECTORS, units=(MLP,)),
    "a layer of two units": Scenario(
        build=shared_layer, inputs=VECTORS, units=(MLP,), fsdp2_raises="value was None when it should not be"
    ),
    "a weight of three units": Scenario(
        build=shared_weight, inputs=VECTORS, units=(MLP,), fsdp2_raises="is shared with a parameter already managed"
    ),
    "units in a part of the model": Scenario(build=first_as_units, inputs=VECTORS, units=nested_units),
}


def as_chunks(ctx: RankContext) -> None:
    """Parameters have global shapes and strides, and the rows of `torch.chunk`."""
    for width in (1, 2, 3, 8):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, 4 * width) for _ in range(2)), MLP(width, 3))[0::2]
        plain = {name: p.detach().clone() for name, p in model.named_parameters()}
        shard(model, "zero3", units=[nn.Linear])
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert isinstance(parameter, nn.Parameter)
            assert (parameter.shape, parameter.stride()) == (plain[name].shape, plain[name].stride())
            torch.testing.assert_close(whole(parameter), plain[name], rtol=0, atol=0)


def parameters_between(ctx: RankContext) -> None:
    """Modules hold DTensors before and after each forward and backward."""
    for placement in ("reshard", "keep"):
        model = models.mlps()
        shard(model, PLACEMENTS[placement], units=[MLP])
        before = list(model.parameters())
        loss = model(torch.ones(2, 6)).sum()
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        loss.backward()
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        assert all(isinstance(parameter, DTensor) for parameter in before)


def from_meta(ctx: RankContext, dtype: str) -> None:
    """Rows that divide by the ranks, that do not, and that are fewer; values are those of `reset_parameters`."""
    for width in (8, 3, 1):
        with torch.device("meta"):
            model = nn.Sequential(MLP(width, 1, bias=False), MLP(width, 1, bias=False))
        config = PLACEMENTS["reshard"].replace(param_dtype=dtype)
        shard(model, config, units=[MLP], initializer=constant)
        assert all(bool((whole(p) == 0.5).all()) for p in model.parameters())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model(torch.ones(4, width)).sum().backward()
        optimizer.step()
        assert all(bool((whole(p) != 0.5).all()) for p in model.parameters())


def constant(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)


def from_rank_zero(ctx: RankContext, placement: str) -> None:
    """Ranks build other values; all train rank 0's, buffers included."""
    torch.manual_seed(ctx.rank)
    model = nn.Sequential(MLP(5), nn.BatchNorm1d(5))
    model[1].running_mean.fill_(float(ctx.rank))
    torch.manual_seed(0)
    expected = nn.Sequential(MLP(5), nn.BatchNorm1d(5))
    shard(model, PLACEMENTS[placement], units=[MLP])
    assert_identical(
        wholes(dict(model.named_parameters())),
        {name: p.detach() for name, p in expected.named_parameters()},
    )
    assert bool((model[1].running_mean == 0).all())


def full_state_into_meta(ctx: RankContext) -> None:
    """Rank 0's full state dict, sent to all ranks, becomes the values of a model on meta."""
    torch.manual_seed(ctx.rank)
    states = [MLP(5).state_dict() if ctx.rank == 0 else None]
    dist.broadcast_object_list(states, src=0)
    with torch.device("meta"):
        model = MLP(5)
    handle = shard(model, "zero3", initializer=constant)
    handle.load_full_state_dict(states[0])
    assert_identical(wholes(dict(model.named_parameters())), states[0])


class Quantized(nn.Module):
    """Frozen parameters of dtypes that nothing reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(9, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.codes = nn.Parameter(torch.arange(5), requires_grad=False)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.table.to(x.dtype).mean() + self.codes.sum()


def frozen_dtypes(ctx: RankContext) -> None:
    model = Quantized()
    shard(model, "zero3", units=[nn.Linear])
    model(torch.ones(2, 4)).sum().backward()
    assert (model.table.dtype, model.codes.dtype) == (torch.float8_e4m3fn, torch.int64)
    assert torch.equal(whole(model.codes), torch.arange(5))
    assert model.layer.weight.grad is not None


def without_parameters(ctx: RankContext) -> None:
    model = models.NoParameters()
    shard(model, "zero3")
    assert torch.equal(model(torch.ones(3), (torch.ones(3), torch.ones(3))), torch.full((3,), 3.0))


FACTS = {
    "parameters have global shapes, and rows": (2, as_chunks),
    "parameters are the same objects between passes": (2, parameters_between),
    "from meta": (2, partial(from_meta, dtype="auto")),
    "from meta, compute in bf16": (2, partial(from_meta, dtype="bfloat16")),
    "rank 0's values": (2, partial(from_rank_zero, placement="reshard")),
    "rank 0's values on two nodes": (4, partial(from_rank_zero, placement="hybrid")),
    "a full state dict into meta": (2, full_state_into_meta),
    "frozen parameters in fp8 and integers": (2, frozen_dtypes),
    "no parameters": (2, without_parameters),
}


def convert(ctx: RankContext) -> None:
    model = MLP(4)
    shard(model, "zero3")
    model.to(torch.float64)


def no_reset(ctx: RankContext) -> None:
    with torch.device("meta"):
        model = models.NoInputs()
    shard(model, "zero3")


def tensor_parallel(ctx: RankContext) -> None:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    shard(model, "zero3")


def subclass(ctx: RankContext) -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    shard(model, "zero3")


def uneven_nodes(ctx: RankContext) -> None:
    shard(MLP(4), ShardConfig(partition_size=3))


REFUSED: dict[str, Any] = {
    "`.to(dtype)` after `shard()`": (
        convert,
        LifecycleError,
        "Convert the model before `shard()`. To compute in another dtype, set `param_dtype`.",
    ),
    "meta without initial values": (
        no_reset,
        ConfigError,
        "is on the meta device and nothing gives its tensors values",
    ),
    "parameters of tensor parallelism": (
        tensor_parallel,
        ConfigError,
        "is a DTensor, so this model is sharded already. Shard the plain model.",
    ),
    "all-gather extensions of a tensor subclass": (
        subclass,
        ConfigError,
        "Initialize or unwrap the model before `shard()`.",
    ),
    "a partition that does not divide the ranks": (uneven_nodes, ConfigError, "does not divide the 2 ranks"),
}
