"""Does `save_state` keep everything, and does `load_state` bring it back on any ranks, or refuse what is damaged?"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration, set_seed
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from mics_strategy.errors import CheckpointError
from tests.accelerate.runs import PLAIN, accelerator, assert_same, full, run, values
from tests.accelerate.test_training import adamw, loss_of, transformer
from tests.ranks import RankContext, RankPool, raises_on_every_rank

FORMS = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]


class Counter:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Run:
    """Everything that a script has: model, optimizer, data, schedule, scaler, an object."""

    def __init__(self, config: str, **options: Any) -> None:
        self.acc = accelerator(config, **options)
        self.acc.scaler, self.acc.native_amp = GradScaler("cpu", init_scale=2.0**7, growth_interval=3), True
        model = transformer()
        optimizer = adamw(model)
        schedule = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        tokens = torch.randint(0, 29, (48, 6), generator=torch.Generator().manual_seed(3))
        data = DataLoader(TensorDataset(tokens), batch_size=2)
        self.model, self.optimizer, self.data, self.schedule = self.acc.prepare(model, optimizer, data, schedule)
        self.batches = [tokens for (tokens,) in self.data]  # making them draws a random number
        self.counter = Counter()
        self.acc.register_for_checkpointing(self.counter)

    def step(self, tokens: Tensor) -> float:
        noise = torch.rand(()).item() + random.random()
        loss = loss_of(self.model, tokens)
        self.acc.backward(loss * (1 + 0.1 * noise))
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.counter.count += 1
        return loss.item()

    def steps(self, first: int, last: int) -> list[float]:
        """Steps number `first` to before `last` of the epoch."""
        return [self.step(tokens) for tokens in self.batches[first:last]]

    def end(self) -> dict[str, Any]:
        """All that a resume shall bring back."""
        inner = self.optimizer.optimizer
        states = [{key: full(value) for key, value in sorted(state.items())} for state in inner.state.values()]
        return {
            "values": values(self.acc.unwrap_model(self.model)),
            "states": states,
            "lr": self.schedule.get_last_lr(),
            "scale": self.acc.scaler.state_dict(),
            "count": self.counter.count,
        }


def assert_same_end(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    """Equal in all that a resume brings back."""
    assert_same(found["values"], expected["values"], tolerance)
    for own, other in zip(found["states"], expected["states"], strict=True):
        assert_same(own, other, tolerance)
    for name in ("lr", "scale", "count"):
        assert found[name] == expected[name]


def uninterrupted(ctx: RankContext, config: str, form: str, folder: str) -> dict[str, Any]:
    """Three steps, a save, three more steps."""
    job = Run(config, state_dict_type=form)
    set_seed(5, device_specific=True)
    job.steps(0, 3)
    job.acc.save_state(folder)
    saved = job.end()
    losses, done = job.steps(3, 6), job.acc.sharded_of(job.model).steps_done
    return {"losses": losses, "end": job.end(), "saved": saved, "steps": done}


def resumed(ctx: RankContext, config: str, form: str, folder: str) -> dict[str, Any]:
    """A run that starts elsewhere, loads, and goes on."""
    job = Run(config, state_dict_type=form)
    set_seed(99, device_specific=True)
    job.steps(0, 1)
    job.acc.load_state(folder)
    saved = job.end()
    losses, done = job.steps(3, 6), job.acc.sharded_of(job.model).steps_done
    return {"losses": losses, "end": job.end(), "saved": saved, "steps": done}


@pytest.mark.wide(every=3)
@pytest.mark.parametrize(
    ("config", "form"), [("mics", FORMS[0]), ("mics", FORMS[1]), ("zero3", FORMS[1]), ("zero1", FORMS[0])]
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    ranks: RankPool, tmp_path: Path, config: str, form: str
) -> None:
    folder = str(tmp_path / "state")
    expected = run(ranks, 4, uninterrupted, config, form, folder, ranks_per_node=2)
    found = run(ranks, 4, resumed, config, form, folder, ranks_per_node=2)
    for own, other in zip(found, expected, strict=True):
        assert_same_end(own["saved"], other["saved"])
        assert own["losses"] == other["losses"]
        assert own["steps"] == other["steps"] == 6
        assert_same_end(own["end"], other["end"])


def loaded(ctx: RankContext, config: str, form: str, folder: str) -> dict[str, Any]:
    job = Run(config, state_dict_type=form)
    job.acc.load_state(folder)
    return job.end()


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("form", FORMS)
def test_other_ranks_scopes_and_forms_load_what_was_saved(ranks: RankPool, tmp_path: Path, form: str) -> None:
    folder = str(tmp_path / "state")
    expected = run(ranks, 4, uninterrupted, "mics", form, folder, ranks_per_node=2)[0]["saved"]
    for world_size, config, other in [(2, "zero3", FORMS[0]), (1, "mics", FORMS[1]), (4, "zero1", FORMS[0])]:
        for found in run(ranks, world_size, loaded, config, other, folder):
            assert_same_end(found, expected)


def saved_twice(ctx: RankContext, folder: str) -> list[str]:
    """Another checkpoint of the same name, in whose folder somebody has put a file."""
    job = Run("mics")
    job.acc.save_state(folder)
    ctx_file = Path(folder, "notes.txt")
    if ctx.rank == 0:
        ctx_file.write_text("mine")
    job.acc.wait_for_everyone()
    job.steps(0, 1)
    job.acc.save_state(folder)
    job.acc.load_state(folder)
    assert job.acc.sharded_of(job.model).steps_done == 1
    return sorted(entry.name for entry in Path(folder).iterdir())


def test_saving_again_replaces_the_checkpoint_and_keeps_files_of_others(ranks: RankPool, tmp_path: Path) -> None:
    names = run(ranks, 2, saved_twice, str(tmp_path / "state"))[0]
    assert "notes.txt" in names
    assert (tmp_path / "state" / "notes.txt").read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def saved_among_others(ctx: RankContext, folder: str) -> int:
    job = Run("mics")
    job.steps(0, 2)
    job.acc.save_state(folder)
    job.steps(2, 3)
    job.acc.load_state(folder)
    return job.acc.sharded_of(job.model).steps_done


def test_a_folder_with_other_things_is_saved_into_and_nothing_is_lost(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("loss 1.0")
    assert run(ranks, 2, saved_among_others, str(tmp_path)) == [2, 2]
    assert (tmp_path / "log.txt").read_text() == "loss 1.0"


def hooks_called(ctx: RankContext, folder: str) -> list[str]:
    job, restored = Run("mics"), []

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        assert models == [job.model]
        Path(output_dir, f"hook_{ctx.rank}.txt").write_text("saved")

    def load_hook(models: list[Any], input_dir: str) -> None:
        restored.append(Path(input_dir, f"hook_{ctx.rank}.txt").read_text())

    job.acc.register_save_state_pre_hook(save)
    job.acc.register_load_state_pre_hook(load_hook)
    job.acc.load_state(job.acc.save_state(folder))
    return restored


def test_hooks_write_into_the_checkpoint_and_read_from_it(ranks: RankPool, tmp_path: Path) -> None:
    assert run(ranks, 2, hooks_called, str(tmp_path / "state")) == [["saved"], ["saved"]]
    manifest = json.loads((tmp_path / "state" / "manifest.json").read_text())
    assert {"hook_0.txt", "hook_1.txt"} <= set(manifest["files"])


def numbered(ctx: RankContext, folder: str) -> dict[str, Any]:
    """The project names its checkpoints, and keeps two."""
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    job = Run("mics", accelerator_project_config=project)
    for step in range(4):
        job.steps(step, step + 1)
        job.acc.save_state()
    names = sorted(entry.name for entry in Path(folder, "checkpoints").iterdir())
    job.acc.wait_for_everyone()
    if ctx.rank == 0:
        shard = next(Path(folder, "checkpoints", "checkpoint_3", "optimizer_0").glob("*.distcp"))
        Path(folder, "checkpoints", "checkpoint_3", "scheduler.bin").write_bytes(b"damaged")
        assert shard.exists()
    job.acc.wait_for_everyone()
    job.acc.load_state()
    return {"names": names, "step": job.acc.sharded_of(job.model).steps_done}


def test_numbered_checkpoints_are_limited_and_the_newest_whole_one_is_loaded(ranks: RankPool, tmp_path: Path) -> None:
    for found in run(ranks, 2, numbered, str(tmp_path)):
        assert found == {"names": ["checkpoint_2", "checkpoint_3"], "step": 3}


class Average:
    """Of the weights of a sharded model, without a copy of the whole."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        return self.kept

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            self.kept[name].copy_(value)


