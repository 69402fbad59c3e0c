"""Which checkpoint a run continues, and what it says to signals."""

import os
import signal
import time
from pathlib import Path

import pytest

from recipes.config import TrainerConfig, load_recipe
from recipes.errors import RecipeError
from recipes.pretrain import main
from recipes.resume import checkpoint_path, checkpoint_to_resume, checkpoints_of
from recipes.signals import Request, SaveRequests, resume_command
from tests.ranks import RankContext, RankPool


def trainer(folder: Path, framework: str, **options: object) -> TrainerConfig:
    values = {"framework": framework, "output_dir": str(folder), "resume": "auto", "checkpoint_every_steps": 10}
    return TrainerConfig(**{**values, **options})


def save(config: TrainerConfig, step: int, *, is_folder: bool = False) -> Path:
    path = checkpoint_path(config, step)
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if is_folder else path.touch()
    return path


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_the_newest_checkpoint_is_continued(framework: str, tmp_path: Path):
    config = trainer(tmp_path, framework)
    assert checkpoint_to_resume(config, reads_folders=True) is None
    first, second = save(config, 9), save(config, 10)
    assert checkpoints_of(config) == [first, second]
    assert checkpoint_to_resume(config, reads_folders=True) == second
    folder = save(config, 11, is_folder=True).parent
    assert checkpoint_to_resume(config, reads_folders=True) == folder
    beginning = trainer(tmp_path, framework, resume="never", checkpoint_every_steps="never")
    assert checkpoint_to_resume(beginning, reads_folders=True) is None


def test_another_model_is_refused_before_the_files_of_a_run_are_replaced(tmp_path: Path):
    options = [f"--trainer.output_dir={tmp_path}", "--trainer.resume=auto", "--trainer.checkpoint_every_steps=10"]
    recipe = load_recipe(["--config=recipes/llama/debug.yaml", *options], has_cuda=False)
    (tmp_path / "config.yaml").write_text(recipe.to_yaml())
    save(recipe.trainer, 5)
    given = ["llama-debug", *options, "--dry-run"]
    main([*given, "--model.activation_checkpointing=true"])  # which changes no shape
    kept = (tmp_path / "config.yaml").read_text()
    message = rf"`model.hidden_size=128` was asked for, but the run in {tmp_path} has 64.*`--model.hidden_size=64`"
    with pytest.raises(SystemExit, match=message):
        main([*given[:-1], "--model.hidden_size=128"])
    assert (tmp_path / "config.yaml").read_text() == kept


@pytest.mark.parametrize(("framework", "other"), [("lightning", "accelerate"), ("accelerate", "lightning")])
def test_checkpoints_of_the_other_framework_are_refused(framework: str, other: str, tmp_path: Path):
    save(trainer(tmp_path, other), 5)
    message = rf"framework={framework}.*step=5.*{other}.*--trainer.framework={other}.*output_dir"
    with pytest.raises(RecipeError, match=message):
        checkpoint_to_resume(trainer(tmp_path, framework), reads_folders=True)
    save(trainer(tmp_path, framework), 6)
    with pytest.raises(RecipeError, match=message):
        checkpoint_to_resume(trainer(tmp_path, framework), reads_folders=True)
    with pytest.raises(RecipeError, match=r"new run.*--trainer.resume=auto"):
        checkpoint_to_resume(trainer(tmp_path, framework, resume="never"), reads_folders=True)


def test_sharded_checkpoints_are_refused_by_other_strategies(tmp_path: Path):
    save(trainer(tmp_path, "lightning"), 5, is_folder=True)
    with pytest.raises(RecipeError, match=r"step=5.*sharded.*`mics`.*--strategy.name=mics"):
        checkpoint_to_resume(trainer(tmp_path, "lightning"), reads_folders=False)


def test_signals_are_noted_and_agreed_on_once(capfd: pytest.CaptureFixture[str]):
    before = signal.getsignal(signal.SIGTERM)
    requests = SaveRequests(saves=True)
    requests.install()
    assert requests.agree(1) is Request.NONE
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    deadline_s = time.monotonic() + 5
    while capfd.readouterr().err.count("received") == 0 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert [requests.agree(2), requests.agree(3), requests.stopped_at] == [Request.STOP, Request.NONE, 2]
    requests.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigint_ends_a_run_like_sigterm_but_for_its_exit_code():
    codes = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        for saves in (True, False):
            requests = SaveRequests(saves=saves)
            requests.note(number)
            assert requests.agree(4) >= Request.STOP
            assert requests.stopped_at == 4
            codes[number.name, saves] = requests.exit_code
            assert requests.describe(requests.stopped_by, 4, ["a"]).startswith(f"{number.name}: ")
    assert codes == {
        ("SIGTERM", True): 0,
        ("SIGTERM", False): 143,
        ("SIGINT", True): 130,
        ("SIGINT", False): 130,
    }


def agree(ctx: RankContext) -> list[int]:
    requests = SaveRequests(saves=True)
    answers = [requests.agree(1)]
    if ctx.rank == 1:
        requests.note(signal.SIGUSR1)
    if ctx.rank == 2:
        requests.note(signal.SIGTERM)
    answers += [requests.agree(2), requests.agree(3)]
    requests.close()
    return [*map(int, answers), requests.stopped_at]


def test_all_ranks_agree_on_the_strongest_request_of_any(ranks: RankPool):
    assert ranks(4, agree) == [[0, 2, 0, 2]] * 4


def test_the_lines_say_what_was_done_and_how_to_continue():
    saving, silent = SaveRequests(saves=True), SaveRequests(saves=False)
    arguments = ["--config=my runs/a.yaml", "--trainer.resume=never", "--ci"]
    assert saving.describe(Request.SAVE, 7) == "SIGUSR1: checkpoint after step 7"
    line = saving.describe(Request.STOP, 7, arguments)
    assert line.endswith("Continue with: mics pretrain '--config=my runs/a.yaml' --ci --trainer.resume=auto")
    assert "nothing is saved" in silent.describe(Request.STOP, 7, arguments)
    assert "(a number of steps would save); the run goes on" in silent.describe(Request.SAVE, 7)
    assert resume_command(["llama-7b"]) == "mics pretrain llama-7b --trainer.resume=auto"
    assert resume_command(["a.yaml", "--trainer.resume", "never", "--ci"]) == (
        "mics pretrain a.yaml --ci --trainer.resume=auto"
    )
