"""Does `transformers.Trainer` go on from what it saved, and leave models that others can load?"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer

from mics_strategy import CheckpointError
from tests.accelerate.runs import PLAIN, assert_same, run
from tests.accelerate.trainer_runs import (
    FULL,
    SHARDED,
    VOCABULARY,
    arguments,
    assert_same_logs,
    launched,
    llama,
    logs,
    trainer,
    values,
)
from tests.ranks import RankContext, RankPool, raises_on_every_rank

KINDS = [SHARDED, FULL]
SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
Outcome = tuple[list[dict[str, float]], dict[str, Tensor]]


def trained(config: str, kind: str, folder: Path, resumed: Path | None = None, **options: Any) -> Outcome:
    """Logs without the mean of the whole run, and parameters."""
    sizes = options.pop("sizes", {})
    num = options.pop("num", None)
    with launched(config, state_dict_type=kind):
        made = trainer(llama(**sizes), arguments(folder, **SAVING | options), num=num)
        made.train(resume_from_checkpoint=None if resumed is None else str(resumed))
        return logs(made)[:-1], values(made.model)


def interrupted(ctx: RankContext, kind: str, resumed_kind: str) -> None:
    """With dropout, which is drawn from the states that were saved."""
    sizes = {"attention_dropout": 0.2, "attn_implementation": "eager"}
    expected = trained("mics", kind, Path("whole"), sizes=sizes)
    found = trained("mics", resumed_kind, Path("resumed"), Path("whole/checkpoint-4"), sizes=sizes)
    assert found[0] == expected[0]
    assert_same(found[1], expected[1], 0.0)


@pytest.mark.wide(every=5)
@pytest.mark.parametrize(("kind", "resumed_kind"), [(SHARDED, SHARDED), (FULL, FULL), (SHARDED, FULL)])
def test_resuming_gives_exactly_the_uninterrupted_training(ranks: RankPool, kind: str, resumed_kind: str) -> None:
    run(ranks, 4, interrupted, kind, resumed_kind, ranks_per_node=2)


def of_some_ranks(ctx: RankContext, config: str, kind: str, folder: str, resumed: str | None) -> Outcome:
    """Steps of the same eight sequences, by any number of ranks."""
    options = {"gradient_accumulation_steps": 4 // ctx.world_size, "num": 40}
    return trained(config, kind, Path(folder), None if resumed is None else Path(resumed), **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fewer_ranks_in_another_layout_go_on(ranks: RankPool, kind: str, tmp_path: Path) -> None:
    whole, resumed = str(tmp_path / "whole"), str(tmp_path / "resumed")
    expected = run(ranks, 4, of_some_ranks, "mics", kind, whole, None, ranks_per_node=2)
    found = run(ranks, 2, of_some_ranks, "zero1", kind, resumed, f"{whole}/checkpoint-4")
    assert_same_logs(found[0][0], expected[0][0])
    assert_same(found[0][1], expected[0][1], 1e-5)


def saved(ctx: RankContext, kind: str, is_tied: bool) -> None:
    with launched("mics", state_dict_type=kind):
        made = trainer(llama(tie_word_embeddings=is_tied), arguments("out", **SAVING))
        made.train()
        made.save_model("final")
        before = made.accelerator.state.fsdp_plugin.state_dict_type
        assert before.name == kind
        expected = values(made.model)
    dist.barrier()
    assert Path("out/checkpoint-2/model.safetensors").exists() == (kind == FULL)
    assert_same(values(LlamaForCausalLM.from_pretrained("final")), expected, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_tied"), [(SHARDED, True), (FULL, False)], ids=["shards, tied", "whole, untied"])
def test_save_model_leaves_what_from_pretrained_loads(ranks: RankPool, kind: str, is_tied: bool) -> None:
    run(ranks, 4, saved, kind, is_tied, ranks_per_node=2)


class Encoder(nn.Module):
    """A model of several modules that writes each into a folder of its own, as sentence-transformers does."""

    def __init__(self) -> None:
        """A language model, and a layer after it."""
        super().__init__()
        self.words = llama()
        self.dense = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of a batch."""
        logits = self.dense(self.words(input_ids).logits)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def save_pretrained(self, folder: str) -> None:
        """Without a state dict as an argument."""
        self.words.save_pretrained(f"{folder}/words")
        save_file(self.dense.state_dict(), f"{folder}/dense.safetensors")


class EncoderTrainer(Trainer):
    """Whose `_save` calls `save_pretrained` of the model, and is meant for one process."""

    def _save(self, output_dir: str, state_dict: dict[str, Any] | None = None) -> None:
        Path(output_dir).mkdir(parents=True)
        self.model.save_pretrained(output_dir)


def saved_by_the_model(ctx: RankContext) -> None:
    with launched("mics"):
        torch.manual_seed(0)
        made = trainer(Encoder(), arguments("out"), EncoderTrainer)
        made.train()
        made.save_model("final")
        made.train()  # again, on what are shards again
        made.save_model("later")
        expected = values(made.model)
    dist.barrier()
    words = values(LlamaForCausalLM.from_pretrained("later/words"))
    assert_same(words, {n.removeprefix("words."): v for n, v in expected.items() if n.startswith("words.")}, 0.0)
    dense = load_file("later/dense.safetensors")
    assert torch.equal(dense["weight"], expected["dense.weight"])
    assert not torch.equal(dense["weight"], load_file("final/dense.safetensors")["weight"])


def test_a_trainer_that_lets_the_model_write_itself_saves_it_whole(ranks: RankPool) -> None:
    run(ranks, 2, saved_by_the_model)


def saved_on_each_node(ctx: RankContext) -> None:
    with launched("mics", state_dict_type=FULL):
        trainer(llama(), arguments("out", save_on_each_node=True)).save_model("final")


