"""The choice of scopes follows the rules, memory and traffic, and is printed."""

import contextlib
import io
import itertools

import pytest
import torch
from torch import nn

from mics_strategy import ShardConfig, Topology, shard
from mics_strategy.engine.layout import make_layout
from mics_strategy.engine.plan import BucketPlan, StepOrder, UnitPlan, plan_step
from mics_strategy.errors import ConfigError
from mics_strategy.planner.cost import ParameterKind, StepTraffic, step_traffic
from mics_strategy.planner.model import ModelDescription, ParameterShape, UnitModel
from mics_strategy.planner.presets import Workload, candidate_presets, choose_preset
from mics_strategy.scopes import Scopes, resolve_scopes
from tests import models
from tests.engine.chains import REAL, SIMULATED, chains
from tests.engine.training import Run, assert_same, plain, start, train_without_reading
from tests.ranks import RankContext, RankPool, raises_on_every_rank

BF16 = ShardConfig.preset("auto", param_dtype="bfloat16")
AUTO = ShardConfig.preset("auto")
# PaRO, table 1, as printed: the triples that are ticked by the share of trained parameters.
PRINTED = {
    "all": "nnn nni nng nii nig ngg ing iig igg gng gig ggg",
    "many": "nnn nni nng nii nig ngg ing iig igg gng gig ggg",
    "peft": "nnn nni ini gng",
}


def test_the_printed_table_is_corrected_by_its_own_principles() -> None:
    """ING, GNG and GIG shard parameters finer than gradients; III does not.

    With few, whole gradients decide.
    """
    many, _ = candidate_presets(1.0)
    assert set(PRINTED["many"].split()) - set(many) == {"ing", "gng", "gig"}
    assert set(many) - set(PRINTED["many"].split()) == {"iii"}
    few, _ = candidate_presets(0.001)
    assert set(PRINTED["peft"].split()) <= set(few)
    assert set(few) - set(PRINTED["peft"].split()) == {"nng", "ing"}
    assert len(candidate_presets(0.1)[0]) == 14


@pytest.mark.parametrize(("share", "num"), [(1.0, 10), (1 / 6, 10), (0.16, 14), (1 / 30, 14), (1 / 32, 6), (0.0, 6)])
def test_the_share_of_trained_parameters_decides_which_rules_count(share: float, num: int) -> None:
    assert len(candidate_presets(share)[0]) == num


def _planned_traffic(scopes: Scopes, num_micro_steps: int, numel: int) -> StepTraffic:
    """The plan of three trained units that displace one another, counted link by link."""
    units = []
    for index in range(3):
        layout = make_layout([(f"{index}", torch.Size((numel,)))], scopes.optimizer)
        bucket = BucketPlan(
            layout=layout,
            param_dtype=torch.bfloat16,
            wire_dtype=torch.float32,
            sum_dtype=torch.float32,
            trainable=True,
        )
        units.append(UnitPlan(name=str(index), slot=0, buckets=(bucket,)))
    shape = StepOrder(forward=(0, 1, 2), backward=(0, 1, 2), num_micro_steps=num_micro_steps)
    between = inside = 0
    sizes = {axis.name: axis.size for axis in scopes.axes}
    for planned in plan_step(tuple(units), scopes, shape).collectives:
        in_node = 1
        for name in planned.axis.split("+"):
            in_node *= sizes[name] if "intra" in name else 1
        if planned.unit == "(usage)":
            continue
        between += planned.sent_bytes * scopes.ranks_per_node // in_node if planned.size > in_node else 0
        inside += planned.sent_bytes if in_node > 1 else 0
    return StepTraffic(between_nodes_bytes=between, inside_node_bytes=inside)


@pytest.mark.parametrize(("nodes", "per_node"), [*REAL, *SIMULATED, (8, 8)])
def test_plan_equals_the_closed_formulas_of_traffic(nodes: int, per_node: int) -> None:
    world, numel = nodes * per_node, 64 * 64
    kind = ParameterKind(numel=3 * numel, master_bytes=4, param_bytes=2, wire_bytes=4, is_trained=True)
    for config, num_micro_steps in itertools.product(chains(nodes, per_node), (1, 3)):
        scopes = resolve_scopes(config, Topology(ranks_per_node=per_node), world)
        assert step_traffic([kind], scopes, num_micro_steps) == _planned_traffic(scopes, num_micro_steps, numel)


def _workload(trained: float, frozen: float, memory: float) -> Workload:
    """A model of 32 equal layers, with frozen parameters in bf16."""
    parameters = [
        ParameterShape(name=name, shape=(int(numel / 32 / 1024), 1024), is_trained=is_trained, dtype=dtype)
        for name, numel, is_trained, dtype in (
            ("trained", trained, True, torch.float32),
            ("frozen", frozen, False, torch.bfloat16),
        )
        if numel
    ]
    units = [_unit("", ()), *(_unit(str(index), tuple(parameters)) for index in range(32))]
    model = ModelDescription(
        name="x", units=tuple(units), tokens_per_sample=1, model_flop_per_sample=0.0, activation_dtype_bytes=2
    )
    return Workload(model=model, memory_bytes=int(memory))


def _unit(name: str, parameters: tuple[ParameterShape, ...]) -> UnitModel:
    return UnitModel(
        name=name,
        kind="layer" if name else "root",
        parameters=parameters,
        forward_flop=0.0,
        saved_bytes=0,
        input_bytes=0,
        working_bytes=0,
    )


