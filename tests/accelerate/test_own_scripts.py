"""Do the scripts with which Accelerate tests itself pass with our file?

They come with Accelerate (`accelerate.test_utils`), and run here as they are, on the environment that the launcher
makes of ``mics.yaml``. What stands in for something says so: data, model and metric, which the scripts download, are
small and made up.
"""

import argparse
import contextlib
import copy
import importlib
import importlib.util
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, PartialState
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

from tests.accelerate.launchers import sent, written
from tests.accelerate.runs import forget, run
from tests.ranks import RankContext, RankPool
from tests.torch_versions import kinds_of_dtensors

pytestmark = pytest.mark.slow

SCRIPTS = "accelerate.test_utils.scripts"


@pytest.fixture
def stock(ranks: RankPool, tmp_path: Any) -> Callable[..., list[Any]]:
    """`stock(world_size, job, *args)` on two nodes where there are four ranks, started with our file."""

    def run_stock(world_size: int, job: Callable[..., Any], *args: object, more: str = "") -> list[Any]:
        env = sent("--config_file", written(tmp_path, more))
        return run(ranks, world_size, _in_script, job, *args, env=env, ranks_per_node=2)

    return run_stock


def _in_script(ctx: RankContext, job: Callable[..., Any], *args: object) -> Any:
    refused = AssertionError("the stock Accelerator prepares")
    with (
        mock.patch.object(PartialState, "destroy_process_group"),
        mock.patch.object(Accelerator, "prepare", side_effect=refused),  # ours overrides it
    ):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            job(ctx, *args)
        return printed.getvalue()


def _script(name: str) -> Any:
    return importlib.import_module(f"{SCRIPTS}.{name}")


# -- test_ops, test_script (`accelerate test`), test_sync ---------------------------------------------------------


def _main(ctx: RankContext, name: str) -> None:
    _script(name).main()


@pytest.mark.parametrize("world_size", [2, 4])
def test_operations(stock: Callable[..., list[str]], world_size: int) -> None:
    assert "testing op_checker" in stock(world_size, _main, "test_ops")[0]


def test_what_accelerate_test_runs(stock: Callable[..., list[str]]) -> None:
    printed = stock(2, _main, "test_script")[0]
    for part in ("batch split", "BF16 training check", "Breakpoint trigger", "Test reinstantiated state"):
        assert part in printed


def _parts_for_four(ctx: RankContext) -> None:
    """All but one part: `main` splits two rows over four ranks, and fails so with any strategy."""
    script = _script("test_script")
    Accelerator()
    for part in ("init_state", "process_execution", "rng_sync", "dl_preparation", "central_dl_preparation"):
        getattr(script, f"{part}_check")()
    script.custom_sampler_check()
    script.check_seedable_sampler()
    script.check_seedable_sampler_with_data_seed()
    script.check_seedable_sampler_in_batch_sampler_shard()
    for part in ("list", "nested_dict", "evenly"):
        getattr(script, f"test_split_between_processes_{part}")()
    script.training_check(use_seedable_sampler=False)
    script.training_check(use_seedable_sampler=True)
    script.test_trigger()
    script.test_reinstantiated_state()


@pytest.mark.parametrize("preset", ["mics", "zero3"])
def test_what_accelerate_test_runs_on_four_ranks(stock: Callable[..., list[str]], preset: str) -> None:
    printed = stock(4, _parts_for_four, more=f"  fsdp_sharding_strategy: {preset}")[0]
    assert "BF16 training check" in printed


def _saying(name: str, words: Mapping[str, str]) -> Any:
    """A script in which some words say something else."""
    spec = importlib.util.find_spec(f"{SCRIPTS}.{name}")
    text = Path(spec.origin).read_text()
    for old, new in words.items():
        assert old in text
        text = text.replace(old, new)
    module = ModuleType(name)
    exec(compile(text, spec.origin, "exec"), module.__dict__)
    return module