def averaged(ctx: RankContext, folder: str) -> None:
    job = Run("mics")
    job.steps(0, 1)
    average = Average(job.acc.unwrap_model(job.model))
    job.acc.register_for_checkpointing(average)
    job.acc.save_state(folder)
    expected = {name: full(value).clone() for name, value in average.kept.items()}
    for value in average.kept.values():
        value.zero_()
    job.acc.load_state(folder)
    assert_same({name: full(value) for name, value in average.kept.items()}, expected, 0.0)


def test_sharded_tensors_of_registered_objects_are_saved_whole(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, 2, averaged, str(tmp_path / "state"))


class FailsToSave(Counter):
    """Raises on one rank when it is saved."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def state_dict(self) -> dict[str, int]:
        if self.fails:
            raise OSError("disk full")
        return super().state_dict()


def one_rank_fails(ctx: RankContext, folder: str) -> tuple[str, int]:
    job = Run("mics")
    job.steps(0, 1)
    job.acc.save_state(folder)
    job.steps(1, 2)
    job.acc._custom_objects[0] = FailsToSave(ctx.rank == 0)
    try:
        job.acc.save_state(folder)
    except (CheckpointError, OSError) as error:
        message = f"{type(error).__name__}: {error}"
    job.acc._custom_objects[0] = Counter()
    job.acc.load_state(folder)
    return message, job.acc.sharded_of(job.model).steps_done


def test_a_failure_on_one_rank_is_raised_on_all_and_the_older_checkpoint_stays(ranks: RankPool, tmp_path: Path) -> None:
    found = run(ranks, 2, one_rank_fails, str(tmp_path / "state"))
    assert found[0] == ("OSError: disk full", 1)
    assert found[1][0] == "CheckpointError: OSError: disk full (found on rank 0)"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def damaged(ctx: RankContext, folder: str, what: str) -> None:
    job = Run("mics")
    job.acc.save_state(folder)
    if ctx.rank == 0:
        _damage(Path(folder), what)
    job.acc.wait_for_everyone()
    job.acc.load_state(folder)


def _damage(folder: Path, what: str) -> None:
    if what == "no optimizer":
        for file in (folder / "optimizer_0").iterdir():
            file.unlink()
        (folder / "optimizer_0").rmdir()
    elif what == "scheduler":
        (folder / "scheduler.bin").write_bytes(b"nothing")
    else:
        shard = next((folder / "pytorch_model_fsdp_0").glob("*.distcp"))
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)


@pytest.mark.parametrize(
    ("what", "words"), [("no optimizer", "optimizer_0"), ("scheduler", r"scheduler\.bin"), ("a bit", r"__\d_0\.distcp")]
)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(
    ranks: RankPool, tmp_path: Path, what: str, words: str
) -> None:
    job = lambda: run(ranks, 2, damaged, str(tmp_path / "state"), what)  # noqa: E731
    raises_on_every_rank(job, CheckpointError, words)


def of_several(ctx: RankContext, config: str, folder: str, is_saving: bool) -> list[dict[str, Tensor]]:
    """Two models of the same shapes, of which the first has two optimizers."""
    acc = accelerator(config)
    models = [transformer(), transformer()]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(0.5)
    matrices = [p for p in models[0].parameters() if p.dim() > 1]
    others = [p for p in models[0].parameters() if p.dim() <= 1]
    optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), AdamW(others, eps=1e-4), adamw(models[1])]
    *models, first, second, third = acc.prepare(*models, *optimizers)
    tokens = torch.arange(12).reshape(2, 6)
    for _ in range(1 if is_saving else 2):
        acc.backward(loss_of(models[0], tokens) + loss_of(models[1], tokens))
        for optimizer in (first, second, third):
            optimizer.step()
            optimizer.zero_grad()
    if is_saving:
        acc.save_state(folder)
    else:
        acc.load_state(folder)
    inner = [optimizer.optimizer for optimizer in (first, second, third)]
    states = [
        {f"{i} {k}": full(v) for i, s in enumerate(o.state.values()) for k, v in sorted(s.items())} for o in inner
    ]
    return [*map(values, models), *states]


@pytest.mark.wide(every=3)
@pytest.mark.parametrize("writer", ["mics", PLAIN])
def test_several_models_and_optimizers_get_their_own_back(ranks: RankPool, tmp_path: Path, writer: str) -> None:
    folder = str(tmp_path / "state")
    expected = run(ranks, 2, of_several, writer, folder, True)[0]
    for found in run(ranks, 4, of_several, "mics", folder, False, ranks_per_node=2):
        for own, other in zip(found, expected, strict=True):
            assert_same(own, other, 0.0)


def without_scaler(ctx: RankContext, folder: str) -> None:
    acc = accelerator()
    model = acc.prepare(transformer())
    acc.save_state(folder)
    acc.scaler, acc.native_amp = GradScaler("cpu"), True
    assert acc.handle_of(model) is not None
    acc.load_state(folder)


def test_a_state_without_the_scaler_that_the_run_has_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    job = lambda: run(ranks, 2, without_scaler, str(tmp_path / "state"))  # noqa: E731
    raises_on_every_rank(job, CheckpointError, r"has no `scaler\.pt`")
