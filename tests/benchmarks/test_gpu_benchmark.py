"""Does the GPU's benchmark run, as far as a CPU can tell, and is its arithmetic right?

Nothing here says how fast anything is.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu_pretended
from benchmarks.gpu import PARTS, Mark, main, overlap_rows, parser, table
from benchmarks.gpu_codecs import Meter, moved_bytes, wrong_operations
from benchmarks.gpu_memory import Measured, measure_memory, memory_columns
from benchmarks.gpu_model import SIZES, Shape
from benchmarks.gpu_pretended import measure_host
from benchmarks.gpu_trace import read_events, trace_rows
from benchmarks.gpu_training import BUILDERS, COMPILED_BUILDERS, EngineResult, Peak, engine_rows
from mics_strategy import Codec
from mics_strategy.comm.transport import make_transport
from mics_strategy.planner.cluster import Device
from mics_strategy.planner.model_formulas import TransformerShape, describe
from tests.ranks import RankContext, RankPool

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
PAGE = PAGE.partition("\n## On one GPU\n")[2].partition("\n## ")[0]
CPU = torch.device("cpu")
NO_PEAK = Peak("cpu")


def run(ctx: RankContext, parts: str, folder: str) -> tuple[int, dict[str, list[dict]]]:
    code = main(["--device", "cpu", "--smoke", "--parts", parts, "--output", folder])
    return code, json.loads((Path(folder) / "gpu.json").read_text())["parts"]


def smoke(ranks: RankPool, part: str, folder: Path) -> list[dict]:
    """The rows of a part that found nothing wrong."""
    ((code, tables),) = ranks(1, run, part, str(folder), default_group=False)
    assert code == 0
    assert list(tables) == [part]
    return tables[part]


def columns_explained(rows: list[dict]) -> None:
    explained = set(re.findall(r"^\| ([\w/ -]+?) \|", PAGE, flags=re.MULTILINE))
    named = {key for row in rows for key in row} - {"problem", "not measured", "losses"}
    assert named - {"operation", "codec", "dtype", "engine", "phase", "preset", "ranks"} <= explained


@pytest.mark.slow
def test_every_operation_of_every_codec_is_measured(ranks: RankPool, tmp_path: Path) -> None:
    rows = smoke(ranks, "codecs", tmp_path)
    found = {(row["operation"], row.get("codec"), row.get("dtype")) for row in rows}
    codecs = [f"int{bits}/{size}" for bits in (8, 4) for size in (64, 256, 2048)]
    both = {
        (what, codec, dtype) for what in ("encode", "decode") for codec in codecs for dtype in ("float32", "bfloat16")
    }
    sums = {(what, codec, "float32") for what in ("decode_add", "decode_sum") for codec in codecs}
    assert found == both | sums | {("bits", codec, None) for codec in codecs} | {("copy", None, None)}
    assert all(row["ms"] > 0 and row["of copy"] > 0 for row in rows if "ms" in row)
    columns_explained(rows)


@pytest.mark.weekly
def test_compiled_engines_are_measured_beside_the_others(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--smoke", "--parts", "engine", "--compile", "--output", str(tmp_path)]
    environment = os.environ | {"TORCHINDUCTOR_VEC_ISA_OK": "1"}  # what CPUs can do is not probed by compiling
    subprocess.run([sys.executable, "-m", "benchmarks.gpu", *options], cwd=ROOT, env=environment, check=True)
    rows = {row["engine"]: row for row in json.loads((tmp_path / "gpu.json").read_text())["parts"]["engine"]}
    assert list(rows) == [*BUILDERS, *COMPILED_BUILDERS]
    compiled = rows["mics-compiled"]
    assert compiled["of fsdp2"] == pytest.approx(compiled["tokens/s"] / rows["fsdp2-compiled"]["tokens/s"])
    assert compiled["of plain"] == pytest.approx(compiled["tokens/s"] / rows["plain-compiled"]["tokens/s"])


@pytest.mark.slow
def test_every_engine_is_measured_and_they_agree(ranks: RankPool, tmp_path: Path) -> None:
    rows = smoke(ranks, "engine", tmp_path)
    assert [row["engine"] for row in rows] == list(BUILDERS)
    measured = [row for row in rows if not row.get("not measured")]
    assert {row["engine"] for row in rows if row not in measured} == {"megatron-fsdp", "megatron-fsdp-light"}
    assert all(row["tokens/s"] == pytest.approx(SIZES["tiny"].tokens / row["step s"]) for row in measured)
    assert {row["engine"] for row in rows if "of fsdp2" in row} == {"mics", "zero3"}
    columns_explained(rows)


@pytest.mark.slow
def test_one_of_pretended_ranks_is_measured_beside_fsdp2(ranks: RankPool, tmp_path: Path) -> None:
    fsdp2, *ours = smoke(ranks, "pretended", tmp_path)
    assert [row["engine"] for row in (fsdp2, *ours)] == ["fsdp2", "zero3", "mics", "zero2"]
    assert (fsdp2["of fsdp2"], fsdp2["host of fsdp2"]) == (1, 1)
    for row in ours:
        assert row["of fsdp2"] == pytest.approx(fsdp2["step s"] / row["step s"])
        assert row["host of fsdp2"] == pytest.approx(row["host s"] / fsdp2["host s"])
    columns_explained([fsdp2, *ours])


def shares_of_host(ctx: RankContext) -> dict[str, float]:
    """CPU time of a step beyond the plain model's, of FSDP2's: the median of pairs measured one after another."""
    pairs = [{str(row["engine"]): row["of fsdp2"] for row in measure_host(rounds=1, layers=12)} for _ in range(5)]
    return {name: statistics.median(pair[name] for pair in pairs) for name in ("zero3", "mics")}


@pytest.mark.slow
def test_a_step_costs_the_host_less_than_with_fsdp2(ranks: RankPool) -> None:
    """It is about 0.7 of it, in CPU time, which other processes change little."""
    (shares,) = ranks(1, shares_of_host, default_group=False)
    assert max(shares.values()) < 1.0, shares


def first_sum(ctx: RankContext, is_of_torch_2_11: bool) -> list[float]:
    if is_of_torch_2_11:
        gpu_pretended._keeps_own_part = lambda: False
    with gpu_pretended.pretended_ranks(4):
        out = torch.zeros(2)
        make_transport(torch.distributed.group.WORLD, "all", "cpu").reduce_scatter(out, torch.arange(8.0))
    return out.tolist()


@pytest.mark.parametrize("is_of_torch_2_11", [False, True])
def test_a_pretended_sum_is_this_ranks_own_part(ranks: RankPool, is_of_torch_2_11: bool) -> None:
    """Zeros instead let every step of an optimizer be the same, whatever streams do."""
    assert ranks(1, first_sum, is_of_torch_2_11, default_group=False) == [[0.0, 1.0]]


@pytest.mark.slow
def test_gathers_are_early_with_overlap_and_only_then(ranks: RankPool, tmp_path: Path) -> None:
    rows = smoke(ranks, "overlap", tmp_path)
    found = {(row["overlap"], row["phase"]): (row["gathers"], row["issued early"]) for row in rows}
    forward, backward = SIZES["tiny"].layers - 1, SIZES["tiny"].layers - 2  # the last two blocks are still there
    assert found == {
        ("all", "forward"): (forward, forward),
        ("all", "backward"): (backward, backward),
        ("none", "forward"): (forward, 0),
        ("none", "backward"): (backward, 0),
    }
    columns_explained(rows)


@pytest.mark.slow
def test_memory_is_accounted_for_many_ranks(ranks: RankPool, tmp_path: Path) -> None:
    rows = smoke(ranks, "memory", tmp_path)
    assert [(row["preset"], row["ranks"]) for row in rows] == [("mics", 512), ("zero3", 512), ("zero3", 8)]
    assert all(row["account MB"] == pytest.approx(row["estimate MB"], rel=0.01) for row in rows)
    assert all(row["target"] is None for row in rows), "nothing is measured on a CPU"
    columns_explained(rows)


def test_rounding_of_a_tiny_model_is_not_held_against_the_account() -> None:
    """Of the first run on an H200."""
    row = memory_columns(229_700, 229_900, Measured(rest=261_100, activations=184_800, peak=478_700))
    assert (row["target"], row["problem"]) == ("met", "")


def measured_memory(ctx: RankContext, shape: Shape) -> list[dict]:
    return list(measure_memory(shape, CPU))


@pytest.mark.slow
def test_the_estimate_has_the_units_of_what_is_measured(ranks: RankPool) -> None:
    """Embedding and head are so large that another rule would make units of them."""
    (rows,) = ranks(1, measured_memory, replace(SIZES["tiny"], vocabulary=2**17), default_group=False)
    assert all(row["account MB"] == pytest.approx(row["estimate MB"], rel=0.01) for row in rows)


@pytest.mark.parametrize(
    ("rest", "target", "problem"),
    [(104, "met", ""), (107, "missed", ""), (96, "met", "memory at rest is not what the account says")],
)
def test_memory_is_held_against_account_and_estimate(rest: int, target: str, problem: str) -> None:
    measured = Measured(rest=rest * 10**8, activations=50 * 10**8, peak=180 * 10**8)
    row = memory_columns(102 * 10**8, 100 * 10**8, measured)
    assert (row["of estimate"], row["target"], row["problem"]) == (rest / 100, target, problem)
    assert row["of all"] == 180 / 152


@pytest.mark.slow
def test_the_trace_holds_both_steps(ranks: RankPool, tmp_path: Path) -> None:
    rows = smoke(ranks, "trace", tmp_path)
    events = read_events(tmp_path / "trace.json.gz")
    for step, row in enumerate(rows):
        (span,) = [event for event in events if event["name"] == f"step {step}"]
        names = [event["name"] for event in events if span["ts"] <= event["ts"] < span["ts"] + span["dur"]]
        blocks = [name for name in names if name.startswith("forward of")]
        assert blocks == [f"forward of blocks.{index}" for index in range(SIZES["tiny"].layers)]
        assert {"aten::mm", "Optimizer.step#AdamW.step"} <= set(names)
        assert row["operators"] > 100
    assert len(rows) == 2
    columns_explained(rows)


def traced(*steps: int, num_bytes: int = 1000) -> list[dict]:
    """Rows of a trace of a GPU with an operator and its kernel in some steps; each kernel ends in the next step."""
    events = []
    for step in (0, 1):
        begin = {"ts": 10 * step, "dur": 9}
        events.append({"name": f"step {step}", "cat": "user_annotation", **begin})
        events.append({"name": f"step {step}", "cat": "gpu_user_annotation", "ts": 10 * step + 8, "dur": 9})
    for step in steps:
        launch, kernel = {"correlation": step + 70}, {"correlation": step + 70, "stream": 7}
        events.append({"name": "aten::mm", "cat": "cpu_op", "ts": 10 * step + 1, "dur": 1})
        events.append(
            {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": 10 * step + 1, "dur": 1, "args": launch}
        )
        events.append({"name": "gemm", "cat": "kernel", "ts": 10 * step + 12, "dur": 1, "args": kernel})
    return list(trace_rows(events, num_bytes, is_cuda=True))


def test_kernels_belong_to_the_step_that_launched_them() -> None:
    assert [(row["operators"], row["kernels"], row["streams"], row["problem"]) for row in traced(0, 1)] == [
        (1, 1, 1, ""),
        (1, 1, 1, ""),
    ]


def test_a_step_without_events_and_a_large_trace_are_wrong() -> None:
    assert [row["problem"] for row in traced(0)] == ["", "the trace holds nothing of this step"]
    assert {row["problem"] for row in traced(0, 1, num_bytes=16_000_001)} == {"more than 16 MB"}
    assert [row["problem"] for row in trace_rows([], 10, is_cuda=False)] == [
        "the trace has no step 0",
        "the trace has no step 1",
    ]


def test_without_a_folder_there_is_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--smoke", "--parts", "trace"]) == 0
    assert "no `--output` says where" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("encode", 4 * 512 + 528),
        ("decode", 528 + 4 * 512),
        ("decode_add", 528 + 8 * 512),
        ("decode_sum", 2 * 528 + 8 * 512),
    ],
)
def test_bytes_are_those_of_the_operands(operation: str, expected: int) -> None:
    codec = Codec(bits=8, block_size=256)  # 512 codes and two scales, up to a multiple of 16
    assert moved_bytes(operation, codec, 512, 4, 3) == expected


def test_bf16_values_take_half_the_bytes() -> None:
    codec = Codec(bits=4, block_size=256)  # 256 bytes of codes and two scales
    assert moved_bytes("encode", codec, 512, 2, 3) == 2 * 512 + 272


class WritesZeros:
    """A coder whose results are wrong."""

    def __init__(self, codec: Codec, device: torch.device) -> None:
        self._codec = codec

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        out.zero_()

    decode_add = decode

    def decode_sum(self, summands: object, out: torch.Tensor, *, accumulate: bool) -> None:
        out.zero_()


def test_wrong_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_operations(Codec(bits=8), CPU) == []
    monkeypatch.setattr("benchmarks.gpu_codecs.Quantizer", WritesZeros)
    found = wrong_operations(Codec(bits=8), CPU)
    assert [name.split()[0] for name in found] == ["encode", "decode"] * 2 + ["decode_add", "decode_sum"]


class Streamed(Meter):
    """A meter whose marks are seconds that the test has written."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.is_cuda = True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_times_on_the_device_say_what_was_hidden() -> None:
    """The second gather takes 3 s, of which the first block computes 2; the other one comes when all is over."""
    forward = [
        *(("step begins", "", 0.0), ("gather begins", "a", 0.0), ("gather ends", "a", 1.0)),
        *(("gather begins", "b", 2.0), ("gather ends", "b", 5.0), ("forward begins", "a", 1.0)),
        *(("forward ends", "a", 4.0), ("forward begins", "b", 5.0), ("forward ends", "b", 6.0)),
    ]
    backward = [
        *(("backward begins", "b", 7.0), ("backward ends", "b", 9.0), ("backward begins", "a", 9.0)),
        *(("gather begins", "a", 9.0), ("gather ends", "a", 10.0)),
    ]
    first, second = overlap_rows([Mark(*each) for each in (*forward, *backward)], Streamed())
    assert first == {
        **{"phase": "forward", "gathers": 1, "issued early": 1},
        **{"begun early": 1, "gather ms": 3000.0, "hidden": pytest.approx(2 / 3)},
    }
    assert second == {
        **{"phase": "backward", "gathers": 1, "issued early": 0},
        **{"begun early": 0, "gather ms": 1000.0, "hidden": 0.0},
    }


