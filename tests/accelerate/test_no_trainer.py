"""Do scripts without a Trainer, as Hugging Face documents them, train and save as with DDP, and stay as they are?"""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from accelerate import PartialState
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

from mics_strategy import CheckpointError, LifecycleError
from mics_strategy.launch_file import default_answers, launch_line, write_launch_file
from tests.accelerate import no_trainer
from tests.accelerate.launchers import launched, sent, written
from tests.accelerate.runs import accelerator, assert_same, run, values
from tests.ranks import RankContext, RankPool

CLASSES = {"nlp_example": AutoModelForSequenceClassification, "no_trainer": AutoModelForMaskedLM}


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    folder = tmp_path / "pretrained"
    no_trainer.write_pretrained(folder)
    return folder


def in_process(ctx: RankContext, *arguments: str) -> None:
    with mock.patch.object(PartialState, "destroy_process_group"):
        no_trainer.main(arguments)


def saved(name: str, folder: Path) -> tuple[str, list[float], dict[str, Tensor]]:
    """Whose Accelerator it was, what was seen, and the weights that `from_pretrained` reads."""
    results: dict[str, Any] = json.loads((folder / "all_results.json").read_text())
    return results["class"], results["seen"], CLASSES[name].from_pretrained(folder).state_dict()


def assert_as_with_ddp(name: str, folder: Path, expected: Path) -> None:
    kind, seen, weights = saved(name, folder)
    stock, expected_seen, expected_weights = saved(name, expected)
    assert (kind, stock) == ("MiCSAccelerator", "Accelerator")
    assert seen == pytest.approx(expected_seen, rel=1e-5)
    assert_same(weights, expected_weights, 1e-5)


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_a_script_without_a_trainer_stays_as_it_is(
    ranks: RankPool, tmp_path: Path, pretrained: Path, name: str
) -> None:
    arguments = (name, "--model_name_or_path", str(pretrained), "--output_dir")
    run(ranks, 2, in_process, *arguments, str(tmp_path / "ddp"))
    file, answers = tmp_path / "mics.yaml", default_answers()
    write_launch_file(file, answers)
    setting, *command, _ = launch_line(file, answers).split()
    variable, _, value = setting.partition("=")
    script = Path(no_trainer.__file__)
    code, text = launched(tmp_path, *command, script, *arguments, tmp_path / "ours", **{variable: value})
    assert code == 0, text
    assert_as_with_ddp(name, tmp_path / "ours", tmp_path / "ddp")


@pytest.mark.parametrize("preset", ["mics", "zero3"])
def test_dropout_is_that_of_ddp_where_one_rank_has_read_the_weights(
    ranks: RankPool, tmp_path: Path, pretrained: Path, preset: str
) -> None:
    arguments = ("no_trainer", "--model_name_or_path", str(pretrained), "--output_dir")
    run(ranks, 4, in_process, *arguments, str(tmp_path / "ddp"), ranks_per_node=2)
    more = f"  fsdp_cpu_ram_efficient_loading: true\n  fsdp_sharding_strategy: {preset}"
    env = sent("--config_file", written(tmp_path, more))
    run(ranks, 4, in_process, *arguments, str(tmp_path / "ours"), env=env, ranks_per_node=2)
    assert_as_with_ddp("no_trainer", tmp_path / "ours", tmp_path / "ddp")
    assert AutoModel.from_pretrained(tmp_path / "ours").config.hidden_dropout_prob > 0


def with_adapter(ctx: RankContext, pretrained: str) -> None:
    """An adapter, and the model inside of it, saved on all ranks; and what is refused."""
    acc = accelerator("zero3")
    plain = AutoModel.from_pretrained(pretrained)
    model = get_peft_model(plain, LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
    model = acc.prepare(model)
    main = {"is_main_process": acc.is_main_process, "save_function": acc.save}
    unwrapped = acc.unwrap_model(model)
    unwrapped.save_pretrained("adapter", **main)
    expected = values(model)
    found = PeftModel.from_pretrained(AutoModel.from_pretrained(pretrained), "adapter")
    loaded = {name.replace(".default", ""): value.detach() for name, value in found.named_parameters()}
    assert_same(loaded, {name.replace(".default", ""): value for name, value in expected.items()}, 0.0)
    with pytest.raises(LifecycleError, match=r"accelerator\.get_state_dict\(model\)"):
        unwrapped.save_pretrained("shards")
    with pytest.raises(CheckpointError, match=r"is_main_process=accelerator\.is_main_process.*found on rank 1"):
        unwrapped.save_pretrained("adapter", is_main_process=True)


def test_an_adapter_is_saved_where_all_ranks_call(ranks: RankPool, pretrained: Path) -> None:
    run(ranks, 2, with_adapter, str(pretrained))
