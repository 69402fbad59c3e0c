"""Training with quantized parameters and gradients stays near plain training.

Payloads are compared bit by bit in tests/comm. Here it is the whole engine: every rank must end with the same bits, the
first gradients must be off by the error bound of a codec, and by more than rounding where something is quantized, and
issued traffic must equal the plan.
"""

import contextlib
import io
from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from mics_strategy import Codec, ConfigError, ShardConfig, Topology, shard
from mics_strategy.engine.plan import Plan
from mics_strategy.scopes import resolve_scopes
from tests import models
from tests.engine.counting import CountC10d, Kind, planned_kinds
from tests.engine.training import Run, assert_identical, distance, plain, start
from tests.ranks import RankContext, RankPool
from tests.simulated import simulate

pytestmark = pytest.mark.wide

INT8, INT4 = Codec(bits=8, block_size=32), Codec(bits=4, block_size=32)
ROUNDING = 1e-5  # more than fp32 loses in any order of adding
BOUND = {8: 0.02, 4: 0.3}  # of the norm; a uniform error of half a step in the worst place

CASES = {
    "weights": dict(weight_codec=INT8),
    "weights on all links": dict(weight_codec=INT8, codec_links="all"),
    "gradients": dict(grad_codec=INT8),
    "gradients on all links": dict(grad_codec=INT4, codec_links="all"),
    "first hop": dict(grad_codec=INT8, grad_codec_hops="first", codec_links="all"),
    "second hop": dict(grad_codec=INT4, grad_codec_hops="second", codec_links="all"),
    "everything": dict(weight_codec=INT8, grad_codec=INT4, codec_links="all"),
    "stochastic": dict(grad_codec=Codec(bits=8, block_size=32, rounding="stochastic"), codec_links="all"),
    "one stage": dict(weight_codec=INT8, grad_codec=INT8, codec_links="all", hierarchical=False),
    "narrow": dict(grad_codec=INT8, reduce_dtype="bfloat16", param_dtype="bfloat16", codec_links="all"),
}
PRESETS = ("ddp", "zero1", "zero2", "zero3", "zeropp-hpz", "mics", "paro-nig", "paro-iig", "paro-igg")
Found = tuple[list[float], dict[str, Tensor], dict[str, Tensor], list[tuple[Counter[Kind], Counter[Kind]]]]


def config_of(preset: str, case: str) -> ShardConfig | None:
    """The configuration, or None where it is refused because nothing would be encoded."""
    config = ShardConfig.preset(preset, topology=Topology(ranks_per_node=2), **CASES[case])
    try:
        resolve_scopes(config, config.topology, 4)
    except ConfigError:
        return None
    return config


def test_a_codec_with_nothing_to_encode_is_refused() -> None:
    refused = {preset: [case for case in CASES if config_of(preset, case) is None] for preset in PRESETS}
    without_second = ["second hop"]
    assert refused == {
        "ddp": ["weights", "weights on all links", "first hop", "everything", "one stage"],
        "zero1": ["first hop"],
        "zero2": without_second,
        "zero3": without_second,
        "zeropp-hpz": without_second,
        "mics": ["weights"],
        "paro-nig": [],
        "paro-iig": [],
        "paro-igg": without_second,
    }
    with pytest.raises(ConfigError, match=r"`weight_codec=.*nothing to encode: .*parameters.*`codec_links='all'`"):
        resolve_scopes(ShardConfig.preset("mics", weight_codec="int8"), Topology(ranks_per_node=2), 4)


@pytest.mark.parametrize(
    ("preset", "options", "advice"),
    [
        ("mics", {"weight_codec": "int8"}, "`codec_links='all'`, a wider scope of `params` or `optimizer` or"),
        ("ddp", {"weight_codec": "int8", "codec_links": "all"}, "Use a wider scope of `params` or `optimizer` or"),
        (
            "mics",
            {"grad_codec": "int8", "grad_codec_hops": "first"},
            "Use `codec_links='all'`, `grad_codec_hops='all'` or",
        ),
        ("zero1", {"grad_codec": "int8", "grad_codec_hops": "first"}, "Use `grad_codec_hops='all'` or"),
        ("zero3", {"grad_codec": "int8", "grad_codec_hops": "second"}, "Use `grad_codec_hops='all'` or"),
    ],
)
def test_an_unused_codec_is_refused_with_remedies(preset: str, options: dict[str, Any], advice: str) -> None:
    config, topology = ShardConfig.preset(preset, **options), Topology(ranks_per_node=2)
    with pytest.raises(ConfigError) as caught:
        resolve_scopes(config, topology, 4)
    assert f"{advice} `{next(iter(options))}='none'`." in str(caught.value)
    for field in ("codec_links", "grad_codec_hops"):
        if f"`{field}='all'`" in advice:
            resolve_scopes(config.replace(**{field: "all"}), topology, 4)