def found(step_s: float, loss: float) -> EngineResult:
    return EngineResult(step_s=[step_s, step_s, 9.0], peak_bytes=[1000], reserved_bytes=[2000], losses=[[5.0, loss]])


def test_ratios_are_those_of_the_faster_peers() -> None:
    engines = {"plain": found(1.0, 4.0), "plain-autocast": found(2.0, 4.0)}
    engines |= {"fsdp2": found(2.0, 4.0), "fsdp2-light": found(1.6, 4.0), "mics": found(2.0, 4.0)}
    *_, mics = engine_rows(engines, SIZES["tiny"], 0.02, NO_PEAK)
    assert (mics["of plain"], mics["of fsdp2"], mics["target"]) == (0.5, pytest.approx(0.8), "missed")


def test_compiled_engines_are_compared_with_compiled_ones() -> None:
    engines = {"plain": found(2.0, 4.0), "fsdp2": found(2.0, 4.0), "plain-compiled": found(1.0, 4.0)}
    engines |= {"fsdp2-compiled": found(0.9, 4.0), "mics": found(2.0, 4.0), "mics-compiled": found(1.0, 4.0)}
    rows = {row["engine"]: row for row in engine_rows(engines, SIZES["tiny"], 0.02, NO_PEAK)}
    ratios = {name: (rows[name]["of fsdp2"], rows[name]["of plain"]) for name in ("mics", "mics-compiled")}
    assert ratios == {"mics": (1.0, 1.0), "mics-compiled": (pytest.approx(0.9), 1.0)}


