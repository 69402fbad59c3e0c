"""Are cells of a public run read as what they say, or refused with a reason?"""

import pytest

from benchmarks.papers.row import PublishedRow
from benchmarks.papers.testbed import NotPredictable
from benchmarks.planners.__main__ import report_json, score_rows
from benchmarks.planners.run import PredictedRun, predict_run
from tests.benchmarks.test_planners import TITAN, row, value


def predicted(**changes: str) -> PredictedRun:
    return predict_run(row(**changes))


def reason_of(**changes: str) -> str:
    with pytest.raises(NotPredictable) as refused:
        predict_run(row(**changes))
    return str(refused.value)


@pytest.mark.parametrize(
    ("word", "same"),
    [
        *(("yes", "y"), ("1", "y"), ("1.0", "full"), ("no", "n"), ("0", "n"), ("1/2", "selective 1/2")),
        *(("0.5", "selective 1/2"), (".25", "selective 1/4"), ("1/2 (every other layer)", "selective 1/2")),
        *(("auto", ""), ("n/a", "")),
    ],
)
def test_recomputation_is_read_in_the_planners_words(word: str, same: str) -> None:
    assert predicted(activation_ckpt=word) == predicted(activation_ckpt=same)


def test_recomputed_attention_is_between_none_and_all_layers_in_seconds_and_bytes() -> None:
    for changes in ({}, {"tp": "2"}, {"system": "DeepSpeed ZeRO-3", "partition_config": ""}):
        runs = [predicted(**changes, activation_ckpt=word) for word in ("no", "attention", "yes")]
        seconds, peaks = [r.step_s for r in runs], [r.peak_bytes for r in runs]
        assert seconds == sorted(set(seconds))
        assert peaks == sorted(set(peaks), reverse=True)
        assert not any("recomputation" in note for note in runs[1].assumptions)


def test_attention_is_recomputed_once_where_parameters_are_gathered_alone() -> None:
    by_layer = {"system": "FSDP2"}
    by_parameter = {"system": "DeepSpeed ZeRO-3", "partition_config": ""}
    added = [
        predicted(**changes, activation_ckpt="attention").step_s - predicted(**changes, activation_ckpt="no").step_s
        for changes in (by_layer, by_parameter)
    ]
    assert added[1] == pytest.approx(added[0], rel=0.05)


@pytest.mark.parametrize("word", ["maybe", "2", "1.5", "-1", "1/0", "50%", "8 layers"])
def test_unknown_words_of_recomputation_are_refused(word: str) -> None:
    reason = reason_of(activation_ckpt=word)
    assert reason.startswith(f"`activation_ckpt` is `{word}`")
    assert "Write yes, no, attention" in reason


@pytest.mark.parametrize(
    ("column", "text"),
    [
        *(("layers", "-3"), ("hidden", "4k"), ("vocab", "0"), ("seq_len", "-8192"), ("seq_len", "0k")),
        *(("micro_batch", "-4"), ("micro_batch", "1.5"), ("micro_batch", "0 tokens")),
        *(("grad_accum_steps", "1-2"), ("global_batch", "-64"), ("global_batch", "1e30"), ("global_batch", "2k")),
        *(("tp", "-2"), ("tp", "2x4"), ("cp", "1/2"), ("ep", "-1"), ("gpus_per_node", "8x")),
        *(("nodes", "-2"), ("nodes", "3"), ("total_gpus", "4x8"), ("precision", "zz"), ("precision", "tf32")),
        *(("precision", "nvfp4 mixed"), ("interconnect_inter", "-400 Gbps"), ("interconnect_inter", "IB -400 Gb/s")),
        *(("seq_len", "1 (8.1.2 tokens)"), ("seq_len", "99999999m tokens"), ("interconnect_inter", "1.2.3 Gbps")),
        *(
            ("interconnect_inter", "1e3 Gbps"),
            ("params", "-8B"),
            ("unit", "tokens/min"),
            ("unit", "samples/h"),
            ("unit", "Mtokens/s"),
            ("unit", "k"),
        ),
    ],
)
def test_a_malformed_cell_is_refused_by_its_name(column: str, text: str) -> None:
    reason = reason_of(**{column: text})
    named = "total_gpus" if (column, text) == ("nodes", "3") else column
    assert reason.startswith(f"`{named}` is `")
    assert text in reason
    assert reason.endswith(".")