def _chosen(trained: float, frozen: float, memory: float, nodes: int = 4) -> str:
    return choose_preset(BF16, _workload(trained, frozen, memory), Topology(ranks_per_node=8), 8 * nodes).preset


@pytest.mark.parametrize(
    ("trained", "memory", "expected"),
    [(1e8, 80e9, "nng"), (6.7e9, 40e9, "nig"), (6.7e9, 32e9, "iig"), (34e9, 80e9, "igg"), (60e9, 80e9, "ggg")],
)
def test_a_larger_model_is_sharded_over_more(trained: float, memory: float, expected: str) -> None:
    assert _chosen(trained, 0, memory) == f"paro-{expected}"


@pytest.mark.parametrize(("memory", "expected"), [(80e9, "nng"), (16e9, "ing"), (4e9, "gng")])
def test_a_few_trained_parameters_do_not_shard_their_gradients(memory: float, expected: str) -> None:
    assert _chosen(2e7, 6.7e9, memory) == f"paro-{expected}"


def test_one_node_has_nothing_to_save_between_nodes() -> None:
    """I and G are the same scopes there.

    Each pair of equal scopes stands in the table once.
    """
    workload = _workload(1e9, 0, 80e9)
    advice = choose_preset(BF16, workload, Topology(ranks_per_node=8), 8)
    assert advice.preset == "paro-nni"
    assert [line.split()[0] for line in advice.reasons.splitlines()[3:]] == [
        *("paro-nnn", "paro-nni", "paro-nii", "paro-iii")
    ]


def test_a_model_that_fits_nowhere_is_reported() -> None:
    workload = _workload(1e12, 0, 1e9)
    advice = choose_preset(BF16, workload, Topology(ranks_per_node=8), 64)
    assert advice.preset == "paro-ggg"
    assert "too large" in advice.reasons
    assert advice.reasons.splitlines()[-1].endswith("chosen: the smallest, though too large")


def test_reasons_name_the_share_the_rule_and_every_alternative() -> None:
    workload = _workload(2e7, 6.7e9, 16e9)
    reasons = choose_preset(BF16, workload, Topology(ranks_per_node=8), 32).reasons
    for words in (
        "`paro-ing`",
        "0.30%",
        f"{workload.num_parameters:,} parameters",
        "4 nodes of 8",
        "gradients are not sharded",
        "9.6 GB",
    ):
        assert words in reasons
    assert [line.split()[0] for line in reasons.splitlines()[3:]] == [
        f"paro-{triple}" for triple in candidate_presets(0.003)[0]
    ]


def lora() -> models.Case:
    """A transformer of which a few parameters are trained."""
    case = models.transformer()

    def build() -> nn.Module:
        model = case.build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == "norm.weight" or "norm1" in name)
        assert any(parameter.requires_grad for parameter in model.parameters())
        return model

    return models.Case(build=build, batch=case.batch, loss=case.loss, units=case.units)


@pytest.mark.parametrize("case", [models.transformer, lora], ids=lambda case: case.__name__)
def test_chosen_scopes_train_as_plain(ranks: RankPool, case: object) -> None:
    run = Run(case=case, config=AUTO, accumulation=2)
    for found in ranks(4, train_without_reading, run, ranks_per_node=2):
        assert_same(found, plain(run, 4).parameters)


def chosen(ctx: RankContext) -> tuple[tuple[int, int, int], ShardConfig]:
    sharded = start(ctx, Run(case=lora, config=AUTO)).sharded
    return (sharded.scopes.params, sharded.scopes.grads, sharded.scopes.optimizer), sharded.config


def test_every_rank_chooses_the_same_scopes_and_keeps_other_options(ranks: RankPool) -> None:
    found = ranks(4, chosen, ranks_per_node=2)
    assert found == [((1, 1, 1), AUTO)] * 4


def printed(ctx: RankContext) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with torch.device("meta"):
            model = models.mlp().build()
        shard(model, "auto")
    return out.getvalue()


def test_rank_0_prints_the_choice_and_the_reasons(ranks: RankPool) -> None:
    found = ranks(2, printed)
    assert "mics_strategy chose the scopes of `paro-nnn`" in found[0]
    assert found[1] == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": "auto"}, "`grads='partition'` is set, but other scopes are 'auto'.*all to 'auto', or none"),
        ({"params": "auto", "grads": "auto", "optimizer": "world"}, "`optimizer='world'` is set, but other"),
        (dict.fromkeys(("params", "grads", "optimizer"), "auto") | {"secondary_params": 2}, "still to be chosen"),
        ({"secondary_params": "auto"}, "`secondary_params='auto'` is not a scope"),
    ],
)
def test_scopes_that_are_chosen_together_are_given_together(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardConfig(**options)


def test_scopes_that_are_not_chosen_yet_are_no_numbers() -> None:
    with pytest.raises(ConfigError, match="still to be chosen"):
        resolve_scopes(AUTO, Topology(ranks_per_node=2), 4)


def shard_badly(ctx: RankContext) -> None:
    shard(models.mlp().build(), ShardConfig.preset("auto", topology=Topology(ranks_per_node=3)))


def test_a_topology_that_does_not_fit_is_refused_first(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: ranks(4, shard_badly), ConfigError, "`ranks_per_node=3` does not divide the 4 ranks")