def counted_flop(shape: Shape) -> int:
    """FLOP of the matrix products of a forward and backward, by torch's own counter."""
    batch = shape.batch(0, CPU)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        shape.model(CPU)(batch.inputs, batch.targets).backward()
    return counter.get_total_flops()


def test_flop_of_a_token_are_those_that_torch_counts_and_the_planner_halves() -> None:
    shape = SIZES["tiny"]
    assert shape.flop_per_token * shape.tokens == counted_flop(shape)
    planned = TransformerShape(
        name="tiny",
        family="llama",
        num_layers=shape.layers,
        hidden_size=shape.width,
        intermediate_size=shape.feed_forward,
        num_heads=shape.heads,
        vocab_size=shape.vocabulary,
    )
    assert shape.causal_flop_per_token * shape.sequence == describe(planned, shape.sequence).model_flop_per_sample


@pytest.mark.parametrize(
    ("name", "of_planner"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA B200", "b200-180gb"),
        ("NVIDIA A10G", "a10g-24gb"),
    ],
)
def test_peaks_are_those_of_the_planner(monkeypatch: pytest.MonkeyPatch, name: str, of_planner: str) -> None:
    assert peak_of(monkeypatch, name, (8, 0)) == Peak(name, Device.named(of_planner).peak_flop_per_s)