def _synchronising(ctx: RankContext) -> None:
    """What `main` runs with DDP.

    Between boundaries, DDP's gradients are those of the rank. Ours, when read, are those of all ranks so far, so where
    the script says that gradients are not those of the whole batch, they are; the last part steps its plain model
    between boundaries, and says nothing then. The gradients are small sums of large terms, which processors add up
    differently, so they are compared with an absolute tolerance, too.
    """
    tolerance = {"param.grad) is": "param.grad, atol=1e-6) is", ", **kwargs) is": ", atol=1e-6, **kwargs) is"}
    script = _saying("test_sync", {**tolerance, "is False": "is True"})
    accelerator = Accelerator()
    script.test_dataloader_break()
    script.test_distributed_sync(accelerator)
    _saying("test_sync", tolerance).test_distributed_sync_multiple_fwd(accelerator)
    stepping = _saying("test_sync", {**tolerance, "is False": "in (True, False)"})
    for split in (True, False):
        for dispatch in (True, False):
            for every in (True, False):
                script.test_gradient_accumulation(split, dispatch, every)
                stepping.test_gradient_accumulation_with_opt_and_scheduler(split, dispatch, every)


@pytest.mark.wide
@kinds_of_dtensors
@pytest.mark.parametrize("world_size", [2, 4])
def test_synchronisation_and_accumulation(stock: Callable[..., list[str]], world_size: int) -> None:
    stock(world_size, _synchronising)


def _compared(ctx: RankContext) -> None:
    plain = torch.nn.Linear(3, 5)
    model = Accelerator().prepare(copy.deepcopy(plain))
    for one, other in ((model.weight, plain.weight), (plain.bias, model.bias), (model.weight, model.weight)):
        torch.testing.assert_close(one, other)
        assert torch.allclose(one, other)
        assert torch.equal(one, other)
    with torch.no_grad():
        plain.weight[4, 2] += 1e-3  # on the last rank's shard alone
    for one, other in ((model.weight, plain.weight), (plain.weight, model.weight)):
        with pytest.raises(AssertionError, match=r"Mismatched elements: 1 / 15"):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, other, atol=1e-2, rtol=0)
        assert not torch.allclose(one, other)
        assert torch.allclose(one, other, atol=1e-2)
        assert not torch.equal(one, other)


@kinds_of_dtensors
def test_sharded_parameters_are_compared_as_wholes(ranks: RankPool, tmp_path: Path) -> None:
    run(ranks, 4, _compared, env=sent("--config_file", written(tmp_path)), ranks_per_node=2)


def _looping(ctx: RankContext) -> None:
    """All but joining of uneven inputs, which waits for ever on CPUs with any strategy, and torchdata's loaders."""
    script = _script("test_distributed_data_loop")
    script.test_default_ensures_even_batch_sizes()
    script.test_can_disable_even_batches()
    accelerator = script.create_accelerator()
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # the script counts on it
        script.test_join_raises_warning_for_non_ddp_distributed(accelerator)
    script.test_pickle_accelerator()
    data = script.DummyDataset()
    sampler = BatchSampler(RandomSampler(data), batch_size=4, drop_last=False)
    for options in ({"batch_size": 4}, {"shuffle": True, "batch_size": 4}, {"batch_sampler": sampler}):
        script.test_data_loader(DataLoader(data, **options), accelerator)


def test_data_loops(stock: Callable[..., list[str]]) -> None:
    stock(2, _looping)


# -- external_deps: training, resuming, evaluating ----------------------------------------------------------------


class _Metric:
    """Accuracy and f1, as `evaluate` has them for GLUE's MRPC."""

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []

    def add_batch(self, predictions: Tensor, references: Tensor) -> None:
        self.pairs += zip(predictions.tolist(), references.tolist(), strict=True)

    def compute(self) -> dict[str, float]:
        pairs, self.pairs = self.pairs, []
        both = sum(one == other == 1 for one, other in pairs)
        any_of = sum((one == 1) + (other == 1) for one, other in pairs)
        same = sum(one == other for one, other in pairs)
        return {"accuracy": same / len(pairs), "f1": 2 * both / max(1, any_of), "count": len(pairs)}


class _Bert:
    """Stands in for a model that is downloaded."""

    @staticmethod
    def from_pretrained(*_: object, **__: object) -> BertForSequenceClassification:
        torch.manual_seed(2)
        config = BertConfig(
            vocab_size=40,
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=8,
        )
        return BertForSequenceClassification(config)


