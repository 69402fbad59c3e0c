"""Both training loops on ranks of the pool: they validate, save, stop and continue as if they had never stopped."""

import json
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM, SIGUSR1
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from recipes import accelerate_loop, pretrain
from recipes.batch import BatchPlan
from recipes.config import Recipe, load_recipe
from recipes.data.masking import IGNORED_LABEL
from recipes.data.prepare import PreparedData, prepare
from recipes.files import find_recipe
from recipes.lightning_module import HeldOutLoss, Pretraining
from recipes.loggers import Loggers
from recipes.metrics import MetricsLog, RunFacts
from recipes.models.cost import SampleCost
from recipes.rates import Throughput
from recipes.report import ClosingReport
from recipes.resume import checkpoint_to_resume, step_of
from recipes.run_inputs import RunInputs
from recipes.signals import SaveRequests
from recipes.strategy import is_ours
from tests.accelerate.runs import run
from tests.ranks import RankContext, RankPool

STEPS, EVERY = 6, 4
VALIDATED = ("--trainer.validate_every_steps=2", "--trainer.max_steps=5")
OPTIONS = (
    *("--ci", "--trainer.framework=accelerate", f"--trainer.max_steps={STEPS}", "--batch.global_size=8"),
    *("--optimizer.clip_norm=0.5", "--trainer.resume=auto", f"--trainer.checkpoint_every_steps={EVERY}"),
    "--sample.num_tokens=0",
)


class Observed(accelerate_loop.AccelerateLoop):
    """The loop, with a note of what it reads and a signal at a step."""

    seen: tuple[list[torch.Tensor], ...] = ([],)
    signal_at: tuple[int, int] = (0, 0)

    def _micro_step(self, batch: Any) -> None:
        self.seen[0].append(batch["input_ids"][:, :8])
        step, number = self.signal_at
        is_last_rank = self.trainer.global_rank == self.inputs.plan.world_size - 1
        if number and is_last_rank and self.trainer.global_step == step - 1:
            self.inputs.requests.note(number)
        super()._micro_step(batch)


def make(options: tuple[str, ...], cache: Path, output: Path) -> tuple[Recipe, PreparedData]:
    folders = (f"--data.cache_dir={cache}", f"--trainer.output_dir={output}")
    recipe = load_recipe([f"--config={find_recipe('llama-debug')}", *OPTIONS, *folders, *options], has_cuda=False)
    return recipe, prepare(recipe.data, recipe.model.vocab_rows)


def train(
    ctx: RankContext, options: tuple[str, ...], folders: tuple[Path, Path], signal_at: tuple[int, int]
) -> dict[str, Any]:
    """Train, and return losses, samples, the end of the run and the weights' checksum of this rank."""
    recipe, data = make(options, *folders)
    size, micro, length = recipe.batch.global_size, recipe.batch.micro_size, recipe.data.sequence_length
    plan = BatchPlan(global_size=size, micro_size=micro, world_size=ctx.world_size, sequence_length=length)
    facts = RunFacts(
        throughput=Throughput(plan=plan, cost=SampleCost(model_flop=1.0)),
        max_steps=recipe.trainer.max_steps,
        log_every_steps=1,
        bytes_per_token=0.0,
        output_dir=folders[1],
    )
    folders[1].mkdir(exist_ok=True)
    (folders[1] / "config.yaml").write_text(recipe.to_yaml())
    metrics = MetricsLog(facts, Loggers((), folders[1], recipe.name, {}))
    requests = SaveRequests(saves=recipe.trainer.checkpoint_every_steps != "never")
    inputs = RunInputs(
        plan=plan,
        data=data,
        metrics=metrics,
        report=ClosingReport(metrics.history, data.tokenizer, recipe.sample, length, folder=folders[1], export=None),
        requests=requests,
        checkpoint=checkpoint_to_resume(recipe.trainer, reads_folders=is_ours(recipe.strategy)),
    )
    Observed.seen, Observed.signal_at = ([],), signal_at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate_loop, "AccelerateLoop", Observed)
        patch.setattr("recipes.report_page._plots", lambda *_: [])
        patch.setattr(Accelerator, "end_training", lambda _: None)  # the process group is the pool's
        accelerate_loop.train(recipe, inputs)
    requests.close()
    history = metrics.history
    seen = torch.stack(Observed.seen[0]) if Observed.seen[0] else None  # [micro-steps, micro batch, 8]
    return {"losses": history.losses, "held out": history.validation_losses, "seen": seen, "at": requests.stopped_at}