def train_quantized(ctx: RankContext, run: Run) -> Found:
    """Losses, first gradients, final parameters, and issued and planned traffic."""
    training = start(ctx, run)
    losses, first, sent = [], {}, []
    for step in range(run.steps):
        with CountC10d() as counted:
            losses.append(training.backward(step))
            training.sharded.internals.engine.finish_gradients()
        first = first or training.grads()
        with counted:
            training.optimizer.step()
            training.optimizer.zero_grad()
        sent.append((counted.kinds, planned_kinds(training.sharded.plan)))
    return losses, first, training.parameters(), sent[1:]


ACCEPTED = [  # every second field of the table, as on a checkerboard
    (preset, case)
    for row, preset in enumerate(PRESETS)
    for column, case in enumerate(CASES)
    if (row + column) % 2 and config_of(preset, case) is not None
]


@pytest.mark.wide(every=5)
@pytest.mark.parametrize(("preset", "case"), ACCEPTED)
def test_replicas_stay_equal_and_near_plain_training_and_send_what_was_planned(
    ranks: RankPool, preset: str, case: str
) -> None:
    config = config_of(preset, case)
    assert config is not None
    run = Run(case=models.transformer, config=config, accumulation=2, steps=3, optimizer="sgd")
    trace, found = plain(run, 4), ranks(4, train_quantized, run)
    for _, first, parameters, _ in found[1:]:
        assert_identical(first, found[0][1])
        assert_identical(parameters, found[0][2])
    codecs = [codec for codec in (config.codec_of("weight_codec"), config.codec_of("grad_codec")) if codec]
    assert ROUNDING < distance(found[0][1], trace.grads[0]) < len(codecs) * max(BOUND[codec.bits] for codec in codecs)
    for rank, (losses, _, _, sent) in enumerate(found):
        expected = [by_rank[rank] for by_rank in trace.losses_by_rank]
        assert losses == pytest.approx(expected, rel=0.02)
        assert len(sent) == 2
        for counted, planned in sent:
            assert counted == planned


def test_transports_without_queues_train_equally(ranks: RankPool) -> None:
    """Streams and torch's own collectives give the same bits."""
    config = config_of("zero3", "everything")
    assert config is not None
    run = Run(case=models.mlp, config=config, accumulation=2, steps=2)
    here = ranks(4, train_quantized, run)
    for one, other in zip(here, simulate(4, train_quantized, run, ranks_per_node=2), strict=True):
        assert_identical(one[2], other[2])


class Recorded(torch.autograd.Function):
    """A matrix product that records its weights in forward and backward."""

    seen: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        Recorded.seen.append(weight.detach().clone())
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        Recorded.seen.append(weight.detach().clone())
        return grad @ weight, grad.T @ x


class RecordedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Recorded.apply(x, self.weight)
        return found + self.bias


def record_weights(ctx: RankContext, config: ShardConfig) -> list[Tensor]:
    """What six layers compute with: in the forward, first to last.

    In the backward, last to first.
    """
    Recorded.seen = []
    torch.manual_seed(0)
    model = nn.Sequential(*(RecordedLinear(24, 24) for _ in range(6)))
    shard(model, config, units=[nn.Linear])
    model(torch.ones(2, 24)).sum().backward()
    return Recorded.seen


@pytest.mark.parametrize("links", ["slow", "all"])
@pytest.mark.parametrize("preset", ["zero3", "zeropp-hpz", "paro-nig"])
def test_backward_uses_the_parameters_of_the_forward(ranks: RankPool, preset: str, links: str) -> None:
    """Parameters quantized twice would change twice.

    Blocks of primary and secondary shards do not coincide.
    """
    options = dict(weight_codec=Codec(bits=4, block_size=32), codec_links=links, topology=Topology(ranks_per_node=2))
    for seen in ranks(4, record_weights, ShardConfig.preset(preset, **options)):
        assert len(seen) == 12
        for forward, backward in zip(seen[:6], reversed(seen[6:]), strict=True):
            assert torch.equal(forward, backward)


