"""Unsupported uses raise on every rank: asked, found, do."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import parametrize

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.errors import ConfigError, LifecycleError, MiCSError
from tests import models
from tests.ranks import RankContext, RankPool, assert_refused, raises_on_every_rank, refusal

Job = Callable[[RankContext], object]


def _mlp(config: ShardConfig | str = "mics", **options: object) -> nn.Module:
    model = models.mlp().build()
    shard(model, config, **options)
    return model


# -- before anything is built -------------------------------------------------------------------------------


def partition_that_does_not_divide(ctx: RankContext) -> None:
    _mlp(ShardConfig(partition_size=3))


def partition_that_straddles(ctx: RankContext) -> None:
    _mlp(ShardConfig(params=1, grads=1, optimizer=2, topology=Topology(ranks_per_node=4)))
    _mlp(ShardConfig(partition_size=4, topology=Topology(ranks_per_node=3)))


def coarser_optimizer(ctx: RankContext) -> None:
    _mlp(ShardConfig(params="world", grads=2, optimizer=2))


def scopes_that_do_not_nest(ctx: RankContext) -> None:
    _mlp(ShardConfig(params=2, grads=2, optimizer=3, topology=Topology(ranks_per_node=6)))


def scopes_on_uneven_nodes(ctx: RankContext) -> None:
    _mlp(ShardConfig(params=1, grads=1, optimizer=4, partition_size=2, topology=Topology(ranks_per_node=8)))


def larger_secondary(ctx: RankContext) -> None:
    _mlp(ShardConfig(params=2, grads=2, optimizer=4, secondary_params=4))


def unknown_preset(ctx: RankContext) -> None:
    _mlp("zero4")


def unknown_device(ctx: RankContext) -> None:
    _mlp(device="cuda:0")


def other_prefetch(ctx: RankContext) -> None:
    _mlp(ShardConfig(prefetch=1 + ctx.rank // 3))


def other_topology(ctx: RankContext) -> None:
    _mlp(ShardConfig(topology=Topology(ranks_per_node=2 + 2 * (ctx.rank == 1))))


def other_preset(ctx: RankContext) -> None:
    _mlp("mics" if ctx.rank else "zero1")


def unknown_preset_on_one_rank(ctx: RankContext) -> None:
    _mlp("zero4" if ctx.rank == 2 else "mics")


def other_units(ctx: RankContext) -> None:
    _mlp(units="auto" if ctx.rank else nn.Linear)


def other_widths(ctx: RankContext) -> None:
    shard(nn.Sequential(nn.Linear(4, 4 + ctx.rank // 2), nn.Linear(4 + ctx.rank // 2, 2)))


def other_names(ctx: RankContext) -> None:
    shard(nn.ModuleDict({"ab"[ctx.rank % 2]: nn.Linear(2, 2)}))


def other_frozen(ctx: RankContext) -> None:
    model = models.mlp().build()
    model[0].bias.requires_grad_(ctx.rank != 1)
    shard(model)


def other_ties(ctx: RankContext) -> None:
    model = models.tied().build()
    if ctx.rank == 1:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    shard(model, units=models.Block)


def bad_rule(ctx: RankContext) -> None:
    _mlp(units="layers")


def missing_class(ctx: RankContext) -> None:
    _mlp(units=nn.Conv2d)


def missing_class_on_one_rank(ctx: RankContext) -> None:
    _mlp(units=nn.Conv2d if ctx.rank == 3 else nn.Linear)


# -- models that cannot be sharded --------------------------------------------------------------------------


def sharded_twice(ctx: RankContext) -> None:
    shard(_mlp())


def part_of_it_sharded(ctx: RankContext) -> None:
    shard(nn.Sequential(_mlp()))


def sparse_embedding(ctx: RankContext) -> None:
    shard(nn.Sequential(nn.Embedding(9, 4, sparse=True)))


def sparse_bag_on_one_rank(ctx: RankContext) -> None:
    shard(nn.Sequential(nn.EmbeddingBag(9, 4, sparse=ctx.rank == 1)))


class _Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def complex_parameter(ctx: RankContext) -> None:
    shard(nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))]))


def dtensor_parameter(ctx: RankContext) -> None:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    shard(nn.ParameterList([nn.Parameter(distribute_tensor(torch.zeros(8), mesh, [Shard(0)]))]))


def lazy_parameter(ctx: RankContext) -> None:
    shard(nn.Sequential(nn.LazyLinear(3)))


def other_gradients_of_before(ctx: RankContext) -> None:
    model = models.mlp().build()
    if ctx.rank == 1:
        model(torch.ones(2, model[0].in_features)).sum().backward()
    shard(model)


def plain_tensor_on_a_part(ctx: RankContext) -> None:
    torch.zeros(2).set_(_mlp()[0].weight.data)


def gradient_hook_before(ctx: RankContext) -> None:
    model = models.mlp().build()
    model[0].weight.register_hook(lambda grad: grad)
    shard(model)


def accumulated_hook_before(ctx: RankContext) -> None:
    model = models.mlp().build()
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    shard(model)


def node_hook_before(ctx: RankContext) -> None:
    model = models.mlp().build()
    model.node = accumulation_node(model[0].weight)
    model.node.register_hook(lambda *_: None)
    shard(model)


class _SparseCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(9, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.table, sparse=True)


def sparse_call(ctx: RankContext) -> None:
    model = nn.Sequential(_SparseCall(), nn.Linear(4, 4))
    shard(model)
    model(torch.tensor([1 + ctx.rank])).sum().backward()


# -- things done to a sharded model -------------------------------------------------------------------------


def gradient_hook_after(ctx: RankContext) -> None:
    _mlp()[0].weight.register_hook(lambda grad: grad)


def accumulated_hook_after(ctx: RankContext) -> None:
    _mlp()[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


def gradient_read_in_a_backward(ctx: RankContext) -> None:
    model = _mlp()
    model[2].up.register_full_backward_hook(lambda module, *_: module.weight.grad and None)
    model(torch.ones(2, model[0].in_features)).sum().backward()


def weight_written_in_a_backward(ctx: RankContext) -> None:
    model = _mlp()
    model[2].up.register_full_backward_hook(lambda module, *_: module.bias.data.zero_() is None or None)
    model(torch.ones(2, model[0].in_features)).sum().backward()


def kept_weight_written_in_a_forward(ctx: RankContext) -> None:
    model = _mlp()
    kept = model[2].up.weight
    model[2].register_forward_pre_hook(lambda *_: torch.no_grad()(kept.mul_)(0.5) is None or None)
    model(torch.ones(2, model[0].in_features))


def accumulated_hook_in_a_forward(ctx: RankContext) -> None:
    model = _mlp()
    model[0].register_forward_pre_hook(
        lambda module, _: module.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    )
    model(torch.ones(2, model[0].in_features))


def accumulation_node(parameter: nn.Parameter) -> torch.autograd.graph.Node:
    """The node in which autograd accumulates the gradient, as scripts get it."""
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def node_hook_after(ctx: RankContext) -> None:
    model = _mlp()
    node = accumulation_node(model[0].weight)
    model(torch.zeros(1, 5))
    node = accumulation_node(model[2].up.weight)
    node.register_hook(lambda *_: None)
    model(torch.zeros(1, 5))


def node_prehook_after(ctx: RankContext) -> None:
    model = _mlp()
    node = torch.autograd.graph.get_gradient_edge(model[0].bias).node
    node.register_prehook(lambda *_: None)
    penalty = model[0].bias.square().sum()  # whose graph has the node as well
    (model(torch.zeros(1, 5)).sum() + penalty).backward()


def node_hook_before_a_backward(ctx: RankContext) -> None:
    """On a node that was taken before; a script would remove the hook after the backward."""
    model = _mlp()
    node = accumulation_node(model[2].up.weight)
    loss = model(torch.zeros(1, 5)).sum()
    node.register_prehook(lambda grads: (grads[0] * 0,))
    loss.backward()


def traced(ctx: RankContext) -> None:
    torch.jit.trace(_mlp(), torch.zeros(1, 5))


def traced_in_a_function(ctx: RankContext) -> None:
    model = _mlp()
    torch.jit.trace(lambda x: model(x), torch.zeros(1, 5))


def scripted(ctx: RankContext) -> None:
    torch.jit.script(_mlp())


def inner_module_scripted(ctx: RankContext) -> None:
    torch.jit.script(_mlp()[2])


def exported(ctx: RankContext) -> None:
    torch.export.export(_mlp(), (torch.zeros(1, 5),))


def unit_exported_in_a_training(ctx: RankContext) -> None:
    """Which goes on afterwards."""
    model = _mlp()
    loss = model(torch.zeros(1, 5)).sum()
    try:
        torch.export.export(model[2], (torch.zeros(1, 5),))
    finally:
        loss.backward()
        model(torch.zeros(1, 5)).sum().backward()


def run_without_values(ctx: RankContext) -> None:
    model = _mlp()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.zeros(1, 5))


def deep_copy(ctx: RankContext) -> None:
    copy.deepcopy(_mlp())


def pickled(ctx: RankContext) -> None:
    pickle.dumps(_mlp())


def saved_whole(ctx: RankContext) -> None:
    torch.save({"model": _mlp()}, ctx.tmp_path / "model.pt")


def reduced_by_hand(ctx: RankContext) -> None:
    model = _mlp()
    model[0](torch.ones(2, model[0].in_features)).sum().backward()
    dist.all_reduce(model[0].weight.grad)


def gathered_by_hand(ctx: RankContext) -> None:
    weight = _mlp()[0].weight
    dist.all_gather([torch.empty(weight.shape) for _ in range(ctx.world_size)], weight.data)


def other_factor_of_a_penalty(ctx: RankContext) -> None:
    (_mlp()[0].weight.square().sum() * (1 + ctx.rank)).backward()


def other_factor_beside_a_loss(ctx: RankContext) -> None:
    model = _mlp()
    loss = model(torch.ones(2, model[0].in_features)).sum()
    torch.autograd.backward([loss, model[0].weight.square().sum() * (1 + ctx.rank)])


def swapped(ctx: RankContext) -> None:
    model = _mlp()
    torch.utils.swap_tensors(model[0].weight, model[0].bias)
    model(torch.ones(2, model[0].in_features))


def part_copied(ctx: RankContext) -> None:
    copy.deepcopy(_mlp()[2])


def parameter_replaced(ctx: RankContext) -> None:
    model = _mlp()
    model[0].weight = nn.Parameter(torch.zeros(16, 5))
    model(torch.zeros(1, 5))


def parameter_removed(ctx: RankContext) -> None:
    model = _mlp()
    model[0].bias = None
    model(torch.zeros(1, 5))


def module_added(ctx: RankContext) -> None:
    model = _mlp()
    model.append(nn.Linear(3, 3))
    model(torch.zeros(1, 5))


def module_replaced(ctx: RankContext) -> None:
    model = _mlp()
    model[0] = nn.Linear(5, 16)
    model(torch.zeros(1, 5))


def converted(ctx: RankContext) -> None:
    _mlp().half()


def inner_module_converted(ctx: RankContext) -> None:
    model = _mlp()
    model[2].up.double()
    model(torch.zeros(1, 5))


def unfrozen(ctx: RankContext) -> None:
    model = models.mlp().build()
    model[0].requires_grad_(False)
    shard(model)
    model[0].requires_grad_(True)
    model(torch.zeros(1, 5))


def micro_step_out_of_range(ctx: RankContext) -> None:
    sharded = shard(models.mlp().build())
    sharded.micro_step(3, of=3)  # refused before anything enters it


def norm_of_nothing(ctx: RankContext) -> None:
    shard(models.mlp().build()).clip_grad_norm_(1.0, norm_type=0.0)


def norm_of_infinity(ctx: RankContext) -> None:
    model = models.mlp().build()
    sharded = shard(model)
    (model(torch.ones(1, 5)).sum() * (float("inf") if ctx.rank == 0 else 1.0)).backward()
    sharded.clip_grad_norm_(1.0, error_if_nonfinite=True)


def stale_optimizer(ctx: RankContext) -> None:
    model = models.mlp().build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model)
    model(torch.zeros(1, 5)).sum().backward()
    optimizer.step()


def partly_stale_optimizer(ctx: RankContext) -> None:
    model = models.mlp().build()
    bias = model[0].bias
    shard(model)
    torch.optim.SGD([model[0].weight, bias], lr=0.1).step()


def optimizer_of_more(ctx: RankContext) -> None:
    model = _mlp()
    torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1).step()


def group_of_more(ctx: RankContext) -> None:
    optimizer = torch.optim.AdamW(_mlp().parameters())
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    optimizer.step()


def foreign_optimizer(ctx: RankContext) -> None:
    sharded = shard(models.mlp().build())
    sharded.adopt(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def foreign_optimizer_on_one_rank(ctx: RankContext) -> None:
    model = models.mlp().build()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = shard(model)
    sharded.adopt(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1) if ctx.rank == 1 else plain)


def sharded_under_meta(ctx: RankContext) -> None:
    with torch.device("meta"):
        _mlp()


def unknown_field(ctx: RankContext) -> None:
    shard(models.mlp().build(), partition=2)


def sharded_around_ddp(ctx: RankContext) -> None:
    shard(nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2))))


def ddp_around_it(ctx: RankContext) -> None:
    nn.parallel.DistributedDataParallel(_mlp())


def fsdp_around_it(ctx: RankContext) -> None:
    FullyShardedDataParallel(_mlp(), device_id=torch.device("cpu"))


def fsdp2_on_it(ctx: RankContext) -> None:
    fully_shard(_mlp(), mesh=init_device_mesh("cpu", (ctx.world_size,)))


def block_by_block(ctx: RankContext) -> None:
    model = models.mlp().build()
    shard(model[2])
    shard(model)


class _Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + weight


def parametrized(ctx: RankContext) -> None:
    model = _mlp()
    parametrize.register_parametrization(model[0], "weight", _Symmetric())
    model(torch.zeros(1, 5))


def parametrization_removed(ctx: RankContext) -> None:
    model = models.mlp().build()
    parametrize.register_parametrization(model[0], "weight", _Symmetric())
    shard(model)
    parametrize.remove_parametrizations(model[0], "weight")
    model(torch.zeros(1, 5))


_CONVERTED = r"cannot be traced, scripted or exported.*Build the plain model, load `sharded.full_state_dict"
REFUSED: list[tuple[Job, type[MiCSError], str]] = [
    (partition_that_does_not_divide, ConfigError, r"`partition_size=3` does not divide the 4 ranks.*Use 1, 2, 4"),
    (partition_that_straddles, ConfigError, r"`ranks_per_node=3` does not divide the 4 ranks"),
    (coarser_optimizer, ConfigError, r"over 2 ranks, coarser than `params` over 4. Shard `optimizer` over 4 ranks or"),
    (scopes_that_do_not_nest, ConfigError, r"`ranks_per_node=6` does not divide the 4 ranks"),
    (scopes_on_uneven_nodes, ConfigError, r"`ranks_per_node=8` does not divide the 4 ranks"),
    (larger_secondary, ConfigError, r"`secondary_params` is sharded over 4 ranks, more than `params` over 2.*Use 2"),
    (unknown_preset, ConfigError, r"`preset='zero4'` is not known. Did you mean zero3 or .*Use one of auto, ddp"),
    (unknown_preset_on_one_rank, ConfigError, r"zero4"),
    (unknown_device, ConfigError, r"`device=cuda:0` cannot be used .* 'gloo'.* Use NCCL"),
    (other_prefetch, ConfigError, r"`prefetch` differs between ranks: 1 on rank 0, 2 on rank 3. Give every rank"),
    (other_topology, ConfigError, r"`topology` differs between ranks"),
    (other_preset, ConfigError, r"differs between ranks: "),
    (other_units, ConfigError, r"`units` differs between ranks"),
    (other_widths, ConfigError, r"`0.weight` \[4, 4\] float32 on rank 0, `0.weight` \[5, 4\] float32 on rank 2"),
    (other_names, ConfigError, r"ranks: `a.weight` .* on rank 0, `b.weight` .* on rank 1. Build the same model"),
    (other_frozen, ConfigError, r"`model` differs between ranks: `.+ float32 on rank 0, `.+ float32 frozen on rank"),
    (other_ties, ConfigError, r"differs between ranks"),
    (bad_rule, ConfigError, r"no module of class layers. It has Linear"),
    (missing_class, ConfigError, r"no module of class Conv2d. It has Linear"),
    (missing_class_on_one_rank, ConfigError, r"Conv2d.*found on rank 3"),
    (sharded_twice, ConfigError, r"sharded already. Call `shard\(\)` once"),
    (part_of_it_sharded, ConfigError, r"`0` is sharded already"),
    (sparse_embedding, ConfigError, r"`0` makes sparse gradients.*`sparse=False`"),
    (sparse_bag_on_one_rank, ConfigError, r"sparse.*found on rank 1"),
    (sparse_call, ConfigError, r"`0.table` makes sparse gradients.*`sparse=False`"),
    (complex_parameter, ConfigError, r"`0` is complex"),
    (dtensor_parameter, ConfigError, r"`0` is a DTensor.*Shard the plain model"),
    (lazy_parameter, ConfigError, r"`0.weight` is a UninitializedParameter.*Initialize"),
    (other_gradients_of_before, ConfigError, r"`gradients of before` differs between ranks"),
    (gradient_hook_before, ConfigError, r"`0.weight` has gradient hooks"),
    (accumulated_hook_before, ConfigError, r"`0.weight` has gradient hooks"),
    (node_hook_before, ConfigError, r"`0.weight` has gradient hooks"),
    (node_hook_after, LifecycleError, r"hook on the sharded parameter `2.up.weight` would never run"),
    (node_prehook_after, LifecycleError, r"hook on the sharded parameter `0.bias` would never run"),
    (node_hook_before_a_backward, LifecycleError, r"hook on the sharded parameter `2.up.weight` would never run"),
    (unit_exported_in_a_training, LifecycleError, _CONVERTED),
    (run_without_values, LifecycleError, _CONVERTED),
    (traced, LifecycleError, _CONVERTED),
    (traced_in_a_function, LifecycleError, _CONVERTED),
    (scripted, LifecycleError, _CONVERTED),
    (inner_module_scripted, LifecycleError, _CONVERTED),
    (exported, LifecycleError, _CONVERTED),
    (gradient_hook_after, LifecycleError, r"hook on the sharded parameter `0.weight` would never run"),
    (accumulated_hook_after, LifecycleError, r"would never run"),
    (gradient_read_in_a_backward, LifecycleError, r"`2.up.weight` was read or set in a backward.*after the backward"),
    (weight_written_in_a_backward, LifecycleError, r"`2.up.bias` was written in a backward.*after the backward"),
    (kept_weight_written_in_a_forward, LifecycleError, r"unit `2` was written, through a.*write `module.weight`"),
    (accumulated_hook_in_a_forward, LifecycleError, r"in a forward would see no gradient.*after the backward"),
    (deep_copy, LifecycleError, r"cannot be pickled or copied.*`full_state_dict"),
    (reduced_by_hand, LifecycleError, r"`c10d::allreduce_` got a sharded tensor.*leave the collective out"),
    (gathered_by_hand, LifecycleError, r"`c10d::allgather_` got a sharded tensor.*`tensor.full_tensor\(\)`"),
    (other_factor_of_a_penalty, LifecycleError, r"differs between ranks.*`torch.tensor\(factor\)`"),
    (other_factor_beside_a_loss, LifecycleError, r"differs between ranks.*`torch.tensor\(factor\)`"),
    (swapped, LifecycleError, r"`0.weight` holds what belongs to `0.bias`, after `torch.utils.swap_tensors`"),
    (part_copied, LifecycleError, r"cannot be (pickled or copied|deep-copied)"),
    (pickled, LifecycleError, r"cannot be pickled or copied"),
    (saved_whole, LifecycleError, r"cannot be pickled or copied"),
    (parameter_replaced, LifecycleError, r"`0.weight` was"),
    (parameter_removed, LifecycleError, r"`0.bias` was"),
    (module_added, LifecycleError, r"`5.weight` was"),
    (module_replaced, LifecycleError, r"`0.weight` was"),
    (converted, LifecycleError, r"`0.weight` is sharded as torch.float32 on cpu and cannot become torch.float16"),
    (inner_module_converted, LifecycleError, r"cannot become torch.float64|`2.up.weight` was .*converted"),
    (unfrozen, LifecycleError, r"`0.weight` was frozen when the model was sharded.*Unfreeze it before"),
    (sharded_under_meta, ConfigError, r"under `torch.device\('meta'\)`.*call `shard\(\)` after"),
    (sharded_around_ddp, ConfigError, r"`0` is a DistributedDataParallel.*Shard the plain model"),
    (ddp_around_it, ConfigError, r"A DistributedDataParallel was built on parameters that `shard\(\)` has sharded"),
    (fsdp_around_it, ConfigError, r"A FullyShardedDataParallel was built on parameters.*Use it as it is"),
    (fsdp2_on_it, ConfigError, r"A FSDPParamGroup was built on parameters.*Use it as it is"),
    (block_by_block, ConfigError, r"`2` is sharded already. Call `shard\(\)` once, on the outermost model"),
    (parametrized, LifecycleError, r"has lost its parameter 'weight' after `shard\(\)`.*Change the model first"),
    (parametrization_removed, LifecycleError, r"`0.weight` was added, replaced"),
    (unknown_field, ConfigError, r"Unknown option 'partition'\. Did you mean partition_size"),
    (micro_step_out_of_range, ConfigError, r"`micro_step\(3, of=3\)`.*Use 0 to 2"),
    (norm_of_nothing, ConfigError, r"`norm_type=0.0` is not a norm"),
    (norm_of_infinity, LifecycleError, r"gradient norm is (inf|nan)"),
    (stale_optimizer, ConfigError, r"SGD was built before `shard\(\)`.*`0.weight`.*adopt"),
    (partly_stale_optimizer, ConfigError, r"still holds the plain `0.bias`"),
    (optimizer_of_more, ConfigError, r"of group 0 of SGD, shape \(3,\), belongs to no sharded model.*before `shard"),
    (group_of_more, ConfigError, r"Parameter 0 of group 1 of AdamW, shape \(2, 2\), belongs to no sharded model"),
    (foreign_optimizer, ConfigError, r"Parameter 0 of group 0 of SGD, shape \(2, 2\)"),
    (foreign_optimizer_on_one_rank, ConfigError, r"found on rank 1"),
]

if torch.__version__ >= "2.12":  # 2.11 itself refuses it, as an operation on a plain tensor and a DTensor
    REFUSED.append((plain_tensor_on_a_part, LifecycleError, r"a plain tensor the memory of a sharded one.*full_tensor"))


@pytest.mark.one_job  # so that cases follow each other in one process group, which each has to leave usable
@pytest.mark.parametrize(("job", "error", "message"), REFUSED, ids=[job.__name__ for job, _, _ in REFUSED])
def test_every_rank_refuses(ranks: RankPool, job: Job, error: type[MiCSError], message: str) -> None:
    assert_refused(ranks(4, refusal, job, timeout_s=15.0), error, f"(?s){message}")


def unknown_preset_without_group(ctx: RankContext) -> None:
    shard(models.mlp().build(), "mcs")


def test_a_wrong_preset_is_told_before_a_missing_process_group(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: ranks(1, unknown_preset_without_group, default_group=False), ConfigError, "`preset='mcs'` is not known"
    )


def outputs_around_a_refused_write(ctx: RankContext, preset: str) -> list[torch.Tensor]:
    model = _mlp(preset)
    x = torch.ones(2, model[0].in_features)
    hook = model[2].up.register_full_backward_hook(lambda module, *_: module.bias.data.fill_(7) is None or None)
    outputs = [model(x)]
    with pytest.raises(LifecycleError, match="was written in a backward"):
        outputs[0].sum().backward()
    hook.remove()
    return [output.detach() for output in (*outputs, model(x))]


@pytest.mark.parametrize("preset", ["zero1", "zero3", "mics"])
def test_a_refused_write_is_not_used_later(ranks: RankPool, preset: str) -> None:
    for before, after in ranks(2, outputs_around_a_refused_write, preset):
        assert torch.equal(before, after)


def scopes_with_fields(ctx: RankContext) -> tuple[int, int]:
    with_preset = shard(models.mlp().build(), partition_size=2)
    with_config = shard(models.mlp().build(), ShardConfig.preset("zero1"), optimizer="partition", partition_size=2)
    return with_preset.scopes.params, with_config.scopes.optimizer


def test_fields_may_be_given_beside_a_preset_or_a_configuration(ranks: RankPool) -> None:
    assert ranks(4, scopes_with_fields) == [(2, 2)] * 4


def shard_without_group(ctx: RankContext) -> None:
    shard(models.mlp().build())


def test_process_group_must_exist(ranks: RankPool) -> None:
    raises_on_every_rank(
        lambda: ranks(1, shard_without_group, default_group=False),
        ConfigError,
        "before the process group exists.* torchrun or another launcher",
    )


def train_integers(ctx: RankContext) -> torch.dtype:
    model = _Integers()
    shard(model)
    model(torch.zeros(1, 2)).sum().backward()
    return model.codes.dtype


def test_frozen_integers_are_allowed(ranks: RankPool) -> None:
    assert ranks(2, train_integers) == [torch.int8] * 2


def convert_to_itself(ctx: RankContext) -> torch.dtype:
    return _mlp().float().to("cpu")[0].weight.dtype


def test_conversion_that_changes_nothing_is_allowed(ranks: RankPool) -> None:
    assert ranks(2, convert_to_itself) == [torch.float32] * 2


def clip_others(ctx: RankContext) -> None:
    sharded = shard(models.mlp().build())
    sharded.clip_grad_norm_(1.0, only=models.mlp().build().parameters())


def test_clipping_plain_tensors_is_refused(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: ranks(2, clip_others), ConfigError, r"`only` holds a tensor \[16, 5\] that is no")
