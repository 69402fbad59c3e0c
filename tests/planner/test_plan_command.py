"""Do `mics plan` and `mics simulate` answer, and refuse with one sentence what has no answer?"""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from torch import nn
from transformers import AutoConfig, GPT2Config, LlamaConfig

from mics_strategy.cli import main
from mics_strategy.errors import MiCSError
from mics_strategy.planner.catalog import describe_model
from mics_strategy.planner.choice import plan
from mics_strategy.planner.cluster import Cluster
from mics_strategy.planner.model_sources import recipe_model
from mics_strategy.planner.model_trace import TraceInput
from mics_strategy.planner.plan_command import parser
from mics_strategy.planner.plan_options import workload_of
from mics_strategy.planner.report import print_report, print_rich, report_text
from mics_strategy.planner.workload import Workload

LLAMA = ["--model", "llama-7b", "--seq-len", "2048"]
P4D = ["--cluster", "p4d.24xlarge", "--nodes", "2"]
USUAL = [*LLAMA, *P4D, "--global-batch", "64"]
STATED = [*USUAL, "--micro-batch", "1", "--preset", "paro-iig"]


class Net(nn.Module):
    """Two equal layers and a head."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            images = layer(images).relu()
        out: torch.Tensor = self.head(images)
        return out


def net() -> tuple[nn.Module, dict[str, Any]]:
    return Net(), {"images": torch.zeros(1, 512)}


def tokens_net(seq_len: int) -> tuple[nn.Module, TraceInput]:
    example = {"images": torch.zeros(1, seq_len, 512)}
    return Net(), TraceInput(name="tokens", example=example, tokens_per_sample=seq_len, units=[nn.Linear])


def frozen() -> tuple[nn.Module, dict[str, Any]]:
    model, example = net()
    return model.requires_grad_(requires_grad=False), example


def nothing() -> int:
    return 1


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_plan_is_that_of_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run(capsys, "plan", *USUAL)
    training = Workload(model=describe_model("llama-7b", 2048), global_batch=64)
    choice = plan(training, Cluster.preset("p4d.24xlarge", nodes=2))
    assert answer["chosen"] == json.loads(json.dumps(choice.to_json()["chosen"]))
    assert len(answer["rejected"]) == answer["fitting"] + answer["too_large"] - 1
    assert main(["plan", *USUAL]) == 0
    assert capsys.readouterr().out.strip() == choice.table()


def test_rich_and_plain_text_have_the_same_words() -> None:
    choice = plan(
        Workload(model=describe_model("llama-7b", 2048), global_batch=64, recompute=True),
        Cluster.preset("p4d.24xlarge", nodes=2),
    )
    pretty, plain = io.StringIO(), io.StringIO()
    print_rich(choice.sections(), pretty, width=200)
    print_report(choice.sections(), plain)
    assert plain.getvalue().strip() == report_text(choice.sections())
    words = [word for word in pretty.getvalue().split() if not set(word) <= set("─ ")]
    assert words == plain.getvalue().split()


def test_upgrades_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run(capsys, "plan", *LLAMA, *P4D, "--global-batch-tokens", "64k", "--recompute", "yes", "--what-if")
    assert answer["chosen"]["micro_batch"] * answer["chosen"]["micro_steps"] * 16 == 32  # 65,536 tokens: not 64,000
    assert [upgrade["change"] for upgrade in answer["what_if"]] == [
        "inter-node links 2 times as fast",
        "2 times the memory",
        "2 times the nodes",
    ]
    assert all(upgrade["speedup"] > 0 for upgrade in answer["what_if"])


@pytest.mark.parametrize(
    ("tokens", "samples"), [("512k", 512), ("500k", 496), ("524288", 512), ("0.5M", 512), ("1M", 1024), ("520k", 512)]
)
def test_tokens_with_a_prefix_are_binary_where_ranks_divide_them(tokens: str, samples: int) -> None:
    options = parser().parse_args(["--model", "llama-7b", "--seq-len", "1024", *P4D, "--global-batch-tokens", tokens])
    assert workload_of(options, world_size=16).global_batch == samples


def test_what_to_give_up_is_said_without_being_asked(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--cluster", "g5.48xlarge", "--nodes", "4", "--model", "bert-1.5b", "--seq-len", "128"]
    answer = run(capsys, "plan", *slow, "--global-batch", "256")
    settings = {change["change"]: change["setting"] for change in answer["give_up"]}
    assert settings["gradients sent in INT8"] == 'grad_codec="int8"'
    assert main(["plan", *slow, "--global-batch", "256"]) == 0
    text = capsys.readouterr().out
    assert "What to give up" in text
    assert 'grad_codec="int8"' in text
    assert "These change the arithmetic of the training" in text


def test_memory_of_communicators_is_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lab.yaml").write_text("{like: p4d.24xlarge, nodes: 2, communicator_memory: 200 MB}")
    file = [*LLAMA, "--cluster", str(tmp_path / "lab.yaml"), "--global-batch", "64", "--micro-batch", "1"]
    for options, each in ((file, 2e8), ([*file, "--communicator-memory", "0.1 GB"], 1e8), (STATED[:-2], 6e8)):
        memory = run(capsys, "simulate", *options, "--preset", "paro-iig")["memory_bytes_by_kind"]
        assert memory["communicators"] == 6 * each
    refused(capsys, ["plan", *USUAL, "--communicator-memory", "much"], "not a quantity above 0")
    assert main(["estimate", "llama-7b", "--ranks-per-node", "8", "--communicator-memory", "100 MB"]) == 0
    assert re.search(r"communicators +0.300 GB", capsys.readouterr().out)
    assert main(["estimate", "llama-7b", "--cluster", str(tmp_path / "lab.yaml")]) == 0
    assert re.search(r"communicators +1.200 GB", capsys.readouterr().out)


def test_an_optimizer_without_states_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    needed = []
    for state_bytes in ("0", "8"):
        assert main(["plan", *USUAL, "--state-bytes", state_bytes, "--json"]) == 0
        needed.append(json.loads(capsys.readouterr().out)["chosen"]["memory_bytes_by_kind"].get("optimizer states", 0))
    assert needed[0] == 0 < needed[1]


def test_part_of_the_layers_or_attention_alone_is_recomputed(capsys: pytest.CaptureFixture[str]) -> None:
    def step(text: str) -> tuple[float, float]:
        found = run(capsys, "simulate", *STATED, "--recompute", text)
        return found["compute_s"], found["memory_bytes_by_kind"]["activations of layers"]

    steps = {text: step(text) for text in ("no", "attention", "1/4", "0.5", "yes")}
    for text, share in (("1/4", 0.25), ("0.5", 0.5)):
        for found, least, most in zip(steps[text], steps["no"], steps["yes"], strict=True):
            assert found == pytest.approx(least + share * (most - least))
    assert steps["no"][0] < steps["attention"][0] < steps["0.5"][0]
    kept = 32 * 2048 * (4 * 4096 * 2 + 32 * 4)  # query, key, value, output, sums of rows
    assert steps["no"][1] - steps["attention"][1] == kept
    for text, words in (("1/2", ", 0.5 of the layers recomputed"), ("attention", ", attention recomputed")):
        assert main(["plan", *USUAL, "--micro-batch", "1", "--recompute", text]) == 0
        assert f"1 sample{words}" in capsys.readouterr().out
    images = ["--model", f"{__name__}:net", *P4D, "--global-batch", "64"]
    refused(capsys, ["plan", *images, "--recompute", "attention"], "net has no fused attention. Use a share")


def test_simulate_recomputes_what_would_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    def step(*options: str) -> dict[str, Any]:
        return run(capsys, "simulate", *STATED, *options)

    assert step("--micro-batch", "1") == step("--micro-batch", "1", "--recompute", "no")
    assert not step("--micro-batch", "4", "--recompute", "no")["fits"]
    assert step("--micro-batch", "4") == step("--micro-batch", "4", "--recompute", "yes")


def test_estimate_and_simulate_count_the_same_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=4096).save_pretrained(tmp_path)
    batch = [*P4D, "--seq-len", "1024", "--micro-batch", "4"]
    for model in (str(tmp_path), "llama-7b"):
        options = [*batch, "--global-batch", "64", "--recompute", "no", "--preset", "mics"]
        counted = sum(run(capsys, "simulate", "--model", model, *options)["memory_bytes_by_kind"].values())
        assert main(["estimate", model, *batch, "--partition-size", "8", "--param-dtype", "bfloat16"]) == 0
        assert f"{counted / 1e9:.3f} GB" in capsys.readouterr().out, model


def test_plan_takes_a_name_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=4096)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **_: config if name == "gpt2" else None)
    batch = ["--seq-len", "1024", *P4D, "--global-batch", "64"]
    named = run(capsys, "plan", "--model", "gpt2", *batch)["chosen"]
    monkeypatch.undo()
    config.save_pretrained(tmp_path)
    of_file = run(capsys, "plan", "--model", str(tmp_path), *batch)["chosen"]
    assert (named.pop("model"), of_file.pop("model")) == ("gpt2", tmp_path.name)
    assert named == of_file


def test_a_slip_in_a_name_of_the_catalog_asks_no_hub(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, float]] = []

    def model_info(self: object, name: str, *, timeout: float) -> None:
        asked.append((name, timeout))
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    batch = ["--seq-len", "1024", *P4D, "--global-batch", "64"]
    refused(capsys, ["plan", "--model", "lama-7b", *batch], "Did you mean llama-7b")
    assert asked == []
    refused(capsys, ["plan", "--model", "no-such-3b", *batch], "not reached: Name or service .* name its folder")
    assert asked == [("no-such-3b", 5.0)]


@pytest.mark.parametrize(("options", "length"), [([], "1024 tokens"), (["--seq-len", "256"], "256 tokens")])
def test_a_recipe_is_a_model(capsys: pytest.CaptureFixture[str], options: list[str], length: str) -> None:
    named = run(capsys, "plan", "--model", "gpt2-small", *options, *P4D, "--global-batch", "64")["chosen"]
    assert named["model"] == "gpt2-small"
    assert main(["estimate", "gpt2-small", *options, *P4D, "--micro-batch", "4"]) == 0
    estimated = capsys.readouterr().out
    assert "GPT2LMHeadModel, 0.124 B parameters" in estimated
    assert f"4 x {length}" in estimated
    with pytest.raises(MiCSError, match=r"reads images\. Leave out `--seq-len`"):
        recipe_model("wide_resnet-3b", 224)  # the catalog's in commands


def test_an_estimate_without_a_batch_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "llama-7b", "--cluster", "p4d.24xlarge"]) == 0
    total, rest = capsys.readouterr().out.splitlines()[-2:]
    assert total.endswith(" GB, plus activations, context and fragmentation")
    assert rest.endswith(" GB left for these")


def test_codecs_are_chosen_where_they_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    slow = [
        "--cluster",
        "g5.48xlarge",
        "--nodes",
        "2",
        "--model",
        "bert-1.5b",
        "--seq-len",
        "128",
        "--global-batch",
        "32",
    ]
    lossless, int8 = (run(capsys, "plan", *slow, "--codecs", codecs)["chosen"] for codecs in ("lossless", "int8"))
    assert (lossless["weight_codec"], lossless["grad_codec"]) == ("none", "none")
    assert int8["step_s"] < lossless["step_s"]
    assert "int8" in (int8["weight_codec"], int8["grad_codec"])


def test_a_configuration_of_transformers_is_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=1024, architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained(tmp_path / "mine")
    for source in (tmp_path / "mine", tmp_path / "mine" / "config.json"):
        found = run(
            capsys,
            "simulate",
            "--model",
            str(source),
            "--seq-len",
            "64",
            *P4D,
            "--global-batch",
            "16",
            "--micro-batch",
            "1",
            "--preset",
            "mics",
        )
        assert found["params"] == 8
        assert found["sent_bytes_by_axis"]["intra_node"] > 0
    refused(
        capsys,
        ["plan", "--model", str(tmp_path / "mine"), "--seq-len", "4096", *P4D, "--global-batch", "16"],
        "2048 positions",
    )


def test_a_function_of_ones_own_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    here = "tests.planner.test_plan_command"
    options = [*P4D, "--global-batch", "1600", "--micro-batch", "100", "--preset", "mics"]
    assert run(capsys, "simulate", "--model", f"{here}:net", *options)["model"] == "net"
    assert run(capsys, "simulate", "--model", f"{here}:tokens_net", "--seq-len", "16", *options)["model"] == "tokens"
    refused(capsys, ["plan", "--model", f"{here}:tokens_net", *P4D, "--global-batch", "16"], "Add `--seq-len`")
    refused(capsys, ["plan", "--model", f"{here}:net", "--seq-len", "4", *P4D, "--global-batch", "16"], "Leave out")
    refused(capsys, ["plan", "--model", f"{here}:nett", *P4D, "--global-batch", "16"], "Did you mean net")
    refused(capsys, ["plan", "--model", f"{here}:nothing", *P4D, "--global-batch", "16"], "not `\\(module, example\\)`")
    refused(capsys, ["plan", "--model", "no_such_module:net", *P4D, "--global-batch", "16"], "there is no module")


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"mics {arguments[0]}: ")
    assert captured.err.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(captured.err)


PLAN: dict[str, tuple[list[str], str]] = {
    "no such model": (["--model", "llama-7", *P4D, "--global-batch", "64"], "Did you mean llama-7b"),
    "no such recipe": (["--model", "gpt2-xxl", *P4D, "--global-batch", "64"], "Did you mean gpt2-xl"),
    "no such file": (["--model", "here/config.json", *P4D, "--global-batch", "64"], "does not exist"),
    "no such cluster": ([*LLAMA, "--cluster", "p4d", "--nodes", "2", "--global-batch", "64"], "Did you mean p4d"),
    "no such cluster, no nodes": ([*LLAMA, "--cluster", "p4d", "--global-batch", "64"], "Did you mean p4d"),
    "no file of a cluster": ([*LLAMA, "--cluster", "mine.yaml", "--global-batch", "64"], "no file with a cluster"),
    "no nodes": ([*LLAMA, "--cluster", "p4d.24xlarge", "--global-batch", "64"], "`--nodes` is missing"),
    "zero nodes": (
        [*LLAMA, "--cluster", "p4d.24xlarge", "--nodes", "0", "--global-batch", "64"],
        "`--nodes 0` is not a whole number of 1 or more. Use for example 16\\.\n",
    ),
    "zero tokens": (["--model", "llama-7b", "--seq-len", "0", *P4D, "--global-batch", "64"], "Use for example 2048"),
    "zero tokens of a batch": ([*LLAMA, *P4D, "--global-batch-tokens", "0"], "4M, which is 4,194,304"),
    "words for nodes": (
        [*LLAMA, "--cluster", "p4d.24xlarge", "--nodes", "two", "--global-batch", "64"],
        "`--nodes two`",
    ),
    "nothing trained": (
        ["--model", f"{__name__}:frozen", *P4D, "--global-batch", "64"],
        "Leave some to be trained",
    ),
    "no length": (["--model", "llama-7b", *P4D, "--global-batch", "64"], "Add `--seq-len`"),
    "length of images": (["--model", "wide_resnet-3b", "--seq-len", "8", *P4D, "--global-batch", "64"], "Leave out"),
    "tokens of images": (["--model", "wide_resnet-3b", *P4D, "--global-batch-tokens", "64"], "no sequences of tokens"),
    "too long": (["--model", "bert-10b", "--seq-len", "1024", *P4D, "--global-batch", "64"], "512 positions"),
    "no batch": ([*LLAMA, *P4D], "neither was given"),
    "two batches": ([*USUAL, "--global-batch-tokens", "4M"], "both were given"),
    "batch of 60": ([*LLAMA, *P4D, "--global-batch", "60"], "for example 48 or 64"),
    "exact tokens": ([*LLAMA, *P4D, "--global-batch-tokens", "70000"], "Use 65536 or 98304"),
    "few tokens": ([*LLAMA, *P4D, "--global-batch-tokens", "20k"], "Use 32768 or 65536"),
    "micro-batch": ([*USUAL, "--micro-batch", "3"], "does not divide the 4 samples"),
    "recompute": ([*USUAL, "--recompute", "maybe"], "`--recompute maybe` is not known"),
    "recompute more": ([*USUAL, "--recompute", "3/2"], "a share of layers as 1/2"),
    "dtype": ([*USUAL, "--param-dtype", "bfloat"], "Did you mean bfloat16"),
    "codecs": ([*USUAL, "--codecs", "int9"], "Did you mean int"),
    "too large": (["--model", "llama-65b", "--seq-len", "2048", *P4D, "--global-batch", "64"], "GB too many. To fit"),
}


@pytest.mark.parametrize(("arguments", "message"), PLAN.values(), ids=PLAN)
def test_wrong_options_of_plan_end_with_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, ["plan", *arguments], message)


SIMULATE: dict[str, tuple[list[str], str]] = {
    "no such preset": ([*USUAL, "--micro-batch", "1", "--preset", "zero"], "Did you mean zero"),
    "scopes twice": ([*STATED, "--params", "8"], "states one again"),
    "one scope": ([*USUAL, "--params", "8"], "`--grads`, `--optimizer` missing"),
    "codec alone": ([*USUAL, "--grad-codec", "int8"], "without scopes"),
    "no micro-batch": ([*USUAL, "--preset", "mics"], "Add for example `--micro-batch 1`"),
    "coarse optimizer": (
        [*USUAL, "--micro-batch", "1", "--params", "8", "--grads", "8", "--optimizer", "2"],
        "coarser",
    ),
    "secondary": ([*USUAL, "--micro-batch", "1", "--preset", "mics", "--secondary", "16"], "secondary_params"),
    "suffix": ([*STATED, "--picture", "step.txt"], "Use the suffix .png"),
    "folder": ([*STATED, "--trace", "nowhere/step.json"], "Make it first"),
}


@pytest.mark.parametrize(("arguments", "message"), SIMULATE.values(), ids=SIMULATE)
def test_wrong_options_of_simulate_end_with_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, ["simulate", *arguments], message)


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_kernels_are_those_of_trainings_unless_the_best_are_asked_for(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*USUAL, "--micro-batch", "1", "--recompute", "yes"]
    steps = [run(capsys, command, *options, *flags) for flags in ((), ("--best-kernels",))]
    sustained, best = (step["chosen"] if command == "plan" else step for step in steps)
    assert (sustained["sustained_efficiency"], best["sustained_efficiency"]) == (0.93, 1.0)
    assert best["compute_s"] == pytest.approx(0.93 * sustained["compute_s"])
    for flags, lines in (([], 1), (["--best-kernels"], 0)):
        assert main([command, *options, *flags]) == 0
        assert capsys.readouterr().out.count("kernels at 93% of their best speed: llm-foundry") == lines


def test_a_step_is_written_as_a_trace_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--trace", str(tmp_path / "step.json"), "--picture", str(tmp_path / "step.png")]
    answer = run(capsys, "simulate", *STATED, "--recompute", "yes", *files)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {"compute", "all_gather", "first_hop"}
    compute = [e for e in events if e["ph"] == "X" and e["cat"] != "collective"]
    assert sum(e["dur"] for e in compute) / 1e6 == pytest.approx(answer["step_s"])
    assert sum(answer["parts_s"].values()) == pytest.approx(answer["step_s"])
    assert sum(e["args"].get("sent_bytes", 0) for e in events if e["ph"] == "X") == sum(
        answer["sent_bytes_by_axis"].values()
    )
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_without_scopes_the_choice_of_the_planner_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = run(capsys, "plan", *USUAL)["chosen"]
    simulated = run(capsys, "simulate", *USUAL)
    assert {name: simulated[name] for name in chosen} == chosen


def test_what_does_not_fit_is_simulated_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *USUAL, "--micro-batch", "1", "--preset", "ddp"]) == 0
    assert "does NOT fit" in capsys.readouterr().out


def test_images_have_no_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "wide_resnet-3b", *P4D, "--global-batch", "64"]) == 0
    text = capsys.readouterr().out
    assert "samples/s" in text
    assert "tokens" not in text