def test_a_model_on_each_node_is_refused(ranks: RankPool) -> None:
    def attempt() -> None:
        run(ranks, 2, saved_on_each_node, ranks_per_node=1)

    raises_on_every_rank(attempt, CheckpointError, "gathered on rank 0 only")


def compiled(ctx: RankContext) -> None:
    """Names of a compiled model have a prefix, which is nowhere in files."""
    options = {"torch_compile": True, "torch_compile_backend": "eager", "eval_strategy": "no"}
    plain = trained(PLAIN, FULL, Path("ddp"), **options)
    expected = trained("zero3", SHARDED, Path("whole"), **options)
    assert_same_logs(expected[0], plain[0])
    assert_same(expected[1], plain[1], 1e-5)
    found = trained("zero3", SHARDED, Path("resumed"), Path("whole/checkpoint-4"), torch_compile=False)
    assert_same(found[1], expected[1], 1e-6)


@pytest.mark.weekly
def test_a_compiled_model_trains_as_with_ddp_and_is_resumed_without_compiling(ranks: RankPool) -> None:
    run(ranks, 2, compiled)


def best(ctx: RankContext) -> None:
    """Which is not the last: the learning rate is too high."""
    options = {**SAVING, "load_best_model_at_end": True, "save_total_limit": 2, "num_train_epochs": 3}
    found = {}
    for config, kind in ((PLAIN, FULL), ("mics", SHARDED), ("mics", FULL)):
        folder = Path(f"{config}-{kind}")
        with launched(config, state_dict_type=kind):
            made = trainer(llama(), arguments(folder, learning_rate=0.1, **options))
            made.train()
            dist.barrier()
            assert made.state.best_global_step < made.state.global_step
            evaluated = made.evaluate()["eval_loss"]
            assert evaluated == pytest.approx(made.state.best_metric, abs=1e-6)
            found[config, kind] = values(made.model), sorted(path.name for path in folder.iterdir())
    plain, plain_names = found.pop((PLAIN, FULL))
    for own, names in found.values():
        assert names == plain_names
        assert_same(own, plain, 1e-4)


@pytest.mark.slow
def test_the_best_model_is_loaded_and_old_checkpoints_removed_as_with_ddp(ranks: RankPool) -> None:
    run(ranks, 4, best, ranks_per_node=2)


def best_is_last(ctx: RankContext) -> None:
    """The only evaluation is the last one, so no later checkpoint corrects what the first one has written."""
    options = {**SAVING, "load_best_model_at_end": True, "num_train_epochs": 1, "eval_strategy": "epoch"}
    options |= {"save_strategy": "epoch"}
    for config, kind in ((PLAIN, FULL), ("mics", SHARDED)):
        with launched(config, state_dict_type=kind):
            made = trainer(llama(), arguments(f"{config}", **options))
            made.train()
            dist.barrier()
            assert made.state.best_model_checkpoint == f"{config}/checkpoint-{made.state.global_step}"


@pytest.mark.slow
def test_the_best_model_is_named_when_it_is_the_last(ranks: RankPool) -> None:
    run(ranks, 2, best_is_last)


def with_weights_only(ctx: RankContext) -> None:
    found = {}
    for config in (PLAIN, "mics"):
        folder = Path(config)
        options = {"save_only_model": True}
        trained(config, FULL, folder, **options)
        found[config] = trained(config, FULL, Path("resumed"), folder / "checkpoint-2", **options)
        assert not list(folder.rglob("optimizer*"))
    assert_same_logs(found["mics"][0], found[PLAIN][0])
    assert_same(found["mics"][1], found[PLAIN][1], 1e-5)


@pytest.mark.slow
def test_weights_alone_are_saved_and_resumed_as_with_ddp(ranks: RankPool) -> None:
    run(ranks, 2, with_weights_only)


def test_weights_alone_in_shards_are_refused(ranks: RankPool) -> None:
    def attempt() -> None:
        run(ranks, 2, only_shards)

    raises_on_every_rank(attempt, ValueError, "save_only_model.*SHARDED_STATE_DICT")


def only_shards(ctx: RankContext) -> None:
    trained("mics", SHARDED, Path("out"), save_only_model=True)


def after_ddp(ctx: RankContext) -> None:
    """Weights in one file, then in several, as those of large models are."""
    expected = trained(PLAIN, FULL, Path("ddp"))
    checkpoint = Path("ddp/checkpoint-2")
    for in_parts in (False, True):
        dist.barrier()
        if in_parts and ctx.rank == 0:
            model = LlamaForCausalLM.from_pretrained(checkpoint)
            (checkpoint / "model.safetensors").unlink()
            model.save_pretrained(checkpoint, max_shard_size="10KB")
        dist.barrier()
        assert (checkpoint / "model.safetensors.index.json").exists() == in_parts
        found = trained("mics", SHARDED, Path("resumed"), checkpoint)
        assert_same_logs(found[0], expected[0])
        assert_same(found[1], expected[1], 1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_ddp_is_continued(ranks: RankPool) -> None:
    run(ranks, 2, after_ddp)


def damaged(ctx: RankContext) -> None:
    trained("mics", SHARDED, Path("whole"))
    dist.barrier()
    if ctx.rank == 0:
        for file in Path("whole/checkpoint-2/optimizer_0").glob("*.distcp"):
            file.write_bytes(b"")
    dist.barrier()
    trained("mics", SHARDED, Path("resumed"), Path("whole/checkpoint-2"))


def test_a_damaged_checkpoint_is_refused_on_every_rank(ranks: RankPool) -> None:
    raises_on_every_rank(lambda: run(ranks, 2, damaged), CheckpointError)
