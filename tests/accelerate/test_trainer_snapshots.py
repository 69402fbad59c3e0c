"""Does `transformers.Trainer` continue from its snapshot in host memory as if it had not been interrupted?"""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from mics_strategy import CheckpointError, ConfigError, MemorySnapshots
from mics_strategy.accelerate import framework
from mics_strategy.snapshots import job
from tests.accelerate.launchers import ended, started, written
from tests.accelerate.runs import accelerator, assert_same, run
from tests.accelerate.trainer_runs import FULL, SHARDED, arguments, launched, llama, logs, trainer, values
from tests.ranks import RankContext, RankPool, raises_on_every_rank

NUM_STEPS, EVERY = 6, 2  # three steps in each epoch
DROPPING = {"attention_dropout": 0.2, "attn_implementation": "eager"}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}
Outcome = tuple[list[dict[str, float]], dict[str, Tensor], list[int]]


class Notes(TrainerCallback, ExportableState):
    """The steps that were run. It may raise in front of a step, or at the end."""

    trainer: Trainer

    def __init__(self, dies_at: int | None = None) -> None:
        self.dies_at = dies_at
        self.steps: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._die(state.global_step)
        self.steps.append(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._die(state.global_step)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"args": {}, "attributes": {"num_run": len(self.steps)}}

    def _die(self, step: int) -> None:
        if step == self.dies_at:
            self.trainer.accelerator.trainer_snapshots._snapshots.finish()
            raise RuntimeError("of a script")


def trained(
    folder: str, recovery: Any, dies_at: int | None = None, *, preset: str = "mics", kind: str = SHARDED, **options: Any
) -> Outcome:
    """Logs, parameters, and the steps that were run."""
    notes, resume = Notes(dies_at), options.pop("resume", None)
    fields = {"preset": preset, **options.pop("fields", {})} | ({} if recovery is None else {"recovery": recovery})
    with launched(fields, state_dict_type=kind):
        made = trainer(llama(**DROPPING), arguments(folder, **{**EVALUATING, **options}), callbacks=[notes])
        notes.trainer = made
        made.train(resume_from_checkpoint=resume)
        assert "_maybe_log_save_evaluate" not in vars(made)
        found = [*logs(made)[:-1], {"total_flos": made.state.total_flos}]  # the last entry has means of this run alone
        return found, values(made.model), notes.steps


def die_and_continue(ctx: RankContext, folder: str, dies_at: int, options: dict[str, Any]) -> Any:
    recovery = {"every": EVERY, "job": "a-job", "folder": folder}
    whole = trained("whole", None, **options)
    with pytest.raises(RuntimeError, match="of a script"):
        trained("dies", recovery, dies_at, **options)
    continued = trained("dies", recovery, resume="no such folder", **options)
    again = trained("again", recovery, **options)
    dist.barrier()
    return whole, continued, again, [str(path) for path in Path(folder).glob("mics_strategy-*/*")]