def test_weights_are_not_rounded_at_random() -> None:
    stochastic = Codec(bits=8, rounding="stochastic")
    with pytest.raises(ConfigError, match=r"`weight_codec=.*rounds at random.*rounding='nearest'"):
        ShardConfig(weight_codec=stochastic)
    assert ShardConfig(grad_codec=stochastic).codec_of("grad_codec") is stochastic


def printed(ctx: RankContext, config: ShardConfig) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        shard(nn.Sequential(nn.Linear(4, 4)), config)
    return text.getvalue()


def test_one_node_reports_that_nothing_is_quantized(ranks: RankPool) -> None:
    node = dict(topology=Topology(ranks_per_node=2), weight_codec="int8", grad_codec="int8")
    first, second = ranks(2, printed, ShardConfig.preset("zero3", **node))
    assert first.splitlines() == [
        f"`{name}='int8'` encodes nothing in this job of one node, with `codec_links='slow'`."
        for name in ("weight_codec", "grad_codec")
    ]
    assert second == ""
    assert ranks(2, printed, ShardConfig.preset("zero3", codec_links="all", **node)) == ["", ""]


def plan_of(ctx: RankContext, run: Run) -> Plan:
    training = start(ctx, run)
    for step in range(2):
        training.step(step)
    return training.sharded.plan


def _between_nodes(plan: Plan) -> int:
    return sum(p.sent_bytes for p in plan.collectives if p.axis.startswith("inter_node") and p.unit != "(usage)")


def test_zeropp_sends_a_quarter_of_zero3_between_nodes(ranks: RankPool) -> None:
    """ZeRO++ against ZeRO-3 in 16 bits: (0.5 + 0 + 0.25) M instead of 3 M.

    Scales and padding beside.
    """
    half = dict(param_dtype="bfloat16", reduce_dtype="bfloat16", topology=Topology(ranks_per_node=2))
    runs = [Run(case=wide_layers, config=ShardConfig.preset(preset, **half)) for preset in ("zero3", "zeropp")]
    zero3, zeropp = (_between_nodes(ranks(4, plan_of, run)[0]) for run in runs)
    assert 0.25 < zeropp / zero3 < 0.275


def wide_layers() -> models.Case:
    """Layers that are large beside a block."""
    case = models.mlp()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 512), *(nn.Linear(512, 512) for _ in range(8)), nn.Linear(512, 3))

    return replace(case, build=build, units=[nn.Linear])


def switch_codecs_off(ctx: RankContext, run: Run) -> list[tuple[Counter[Kind], Counter[Kind]]]:
    """What every step sends, and what its plan says."""
    training, found = start(ctx, run), []
    for step in range(run.steps):
        with CountC10d() as counted:
            training.step(step)
        found.append((counted.kinds, planned_kinds(training.sharded.plan)))
        for row in training.sharded.traffic() if step else ():
            assert (row.count, row.sent_bytes) == (row.planned_count, row.planned_bytes)
    return found


@pytest.mark.parametrize("preset", ["zero3", "mics", "ddp"])
def test_gradients_are_sent_unquantized_in_the_rest_of_the_training(ranks: RankPool, preset: str) -> None:
    options = dict(grad_codec=INT8, codec_links="all", grad_codec_until=0.5, topology=Topology(ranks_per_node=2))
    config = ShardConfig.preset(preset, training_steps=6, **options)
    run = Run(case=models.mlp, config=config, accumulation=2, steps=6)
    for found in ranks(4, switch_codecs_off, run):
        assert [sum(n for (dtype, _), n in sent.items() if dtype is torch.uint8) > 0 for sent, _ in found] == (
            [True] * 3 + [False] * 3
        )
        assert all(sent == planned for sent, planned in found[1:])


def test_a_share_of_a_training_of_unknown_length_is_refused() -> None:
    config = ShardConfig(grad_codec="int8", grad_codec_until=0.5)
    with pytest.raises(ConfigError, match="`training_steps`"):
        _ = config.grad_codec_steps
    assert config.replace(training_steps=10).grad_codec_steps == 5
    assert config.replace(grad_codec="none").grad_codec_steps is None
