"""Are public runs read in any words, and predicted as well as before on the half that nothing was fitted to?"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.papers.row import PublishedRow, read_rows
from benchmarks.papers.testbed import NotPredictable
from benchmarks.papers.validate import validate
from benchmarks.planners.__main__ import main, public_rows, score_rows
from benchmarks.planners.certainty import errors_by_waiting, errors_of_pairs, within
from benchmarks.planners.run import predict_run, read_run
from benchmarks.planners.scores import FITTED_SOURCE, Score, ScoredRow, order_kept
from mics_strategy.planner.certainty import CERTAINTIES

TITAN: Mapping[str, str] = {
    "id": "a",
    "model": "Llama3.1-8B",
    "params": "8B",
    "seq_len": "8192",
    "gpu_type": "H100 80GB",
    "gpus_per_node": "8",
    "nodes": "4",
    "total_gpus": "32",
    "interconnect_inter": "3200 Gbps",
    "system": "FSDP2 (torchtitan)",
    "partition_config": "FULL_SHARD",
    "micro_batch": "1",
    "grad_accum_steps": "1",
    "activation_ckpt": "selective",
    "precision": "bf16",
    "compile": "y",
    "tp": "1",
    "metric": "tokens/GPU/s",
    "value": "6000",
    "unit": "tokens/s/GPU",
}


def row(**changes: str) -> PublishedRow:
    return PublishedRow({**TITAN, **changes})


def value(**changes: str) -> float:
    return predict_run(row(**changes)).value


@pytest.mark.parametrize(
    "gpu", ["H100 SXM5", "H200 141GB", "B200", "GB200 NVL72", "MI300X", "A100 80GB", "A800", "L40S", "RTX 4090", "V100"]
)
def test_devices_are_found_by_any_words(gpu: str) -> None:
    assert 50 < value(gpu_type=gpu) < 40_000


@pytest.mark.parametrize(
    ("system", "config", "scopes"),
    [
        ("FSDP2", "FULL_SHARD", (32, 32, 32)),
        ("FSDP1", "HYBRID_SHARD (node)", (8, 8, 8)),
        ("FSDP", "HSDP, replicate 2, shard 16", (16, 16, 16)),
        ("FSDP (Composer)", "SHARD_GRAD_OP", (1, 32, 32)),
        ("PyTorch DDP", "", (1, 1, 1)),
        ("DeepSpeed", "ZeRO stage 2", (1, 32, 32)),
        ("DeepSpeed ZeRO-3", "", (32, 32, 32)),
        ("DeepSpeed ZeRO++", "", (32, 32, 32)),
        ("DeepSpeed MiCS", "groups of 8", (8, 8, 8)),
        ("InternEvo ZeRO-1 in groups of 8", "P none, G none, OS 8 ranks", (1, 1, 8)),
        ("Megatron DDP, distributed optimizer", "TP 1, PP 1", (1, 1, 32)),
        ("Megatron FSDP", "FSDP 32", (32, 32, 32)),
    ],
)
def test_systems_have_their_scopes(system: str, config: str, scopes: tuple[int, int, int]) -> None:
    run = read_run(row(system=system, partition_config=config))
    assert run.system.degrees(8, run.num_ranks) == scopes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu_type": "TPU v5p"}, "not in the catalog"),
        ({"model": "ResNet-50"}, "no transformer"),
        ({"model": "Mixtral 8x7B"}, "mixture of experts"),
        ({"model": "secret", "params": ""}, "not known"),
        ({"pp": "4"}, "pipeline parallelism"),
        ({"cp": "2"}, "context parallelism"),
        ({"partition_config": "FSDP 8, EP 8"}, "expert parallelism"),
        ({"system": "Alpa", "partition_config": ""}, "is not known"),
        ({"metric": "accuracy", "unit": "%"}, "not modelled"),
        ({"total_gpus": "", "nodes": ""}, "number of GPUs"),
        ({"micro_batch": "", "grad_accum_steps": "", "seq_len": ""}, "neither the batch nor the length"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_modelled_has_a_reason(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(NotPredictable, match=reason):
        predict_run(row(**changes))


def test_units_of_one_step_agree() -> None:
    tokens_per_s = value()
    assert value(metric="step time", unit="s") == pytest.approx(8192 / tokens_per_s)
    assert value(metric="throughput", unit="samples/s") == pytest.approx(32 * tokens_per_s / 8192)
    assert value(metric="throughput", unit="tokens/s") == pytest.approx(32 * tokens_per_s)
    assert 20 < value(metric="MFU", unit="%") < 70


def test_kernels_recomputation_and_precision_have_their_direction() -> None:
    base = value()
    assert value(compile="n") < base
    assert value(activation_ckpt="y") < base < value(activation_ckpt="n")
    assert value(precision="fp8") > base
    assert value(precision="fp8 rowwise") < value(precision="fp8")
    assert value(tp="8") < base
    assert value(interconnect_inter="10 GbE") < 0.1 * base


def test_a_system_whose_configurations_recompute_does_so_where_a_row_does_not_say() -> None:
    changes = {"system": "FSDP2 (Automodel)", "compile": ""}
    assert value(**changes, activation_ckpt="") == value(**changes, activation_ckpt="y")
    alone = {**changes, "total_gpus": "1", "nodes": "1", "gpus_per_node": "1", "model": "Qwen2.5 0.5B", "params": ""}
    assert value(**alone, activation_ckpt="") == value(**alone, activation_ckpt="n")


def test_lengths_and_recomputation_are_read_in_any_form() -> None:
    assert value(seq_len="8k") == value(seq_len="8K") == value(seq_len="8192") == value(seq_len="8192 tokens")
    assert value(activation_ckpt="full") == value(activation_ckpt="y") < value(activation_ckpt="selective, every 2nd")
    assert value(activation_ckpt="selective 1/2") == value(activation_ckpt="selective, every 2nd layer")
    assert value(activation_ckpt="none") == value(activation_ckpt="n") > value(activation_ckpt="selective 1/3")
    assert value(activation_ckpt="selective 1/10") > value(activation_ckpt="selective 1/3")
    assert value(activation_ckpt="selective 1/3") > value(activation_ckpt="selective 1/2")


def test_links_are_read_in_any_form() -> None:
    def node_bits_per_s(text: str) -> float:
        cluster = read_run(row(interconnect_inter=text)).testbed.cluster
        return cluster.inter_node.bytes_per_s * 8 * cluster.ranks_per_node / 0.88

    assert node_bits_per_s("400 Gbps (4 x 100 Gb RoCE)") == pytest.approx(400e9)
    assert node_bits_per_s("8 x 400 Gb/s") == pytest.approx(3200e9)
    assert node_bits_per_s("400 Gb/s per GPU RDMA") == pytest.approx(3200e9)
    assert node_bits_per_s("400 Gbps x 8") == pytest.approx(3200e9)
    assert node_bits_per_s("10 GbE") == pytest.approx(10e9)
    assert node_bits_per_s("500 Mbps") == pytest.approx(0.5e9)
    assert node_bits_per_s("400 MB/s") == pytest.approx(3.2e9)
    assumed = predict_run(row(interconnect_inter="Thunderbolt")).assumptions
    assert any("`Thunderbolt` without a rate" in note for note in assumed)


@pytest.fixture(scope="module")
def frozen() -> list[ScoredRow]:
    """The half that nothing was fitted to; of rows that differ in the number of GPUs alone, those below 512."""
    return score_rows(r for r in public_rows() if "llm-foundry" not in r.text("source") and (r.world_size or 0) < 512)


def test_the_frozen_half_is_predicted_as_well_as_before(frozen: list[ScoredRow]) -> None:
    assert {r.half for r in frozen} == {"held out"}
    score = Score.of([r for r in frozen if not r.reason])
    assert score.count >= 69
    assert score.median <= 0.056
    assert score.mean <= 0.063
    assert abs(score.worst) <= 0.23
    kept, pairs = order_kept(frozen)
    assert kept >= 0.95 * pairs


@pytest.mark.slow
def test_the_stated_certainty_is_that_of_the_rows() -> None:
    papers = validate(read_rows(Path(__file__).parents[2] / "docs" / "papers" / "results.csv"))
    by_kind = errors_by_waiting(score_rows(public_rows()), papers)
    for kind, errors in zip(CERTAINTIES, by_kind, strict=True):
        assert kind.runs == len(errors)
        assert kind.half == pytest.approx(within(errors, 0.5), abs=0.006)
        assert kind.most == pytest.approx(within(errors, 0.8), abs=0.03)


def test_rows_are_sorted_by_the_share_that_waits() -> None:
    def scored(waiting: float, predicted: float, source: str = "others") -> ScoredRow:
        return ScoredRow(row=row(value="100", source=source), predicted=predicted, waiting=waiting)

    runs = [scored(0.1, 130), scored(0.1, 90), scored(0.3, 80), scored(0.9, 300), scored(0.1, 101, FITTED_SOURCE)]
    assert errors_by_waiting(runs, []) == [
        pytest.approx([0.1, 0.3]),
        pytest.approx([0.2]),
        pytest.approx([2.0]),
    ]
    assert within([0.1, 0.2, 0.3, 0.4, 0.5], 0.8) == 0.4
    assert errors_of_pairs(runs[:2]) == pytest.approx([130 / 90 - 1])


def test_pure_data_parallelism_is_never_refused_nor_called_too_large(frozen: list[ScoredRow]) -> None:
    runs = [r for r in frozen if r.row.text("class").startswith("dp-")]
    assert len(runs) >= 35
    assert [r.row.text("id") for r in runs if r.reason or not r.fits] == []


def test_the_command_prints_a_list_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    cells = [{**TITAN, "value": "6,000"}, {**TITAN, "id": "b", "pp": "4"}, {**TITAN, "id": "c", "value": "fast"}]
    names = [*TITAN, "pp"]
    quoted = [[f'"{c.get(name, "")}"' for name in names] for c in cells]
    path.write_text("\n".join([",".join(names), *(",".join(line) for line in quoted)]))
    assert main(["--rows", str(path), "--json"]) == 0
    one, two, three = json.loads(capsys.readouterr().out)
    assert one["error"] == pytest.approx(one["predicted"] / 6000 - 1)
    assert (one["id"], one["published"], two["predicted"], two["error"]) == ("a", 6000.0, None, None)
    assert "pipeline" in two["reason"]
    assert "no number" in three["reason"]
    odd = [{**TITAN, "id": f"{i}", "value": text} for i, text in enumerate(("0", "-5", "inf", "nan", ""))]
    odd.append({**TITAN, "id": "slow", "interconnect_inter": "0 Gbps"})
    path.write_text("\n".join([",".join(TITAN), *(",".join(f'"{c[name]}"' for name in TITAN) for c in odd)]))
    assert main(["--rows", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [r["predicted"] for r in found] == [None] * 6
    assert all("no number above 0" in r["reason"] for r in found[:5])
    assert "send nothing" in found[5]["reason"]
    assert main(["--rows", str(path)]) == 0
    assert "held out" in capsys.readouterr().out
    assert main(["--rows", str(tmp_path / "none.csv")]) == 1


def test_predictions_of_another_planner_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.csv"
    path.write_text("id,predicted,reason\nLF004,4230,\nLF005,,no model of it\n")
    assert main(["--predictions", str(path), "--json"]) == 0
    by_id = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(by_id) == 212
    one, two = by_id.pop("LF004"), by_id.pop("LF005")
    assert {row["reason"] for row in by_id.values()} == {"no prediction"}
    assert one["error"] == pytest.approx(1.0)
    assert two["reason"] == "no model of it"
    path.write_text("id,predicted\nunknown,1\n")
    assert main(["--predictions", str(path)]) == 1
    assert "no table of predictions" in capsys.readouterr().err
    for cells in ("LF004,nan", "LF004,inf", "LF004,-5", "LF004,0", "LF004,1\nLF004,2"):
        path.write_text(f"id,predicted\n{cells}\n")
        assert main(["--predictions", str(path)]) == 1
        assert "row LF004 is there twice, or" in capsys.readouterr().err