def global_batches(results: list[dict[str, Any]]) -> torch.Tensor:
    """Put the micro-batches of all ranks in the order of the data, [samples, 8]."""
    return torch.stack([result["seen"] for result in results], dim=1).flatten(0, 2)


MICS = ("--strategy.name=mics", "--strategy.shard.partition_size=2")
ALONE = ("--strategy.name=mics", "--strategy.shard.partition_size=1", "--strategy.ranks_per_node=1")
ON_TWO_NODES = (*MICS, "--strategy.ranks_per_node=2")
DDP = ("--strategy.name=ddp",)


def saved_steps(folder: Path) -> set[int]:
    return {step_of(path) for path in (folder / "checkpoints").iterdir()}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    make((), folder, folder)
    return folder


@pytest.fixture
def whole(ranks: RankPool, cache: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """A run without a stop, on 2 ranks under DDP."""
    never = (*DDP, "--trainer.checkpoint_every_steps=never")
    return run(ranks, 2, train, never, (cache, tmp_path / "whole"), (0, 0))


@pytest.mark.parametrize(
    ("saving", "resuming", "world_size"),
    [
        pytest.param((*MICS, "--trainer.checkpoint_format=sharded"), ON_TWO_NODES, 4, id="sharded"),
        pytest.param(MICS, DDP, 1, marks=pytest.mark.slow, id="full"),
        pytest.param(DDP, ON_TWO_NODES, 2, marks=pytest.mark.slow, id="ddp"),
    ],
)
def test_a_stopped_run_continues_with_the_next_sample_on_other_ranks(
    ranks: RankPool,
    whole: list[dict[str, Any]],
    cache: Path,
    tmp_path: Path,
    saving: tuple[str, ...],
    resuming: tuple[str, ...],
    world_size: int,
):
    folders = (cache, tmp_path / "run")
    first = run(ranks, 2, train, saving, folders, (3, SIGTERM))  # of the last rank alone
    assert [result["at"] for result in first] == [3, 3]
    assert saved_steps(folders[1]) == {3}
    second = run(ranks, world_size, train, resuming, folders, (0, 0))
    assert first[0]["losses"] == pytest.approx(whole[0]["losses"][:3], abs=2e-5)
    for name in ("losses", "held out"):  # its history begins with the rows of the first part
        assert second[0][name] == pytest.approx(whole[0][name], abs=2e-5)
    assert torch.equal(torch.cat([global_batches(first), global_batches(second)]), global_batches(whole))
    assert saved_steps(folders[1]) == {3, STEPS}


@pytest.mark.slow
def test_only_the_newest_regular_checkpoint_stays(ranks: RankPool, cache: Path, tmp_path: Path):
    for options in ((*MICS, "--trainer.checkpoint_format=sharded"), MICS):
        folder = tmp_path / options[-1].removeprefix("--")
        saved = run(ranks, 2, train, (*options, "--trainer.checkpoint_every_steps=2"), (cache, folder), (3, SIGUSR1))
        assert saved_steps(folder) == {3, STEPS}
        resumed = run(ranks, 1, train, ALONE, (cache, folder), (0, 0))
        assert resumed[0]["losses"] == saved[0]["losses"]  # nothing is left to train


def test_sigusr1_saves_and_goes_on(ranks: RankPool, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (result,) = run(ranks, 1, train, DDP, (cache, tmp_path), (2, SIGUSR1))
    assert (result["at"], len(result["losses"])) == (0, STEPS)
    assert saved_steps(tmp_path) == {2, STEPS}


def train_with_lightning(
    _: RankContext, options: tuple[str, ...], folders: tuple[Path, Path], signal_after: int
) -> None:
    """Train in a process of its own; SIGTERM arrives after a step."""
    recipe, _data = make(("--trainer.framework=lightning", *options), *folders)
    noted = SaveRequests.agree

    def agree(requests: SaveRequests, step: int) -> Any:
        if step == signal_after:
            requests.note(SIGTERM)
        return noted(requests, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaveRequests, "install", lambda _: None)  # the pool has handlers of its own
        patch.setattr(SaveRequests, "agree", agree)
        pretrain.pretrain(recipe)


def validations(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}


def test_both_loops_validate_at_the_same_steps_also_after_a_stop(ranks: RankPool, cache: Path, tmp_path: Path):
    lightning, accelerate = tmp_path / "lightning", tmp_path / "accelerate"
    alone = (*ALONE, *VALIDATED, "--trainer.devices=1")
    for signal_after in (3, 0):
        run(ranks, 1, train_with_lightning, alone, (cache, lightning), signal_after, default_group=False)
    run(ranks, 2, train, (*MICS, *VALIDATED), (cache, accelerate), (3, SIGTERM))
    run(ranks, 1, train, (*DDP, *VALIDATED), (cache, accelerate), (0, 0))
    assert list(validations(lightning)) == list(validations(accelerate)) == [0, 2, 4, 5]
    assert validations(lightning) == pytest.approx(validations(accelerate), abs=2e-5)


def held_out(ctx: RankContext) -> tuple[float, float]:
    """Each rank has other tokens, and another number of them."""
    metric = HeldOutLoss()
    for logits, labels in TOKENS[ctx.rank :: ctx.world_size]:
        metric.update(logits, labels)
    if ctx.rank == ctx.world_size - 1:
        metric.update(torch.zeros(1, 4, 7), torch.full((1, 4), IGNORED_LABEL))  # a row that only fills up
    return float(metric.compute()), float(metric.compute())


_generator = torch.Generator().manual_seed(0)
TOKENS = [
    (torch.randn(rows, 4, 7, generator=_generator) * 3, torch.randint(0, 7, (rows, 4), generator=_generator))
    for rows in (2, 1, 5, 3, 1)
]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_held_out_loss_is_the_plain_mean_over_all_tokens(ranks: RankPool, world_size: int):
    logits, labels = (torch.cat([pair[index] for pair in TOKENS]).flatten(0, 1) for index in (0, 1))
    expected = torch.nn.functional.cross_entropy(logits.double(), labels).item()
    for results in ranks(world_size, held_out):
        assert results == pytest.approx((expected, expected), rel=1e-6)


def test_perplexity_is_the_exponential_of_the_loss(cache: Path, tmp_path: Path):
    module = Pretraining(make(DDP, cache, tmp_path)[0])
    module.validation_loss = 2.0
    assert module.validation_perplexity == pytest.approx(7.38905609893065)
    module.validation_loss = 1e4
    assert module.validation_perplexity == torch.inf


def test_clipping_is_that_of_plain_torch_on_two_ranks(whole: list[dict[str, Any]], cache: Path, tmp_path: Path):
    recipe, _ = make(DDP, cache, tmp_path)
    recipe = replace(recipe, batch=replace(recipe.batch, micro_size=8))
    module = Pretraining(recipe)
    module.configure_model()
    optimizers: Any = module.configure_optimizers()
    optimizer, scheduler = optimizers["optimizer"], optimizers["lr_scheduler"]["scheduler"]
    data = prepare(recipe.data, recipe.model.vocab_rows)
    plan = BatchPlan(global_size=8, micro_size=8, world_size=1, sequence_length=recipe.data.sequence_length)
    losses = []
    for batch in accelerate_loop.TrainLoader(data.train, plan, 0, STEPS, recipe.trainer.seed):
        loss = module.training_step(batch, 0)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), recipe.optimizer.clip_norm)
        assert norm > recipe.optimizer.clip_norm  # else nothing is clipped
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    assert whole[0]["losses"] == pytest.approx(losses, abs=2e-5)