def _sentences(num: int, batch_size: int, shuffle: bool = False) -> DataLoader:
    """Eight tokens each; what is to be told is whether the first is even."""
    tokens = torch.randint(0, 40, (num, 8), generator=torch.Generator().manual_seed(num))
    rows = [{"input_ids": row, "labels": row[0] % 2} for row in tokens]

    def collate(rows: list[dict[str, Tensor]]) -> BatchEncoding:
        return BatchEncoding({name: torch.stack([row[name] for row in rows]) for name in rows[0]})

    return DataLoader(rows, batch_size=batch_size, shuffle=shuffle, collate_fn=collate)


@contextmanager
def _offline(name: str) -> Iterator[Any]:
    """A script of `external_deps` with nothing to download."""
    stubs = {each: mock.MagicMock(**{"load.return_value": _Metric()}) for each in ("datasets", "evaluate")}
    with mock.patch.dict(sys.modules, stubs):
        script = importlib.import_module(f"{SCRIPTS}.external_deps.{name}")
    sys.modules.pop(script.__name__, None)
    both = mock.Mock(side_effect=lambda *_: (_sentences(128, 16, shuffle=True), _sentences(75, 32)))
    one = mock.Mock(side_effect=lambda *_: _sentences(75, 16))
    with (
        mock.patch.object(script, "AutoModelForSequenceClassification", _Bert),
        mock.patch.object(script, "get_dataloaders", both, create=True),
        mock.patch.object(script, "get_dataloader", one, create=True),
    ):
        yield script


def _arguments(folder: Path, **given: object) -> argparse.Namespace:
    names = ("resume_from_checkpoint", "partial_train_epoch", "performance_lower_bound", "tp_plan", "tp_size")
    nothing = dict.fromkeys((*names, "model_dtype", "add_pad_token"))
    given = {**nothing, "model_name_or_path": "tiny", "output_dir": str(folder), "num_epochs": 2, **given}
    return argparse.Namespace(**given)


CONFIG = {"lr": 5e-3, "num_epochs": 2, "seed": 42, "batch_size": 16}


def _resuming(ctx: RankContext) -> None:
    with _offline("test_checkpointing") as script:
        script.training_function(CONFIG, _arguments(ctx.tmp_path, partial_train_epoch=1))
        forget()
        script.training_function(CONFIG, _arguments(ctx.tmp_path, resume_from_checkpoint=f"{ctx.tmp_path}/epoch_0"))
    print(json.loads((ctx.tmp_path / "state_0.json").read_text()))


KINDS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


@pytest.mark.wide
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_checkpointing(stock: Callable[..., list[str]], world_size: int, kind: str) -> None:
    printed = stock(world_size, _resuming, more=f"  fsdp_state_dict_type: {kind}")[0]
    assert "resumed checkpoint performance" in printed


def _performing(ctx: RankContext) -> None:
    with _offline("test_performance") as script:
        arguments = _arguments(ctx.tmp_path, num_epochs=4, performance_lower_bound=0.82)
        script.training_function({**CONFIG, "num_epochs": 4, "lr": 3e-2}, arguments)
    model = _Bert.from_pretrained()
    model.load_state_dict(load_file(ctx.tmp_path / "model.safetensors"))


@pytest.mark.wide
@pytest.mark.parametrize(("world_size", "kind"), [(2, KINDS[0]), (4, KINDS[1])])
def test_performance(stock: Callable[..., list[str]], world_size: int, kind: str) -> None:
    printed = stock(world_size, _performing, more=f"  fsdp_state_dict_type: {kind}")[0]
    assert "'count': 75" in printed


def _measuring(ctx: RankContext) -> None:
    """`main`, and what it runs on GPUs only."""
    with _offline("test_metrics") as script:
        script.main()
        for split in (True, False):
            for dispatch in (True, False):
                forget()
                script.test_mrpc(dispatch, split)
        script.test_gather_for_metrics_with_iterable_dataset()
        script.test_gather_for_metrics_with_non_tensor_objects_iterable_dataset()


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [2, 4])
def test_metrics(stock: Callable[..., list[str]], world_size: int) -> None:
    assert "drop_last" in stock(world_size, _measuring)[0]
