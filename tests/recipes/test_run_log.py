"""The log of a run: its files, its lines, and what it does not wait for. Both loops."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import loggers
from recipes.config import load_recipe
from recipes.errors import RecipeError
from recipes.metrics import MetricsLog
from recipes.metrics_files import MetricsFiles, read_rows
from recipes.pretrain import pretrain
from recipes.progress import Bar, Lines
from tests.recipes.host_reads import HostReads
from tests.recipes.short_runs import DEBUG, run_debug_recipe

FRAMEWORKS = ("lightning", "accelerate")
QUIET = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
TRAINING = ["step", "loss", "grad_norm", "lr", "samples", "tokens", "peak_host_bytes"]
RATES = ["step_s", "samples_per_s", "tokens_per_s", "tokens_per_s_per_rank", "model_tflop_per_s_per_rank"]
MFU = ["mfu", "mfu_megatron"]


def csv_rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open() as file:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def same_rows(folder: Path) -> list[dict[str, float]]:
    rows = read_rows(folder / "metrics.jsonl")
    assert csv_rows(folder) == rows
    return rows


@QUIET
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_both_files_hold_the_rows_of_the_run(framework: str, cache_dir: Path, tmp_path: Path):
    output = run_debug_recipe(tmp_path, cache_dir, "--trainer.peak_tflop_per_s=100", framework=framework)
    rows = same_rows(tmp_path)
    assert [row["step"] for row in rows if "loss" in row] == [1, 3, 6, 7]
    assert [row["step"] for row in rows if "validation_loss" in row] == [0, 7]
    first, second = [row for row in rows if "loss" in row][:2]
    assert [*first] == TRAINING
    assert {*second} == {*TRAINING, *RATES, *MFU}
    assert second["tokens"] == 3 * 8 * 64
    for row in rows:
        number = f"{row.get('loss', row.get('validation_loss')):.3f}"
        assert re.search(rf"^step {row['step']}/7 \| .*loss {number}", output, flags=re.MULTILINE)


@QUIET
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_waits_for_the_device_between_logged_steps(
    framework: str, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reads, counts = HostReads(), {}
    update, end = torch.optim.AdamW.step, MetricsLog.on_train_batch_end

    def without_counting(*args: Any, **kwargs: Any) -> Any:  # AdamW's own step counters are on the host
        reads.is_paused = True
        update(*args, **kwargs)
        reads.is_paused = False

    def record(log: MetricsLog, trainer: Any, *args: Any) -> None:
        end(log, trainer, *args)
        counts[trainer.global_step] = reads.count

    monkeypatch.setattr(torch.optim.AdamW, "step", without_counting)
    monkeypatch.setattr(MetricsLog, "on_train_batch_end", record)
    with reads:
        run_debug_recipe(tmp_path, cache_dir, "--data.validation_sequences=0", framework=framework)
    new_reads = {step: counts[step] - counts[step - 1] for step in range(2, 8)}
    assert {step for step, count in new_reads.items() if count} == {3, 6, 7}


@QUIET
def test_a_run_that_continues_takes_no_step_twice(cache_dir: Path, tmp_path: Path):
    writing = ("--trainer.checkpoint_every_steps=3", "--trainer.resume=auto")
    run_debug_recipe(tmp_path, cache_dir, *writing)
    (tmp_path / "checkpoints" / "step=7.ckpt").unlink()
    whole = same_rows(tmp_path)
    stale = {"step": 9, "loss": 0.0, "column": 1.0}
    MetricsFiles(tmp_path, 7).append(stale)
    assert same_rows(tmp_path)[-1] == stale
    run_debug_recipe(tmp_path, cache_dir, *writing)
    rows = same_rows(tmp_path)
    assert [row["step"] for row in rows if "loss" in row] == [1, 3, 6, 7]
    assert [row for row in rows if row["step"] <= 6] == [row for row in whole if row["step"] <= 6]
    assert rows[-2]["loss"] == pytest.approx(whole[-2]["loss"], rel=1e-5)
    assert "column" not in (tmp_path / "metrics.csv").read_text()


def test_columns_may_appear_later(tmp_path: Path):
    files = MetricsFiles(tmp_path, 0)
    files.append({"step": 1, "loss": 2.0})
    files.append({"step": 2, "loss": 1.5, "mfu": 0.4})
    files.append({"step": 3, "loss": 1.25})
    assert (tmp_path / "metrics.csv").read_text() == "step,loss,mfu\n1,2.0,\n2,1.5,0.4\n3,1.25,\n"
    assert same_rows(tmp_path) == files.rows


def test_a_row_that_exists_is_replaced(tmp_path: Path):
    files = MetricsFiles(tmp_path, 0)
    for row in ({"step": 2, "loss": 2.0}, {"step": 2, "validation_loss": 3.0}, {"step": 2, "validation_loss": 2.5}):
        files.append(row)
    assert same_rows(tmp_path) == [{"step": 2, "loss": 2.0}, {"step": 2, "validation_loss": 2.5}]


def test_a_line_cut_by_a_kill_is_dropped(tmp_path: Path):
    MetricsFiles(tmp_path, 0).append({"step": 2, "loss": 2.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert MetricsFiles(tmp_path, 4).rows == [{"step": 2, "loss": 2.0}]
    assert same_rows(tmp_path) == [{"step": 2, "loss": 2.0}]


@pytest.mark.parametrize("line", ["loss 2.0", "[1, 2]", '{"loss": 2.0}', ""], ids=["text", "list", "no step", "empty"])
def test_a_file_that_is_no_log_is_refused(line: str, tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(RecipeError, match=r"Line 2 of .*metrics.jsonl.*Restore the file, or delete it"):
        MetricsFiles(tmp_path, 1)
    assert MetricsFiles(tmp_path, 0).rows == []  # a run from the beginning does not read it


def test_losses_that_are_no_numbers_stay_so(tmp_path: Path):
    MetricsFiles(tmp_path, 0).append({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    assert (tmp_path / "metrics.csv").read_text().endswith("1,nan,inf\n")
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["grad_norm"] == float("inf")


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_refused_before_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loggers, "_PACKAGES", {name: ("no_such_package",)})
    given = [f"--config={DEBUG}", f"--trainer.loggers=[{name}]", f"--trainer.output_dir={tmp_path}"]
    with pytest.raises(RecipeError, match=rf"`trainer.loggers` has {name}.*pip install {name}.*loggers=\[\]"):
        pretrain(load_recipe(given, has_cuda=False))
    assert list(tmp_path.iterdir()) == []


class FakeLogger:
    """Remembers its options and calls."""

    made: list["FakeLogger"]

    def __init__(self, *args: Any, **options: Any) -> None:
        self.options, self.calls = options, []
        FakeLogger.made.append(self)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))


@QUIET
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_loggers_receive_every_row(framework: str, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    FakeLogger.made = []
    for name in ("TensorBoardLogger", "WandbLogger"):
        monkeypatch.setattr(f"lightning.pytorch.loggers.{name}", FakeLogger)
    monkeypatch.setattr(loggers, "check_loggers", lambda names: None)
    monkeypatch.setattr("recipes.pretrain.check_loggers", lambda names: None)
    run_debug_recipe(tmp_path, cache_dir, "--trainer.loggers=[tensorboard,wandb]", framework=framework)
    rows = [
        ({k: v for k, v in row.items() if k != "step"}, row["step"]) for row in read_rows(tmp_path / "metrics.jsonl")
    ]
    board, weights = FakeLogger.made
    assert board.options["purge_step"] == 0
    assert [call[1:] for call in board.calls if call[0] == "log_metrics"] == rows
    assert [call[1:] for call in weights.calls if call[0] == "log_metrics"] == rows
    assert (board.calls[-1], weights.calls[-1]) == (("finalize", "success"),) * 2
    assert weights.calls[0][1]["trainer"]["max_steps"] == 7
    assert weights.options["id"] == (tmp_path / "wandb_run_id").read_text().strip()


def test_a_continued_run_continues_its_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    FakeLogger.made = []
    for name in ("TensorBoardLogger", "WandbLogger"):
        monkeypatch.setattr(f"lightning.pytorch.loggers.{name}", FakeLogger)
    run = loggers.Loggers(("tensorboard", "wandb"), tmp_path, "name", {})
    for start_step in (0, 40, 0):
        run.begin(start_step)
        run.end("failed")
    assert [made.options["purge_step"] for made in FakeLogger.made[::2]] == [0, 41, 0]
    ids = [made.options["id"] for made in FakeLogger.made[1::2]]
    assert (ids[0] == ids[1], ids[1] == ids[2]) == (True, False)


def test_a_bar_is_drawn_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from recipes import progress

    assert isinstance(progress.training_progress(9), Lines)
    monkeypatch.setattr(progress, "is_terminal", lambda: True)
    bar = progress.training_progress(9)
    assert isinstance(bar, Bar)
    bar.advance(1)
    bar.log(1, "loss 2.000")
    bar.advance(9)
    bar.end()
    output = capsys.readouterr().out
    assert "step 1/9 | loss 2.000" in output
    assert "9/9" in output


def test_the_guide_has_every_column(repository: Path):
    table = (repository / "docs" / "runs.md").read_text().split("## The log")[1].split("\n## ")[0]
    names = {name for cell in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE) for name in cell.split("`")[1::2]}
    paper = {"paper_tflop_per_s_per_rank", "peak_memory_bytes", "validation_loss", "bits_per_byte"}
    assert names == {*TRAINING, *RATES, *MFU, *paper}