@pytest.mark.parametrize(("column", "text"), [("heads", "zz"), ("micro_batch", "varies"), ("pp", "none")])
def test_a_count_without_a_digit_states_nothing(column: str, text: str) -> None:
    assert value(**{column: text}) == value(**{column: ""})


@pytest.mark.parametrize("unit", ["min", "h", "minutes", "us", "zz", "days"])
def test_a_step_in_other_units_than_seconds_is_refused(unit: str) -> None:
    assert reason_of(metric="step time", unit=unit).startswith(f"`unit` is `{unit}`")


def test_well_formed_cells_are_read_as_before() -> None:
    base = value()
    assert value(nodes="4 nodes", total_gpus="32 GPUs", tp="1.0", pp="n/a", cp="-") == base
    assert value(micro_batch="1 (8192 tokens)", global_batch="256K tokens", seq_len="8,192") == base
    assert value(micro_batch="8192 tokens/GPU", precision="bf16-mixed", hidden="4096 (d_model)") == base
    assert value(metric="step time", unit="s/step") == pytest.approx(8192 / base)
    assert value(metric="step time", unit="") == pytest.approx(8192 / base)
    assert value(seq_len="8,192 tokens", global_batch="262,144 tokens", interconnect_inter="3,200 Gbps") == base
    part_of_a_node = {"nodes": "1", "total_gpus": "4", "gpus_per_node": "8"}
    assert value(**part_of_a_node) > 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("6000", 6000), ("6,000", 6000), ("~6000", 6000), ("6000 ± 50", 6000), ("6000 tokens/s/GPU", 6000)),
        *(("6e3 (best of 3)", 6000), ("3.5k", None), ("3.5M", None), ("3,5", None), ("5000-6000", None), ("-5", None)),
    ],
)
def test_a_published_value_is_a_number_or_a_reason(text: str, number: float | None) -> None:
    (found,) = report_json(score_rows([row(value=text)]))
    assert found["published"] == number
    assert (found["predicted"] is None) == (number is None)
    assert number is not None or found["reason"].startswith(f"`value` is `{text}`")


def test_layers_beside_a_model_that_has_others_are_an_assumption() -> None:
    stated = {"layers": "40", "hidden": "5120"}
    both = predicted(**stated).assumptions
    assert "layers 40 of the row, where the model of this name has 32: 40 counts" in both
    assert "hidden 5120 of the row, where the model of this name has 4096: 5120 counts" in both
    alone = predicted(layers="40")
    assert "layers 40 of the row, where the model of this name has 32: 32 counts" in alone.assumptions
    assert alone.value == predicted().value
    assert predicted(layers="32", hidden="4096").assumptions == predicted().assumptions


@pytest.mark.parametrize("gpu", ["A100 80GB", "A100 40GB", "A800", "V100", "T4", "RTX 3090", "A6000", "A10", "A10G"])
def test_there_are_no_fp8_products_before_ada_and_hopper(gpu: str) -> None:
    reason = reason_of(gpu_type=gpu, precision="fp8")
    assert "no fp8 products on" in reason
    assert reason.startswith("`precision` is `fp8`")
    assert value(gpu_type=gpu, precision="bf16") > 0


@pytest.mark.parametrize("gpu", ["H100 80GB", "H20", "L4", "L40S", "RTX 4090", "6000 Ada", "B200", "GB10", "MI300X"])
def test_devices_since_ada_and_hopper_have_fp8_products(gpu: str) -> None:
    assert value(gpu_type=gpu, precision="fp8") > 0


def test_a_list_with_malformed_rows_is_a_list_all_the_same() -> None:
    rows = [PublishedRow({**TITAN, "id": f"{i}", "tp": tp}) for i, tp in enumerate(("1", "-2", "2"))]
    assert [r["predicted"] is None for r in report_json(score_rows(rows))] == [False, True, False]


@pytest.mark.parametrize(
    "changes",
    [
        {"system": "FSDP2 with CPU offload"},
        {"system": "DeepSpeed ZeRO-Offload"},
        {"partition_config": "FSDP 8, offload_optimizer"},
        {"system": "FSDP QLoRA"},
        {"precision": "nf4 with bf16"},
    ],
)
def test_what_is_not_modelled_is_a_reason(changes: dict[str, str]) -> None:
    assert reason_of(**changes).endswith("is not modelled")


def test_no_offload_is_predicted() -> None:
    assert predict_run(row(system="FSDP2, no offload")).value == predict_run(row(system="FSDP2")).value