def peak_of(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> Peak:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    return Peak.of(torch.device("cuda", 0))


def test_a_device_that_is_not_known_or_has_no_bf16_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_of(monkeypatch, "something new", (12, 0)) == Peak("something new")
    assert peak_of(monkeypatch, "Tesla V100-SXM2-32GB", (7, 0)) == Peak("Tesla V100-SXM2-32GB")
    assert Peak.of(CPU) == Peak("cpu")


@pytest.mark.parametrize(
    ("size", "share", "target"), [("1b", 0.501, "met"), ("1b", 0.499, "missed"), ("300m", 0.7, None)]
)
def test_half_of_the_peak_is_asked_of_our_rows_with_the_largest_model(
    size: str, share: float, target: str | None
) -> None:
    shape, peak = SIZES[size], Peak("a device", 1e15)
    step_s = shape.tokens * shape.causal_flop_per_token / (share * 1e15)
    plain, mics = engine_rows({"plain": found(step_s, 4.0), "mics": found(step_s, 4.0)}, shape, 0.02, peak)
    assert (mics["mfu"], plain["mfu"]) == (pytest.approx(share), pytest.approx(share))
    assert mics["mfu PaLM"] / mics["mfu"] == pytest.approx(shape.flop_per_token / shape.causal_flop_per_token)
    assert (mics["mfu target"], plain["mfu target"]) == (target, None)


def test_without_a_peak_the_columns_are_empty_and_say_why() -> None:
    (mics,) = engine_rows({"mics": found(1.0, 4.0)}, SIZES["1b"], 0.02, NO_PEAK)
    assert (mics["mfu"], mics["mfu PaLM"], mics["mfu target"]) == (None, None, "no peak of cpu is known")
    assert "no peak of cpu is known" in table([mics])


@pytest.mark.parametrize("loss", [4.1, float("nan")])
def test_other_losses_and_failures_are_wrong(loss: float) -> None:
    engines = {"plain": found(1.0, 4.0), "fsdp2": EngineResult(failure="out of memory"), "mics": found(1.0, loss)}
    plain, fsdp2, mics = engine_rows(engines, SIZES["tiny"], 0.02, NO_PEAK)
    assert (plain["problem"], fsdp2["problem"]) == ("", "out of memory")
    assert "where 4.0000 is expected" in mics["problem"]
    assert "WRONG: out of memory" in table([plain, fsdp2, mics])


def test_a_part_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr("benchmarks.gpu.measure_codecs", fail)
    assert main(["--device", "cpu", "--smoke", "--parts", "codecs"]) == 1
    assert "WRONG: RuntimeError: no more memory" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--parts", "codecs,speed"]) == 2
    assert "`--parts speed` is not known" in capsys.readouterr().err


def test_the_page_names_what_exists() -> None:
    (command,) = re.findall(r"^python -m benchmarks.gpu(.*)$", PAGE, flags=re.MULTILINE)
    parser().parse_args(command.split())
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= set(re.findall(r"--[a-z-]+", parser().format_help()))
    assert all(f"`{part}`" in PAGE for part in PARTS)
    assert all(f"`{engine}`" in PAGE for engine in BUILDERS | COMPILED_BUILDERS)
    assert f"{SIZES['1b'].numel / 1e9:.2f} B" in PAGE
    assert sum(parameter.numel() for parameter in SIZES["tiny"].model("meta").parameters()) == SIZES["tiny"].numel