@pytest.mark.parametrize(
    ("dies_at", "options"),
    [
        (5, {"preset": "mics"}),
        (5, {"preset": "zero3", "kind": FULL, "bf16": True}),
        (3, {"preset": "zero1", "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}),
        (NUM_STEPS, {"preset": "mics", "fields": {"second_hop": "delayed"}}),
        (4, {"preset": "paro-nig", "eval_strategy": "epoch", "gradient_accumulation_steps": 1}),
    ],
)
def test_a_training_continues_as_if_it_had_not_been_interrupted(
    ranks: RankPool, tmp_path: Path, dies_at: int, options: dict[str, Any]
) -> None:
    """Losses with dropout, evaluations, the schedule, the log; and the end of a training leaves no snapshot."""
    for whole, continued, again, left in run(
        ranks, 4, die_and_continue, str(tmp_path), dies_at, options, ranks_per_node=2
    ):
        assert continued[2] == whole[2][dies_at // EVERY * EVERY :]
        assert continued[0] == whole[0]
        assert_same(continued[1], whole[1], 0.0)
        assert again[2] == whole[2]
        assert_same(again[1], whole[1], 0.0)
        assert left == []


def evaluated_at_the_end_of_an_epoch(ctx: RankContext, folder: str) -> Any:
    """A snapshot of every step, of which one ends an epoch."""
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    whole = trained("whole", None, **options)
    recovery = {"every": 1, "job": "a-job", "folder": folder}
    with pytest.raises(RuntimeError, match="of a script"):
        trained("dies", recovery, 3, **options)
    return whole, trained("dies", recovery, **options)


def test_the_last_step_of_an_epoch_counts_behind_its_evaluation(ranks: RankPool, tmp_path: Path) -> None:
    for whole, continued in run(ranks, 2, evaluated_at_the_end_of_an_epoch, str(tmp_path)):
        assert continued[2] == [3, 4, 5]
        assert continued[0] == whole[0]
        assert_same(continued[1], whole[1], 0.0)


def two_trainings(ctx: RankContext, folder: str) -> Any:
    """Of a script that dies in the second, and begins again with the first."""
    recovery = {"every": 1, "job": "a-job", "folder": folder}
    first = trained("first", recovery)
    with pytest.raises(RuntimeError, match="of a script"):
        trained("second", recovery, 3)
    job._num_ended.clear()  # the script is started again
    return first, trained("first", recovery), trained("second", recovery)


def test_the_first_of_two_trainings_does_not_continue_from_the_second(ranks: RankPool, tmp_path: Path) -> None:
    for first, again, second in run(ranks, 2, two_trainings, str(tmp_path)):
        assert again[2] == first[2] == [0, 1, 2, 3, 4, 5]
        assert second[2] == [3, 4, 5]
        assert_same(again[1], first[1], 0.0)


class Compares(Notes):
    """What a snapshot would hold with the files of the checkpoint that was just written."""

    found: Any = None
    flos_of_one_step = 0.0  # which nothing has logged or saved

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.flos_of_one_step = json.loads(framework.checkpoint_state(self.trainer)["trainer"])["total_flos"]
        if state.global_step == 2:
            self.found = framework.checkpoint_state(self.trainer)
        super().on_step_begin(args, state, control)


def beside_the_own_checkpoint(ctx: RankContext) -> Any:
    with launched("mics"):
        compares = Compares()
        saving = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 100}
        made = trainer(llama(), arguments("out", **saving), callbacks=[compares])
        compares.trainer = made
        made.train()
    dist.barrier()
    own = json.loads(compares.found["trainer"])
    assert 2 * compares.flos_of_one_step == own["total_flos"] > 0
    saved = json.loads(Path("out/checkpoint-2/trainer_state.json").read_text())
    for state in (own, saved):
        del state["stateful_callbacks"]["TrainerControl"]  # between two events
    return own, saved, compares.found["scheduler"], torch.load("out/checkpoint-2/scheduler.pt")


def test_a_snapshot_holds_what_the_trainers_own_checkpoint_holds(ranks: RankPool) -> None:
    own, saved, scheduler, saved_scheduler = run(ranks, 2, beside_the_own_checkpoint)[0]
    assert own == saved
    assert own["stateful_callbacks"]["Compares"]["attributes"] == {"num_run": 2}
    assert scheduler == saved_scheduler


def other_ranks(ctx: RankContext, folder: str, dies_at: int | None) -> Outcome:
    """Steps of the same sequences, by any number of ranks."""
    notes = Notes(dies_at)
    with launched({"preset": "zero3", "recovery": {"every": EVERY, "job": "a-job", "folder": folder}}):
        args = arguments("out", gradient_accumulation_steps=4 // ctx.world_size)
        made = trainer(llama(), args, num=40, callbacks=[notes])
        notes.trainer = made
        with nullcontext() if dies_at is None else pytest.raises(RuntimeError, match="of a script"):
            made.train()
        return logs(made), values(made.model), notes.steps


def test_fewer_ranks_continue(ranks: RankPool, tmp_path: Path) -> None:
    expected = run(ranks, 4, other_ranks, str(tmp_path), None)[0]
    run(ranks, 4, other_ranks, str(tmp_path), 5)
    found = run(ranks, 2, other_ranks, str(tmp_path), None)[0]
    assert found[2] == expected[2][4:]
    assert_same(found[1], expected[1], 1e-5)


def refused(ctx: RankContext, name: str, folder: str) -> None:
    recovery = {"every": 1, "job": "a-job", "folder": folder}
    if name == "another word":
        with launched({"preset": "mics", "recovery": "disk"}):
            trainer(llama(), arguments("out"))
    elif name == "another batch size":
        with launched({"preset": "mics", "recovery": recovery}):
            trainer(llama(), arguments("out", auto_find_batch_size=True)).train()
    else:
        acc: Any = accelerator("mics", recovery=recovery)
        model = nn.Linear(4, 4)
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters()))
        acc.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another word", "`recovery='disk'` is not supported"),
        ("another batch size", "auto_find_batch_size"),
        ("an own loop", "MemorySnapshots.*in the loop"),
    ],
)
def test_what_takes_no_snapshots_is_refused_on_every_rank(
    ranks: RankPool, tmp_path: Path, name: str, words: str
) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, refused, name, str(tmp_path)), ConfigError, words)


def after_another_script(ctx: RankContext, folder: str) -> None:
    acc: Any = accelerator("mics")
    model = nn.Linear(4, 4)
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters()))
    snapshots = MemorySnapshots(acc.sharded_of(model), [optimizer.optimizer], every=1, job="a-job", folder=folder)
    snapshots.after_step({"step": 1})
    snapshots.close(keep=True)
    trained("out", {"every": 1, "job": "a-job", "folder": folder})


def test_snapshots_of_another_kind_of_script_are_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    words = "not taken by `transformers.Trainer`"
    raises_on_every_rank(lambda: run(ranks, 2, after_another_script, str(tmp_path)), CheckpointError, words)


@pytest.mark.slow
@pytest.mark.weekly  # launchers wait for one another; tests/snapshots/test_torchrun.py is of each commit
def test_a_script_that_the_launcher_starts_again_continues(tmp_path: Path) -> None:
    results = {}
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        file = written(folder, "  fsdp_sharding_strategy: {preset: zero3, recovery: {every: 1}}\n")
        options = ["--config_file", file, "--max_restarts", 1, "--rdzv_backend", "c10d"]
        launcher = started(
            folder,
            *("accelerate", "launch", *options, "-m", "tests.accelerate.trainer_script", folder, name),
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )
        code, text = ended(launcher)
        assert code == 0, text[-3000:]
        assert bool(re.search("the newest is of step [34]", text)) == (name == "killed")
        results[name] = torch.load(folder / "trained.pt")
    assert results["killed"][0] == results["whole"][0]
    assert_same(results["killed"][1], results["whole"][1], 0.0)
