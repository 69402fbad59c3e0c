"""A sharded model says how it is sharded; with a framework, rank 0 prints it."""

import contextlib
import io

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from mics_strategy import ShardConfig, shard
from mics_strategy.sharding_report import ShardingReport, requested
from tests.accelerate.runs import accelerator
from tests.accelerate.runs import run as run_accelerate
from tests.lightning.fabric_runs import launched
from tests.lightning.runs import run, trainer
from tests.ranks import RankContext, RankPool

WIDTH = 8


def network() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model[0].weight.requires_grad_(False)
    return model


def reported(ctx: RankContext) -> tuple[ShardingReport, str, dict[str, int], int, float]:
    """Job: the report, its text, and what it should say of memory, of a step's bytes on both axes, and after it."""
    model = network()
    sharded = shard(model, "mics", units=[nn.Linear], param_dtype="bfloat16")
    report = sharded.report()
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    planned, sent = sharded.plan.sent_bytes(), sum(row.sent_bytes for row in sharded.traffic())
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    assert "A rank sends in a step of 2 micro-steps: " in str(sharded.report())
    expected = {axis: report.sent_bytes[axis] + added for axis, added in report.added_bytes.items()}
    assert sharded.report().sent_bytes == expected
    return report, str(report), dict(sharded.memory.bytes_by_purpose), planned, sent


def test_it_says_scopes_units_dtypes_memory_and_traffic(ranks: RankPool) -> None:
    report, text, memory, planned_bytes, sent_bytes = ranks(4, reported, ranks_per_node=2)[1]
    assert report.bytes_by_purpose == memory
    assert sum(report.sent_bytes.values()) == planned_bytes == sent_bytes
    assert {*report.sent_bytes} == {"intra_node", "inter_node", "intra_node+inter_node"}
    assert (report.num_units, report.num_parameters, report.num_trained) == (4, 216, 152)
    assert report.dtypes == {torch.float32: (torch.bfloat16, torch.float32)}
    for said in (
        "parameters over 2, gradients over 2, optimizer states over 2 of 4 ranks (2 nodes of 2).",
        "216 parameters in 4 units, 152 of them trained; float32 parameters are gathered in bfloat16, gradients",
        f"activations: {sum(memory.values()) / 1e3:.3g} kB (",
        "mics_strategy, preset mics with param_dtype=torch.bfloat16: ",
        "A rank sends in a step of 1 micro-step: ",
        f"{report.sent_bytes['inter_node'] / 1e3:.3g} kB over inter_node; a further micro-step adds ",
        f"{report.added_bytes['intra_node'] / 1e3:.3g} kB over intra_node.",
        "'auto' chose partition_size=2: states, buffers and communicators need",
    ):
        assert said in text


def alone(ctx: RankContext) -> str:
    return str(shard(network(), "mics").report())


def test_one_rank_sends_nothing(ranks: RankPool) -> None:
    (text,) = ranks(1, alone)
    assert text.endswith("A rank sends in a step of 1 micro-step: nothing; a further micro-step adds nothing.")
    assert "of 1 ranks (1 node of 1)." in text


def without_parameters(ctx: RankContext) -> tuple[str, list[int]]:
    model = nn.Sequential(nn.ReLU())
    sharded = shard(model, "zero3")
    assert sharded.full_state_dict() == {}
    assert sharded.clip_grad_norm_(1.0) == 0.0
    return str(sharded.report()), list(model(torch.ones(2)))


def test_a_module_without_parameters_is_accepted_as_by_fsdp2(ranks: RankPool) -> None:
    text, output = ranks(2, without_parameters)[0]
    assert "0 parameters in 1 units, 0 of them trained.\n" in text
    assert output == [1, 1]


def reasons(ctx: RankContext) -> list[str]:
    """Job: what the reports say of scopes that are chosen, and of those that are stated."""
    return [shard(network(), preset, **fields).report().chosen for preset, fields in (("auto", {}), ("zero3", {}))]


def test_it_says_why_scopes_were_chosen(ranks: RankPool) -> None:
    chosen, stated = ranks(2, reasons)[0]
    assert chosen.startswith("the fastest scopes that fit: states, buffers and communicators need ")
    assert "of a rank, less " in chosen
    assert stated == ""


@pytest.mark.parametrize(
    ("preset", "fields", "text"),
    [
        ("paro-iig", {}, "preset paro-iig"),
        ("zeropp", {"grad_codec": "int8"}, "preset zeropp with grad_codec=int8"),
        ("auto", {"micro_steps": 4}, "preset auto with micro_steps=4"),
        ("mics", {"partition_size": 4, "prefetch": 2}, "preset mics with partition_size=4, prefetch=2"),
    ],
)
def test_a_configuration_is_named_by_its_nearest_preset(preset: str, fields: dict[str, object], text: str) -> None:
    assert requested(ShardConfig.preset(preset, **fields)) == text


def in_fabric(ctx: RankContext) -> None:
    launched(ctx).setup_module(network())


def in_a_trainer(ctx: RankContext) -> None:
    trainer(ctx, "mics", max_steps=1).fit(BoringModel(), torch.ones(4, 1, 32))


def in_accelerate(ctx: RankContext) -> None:
    accelerator("mics").prepare(network())


def printed(ctx: RankContext, use: object) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        use(ctx)
    return out.getvalue()


@pytest.mark.parametrize("use", [in_fabric, in_a_trainer])
def test_rank_0_prints_it_under_lightning(ranks: RankPool, use: object) -> None:
    first, second = run(ranks, 2, printed, use)
    assert first.count("optimizer states over 2 of 2 ranks") == 1
    assert "A rank sends" not in second


def test_rank_0_prints_it_under_accelerate(ranks: RankPool) -> None:
    first, second = run_accelerate(ranks, 2, printed, in_accelerate)
    assert first.count("optimizer states over 2 of 2 ranks") == 1
    assert "A rank sends" not in second
