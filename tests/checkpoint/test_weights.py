"""Do weights that others have saved arrive, bit for bit, in any sharding, and is what does not fit refused first?"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

from mics_strategy import ShardConfig, load_weights, shard
from mics_strategy.checkpoint import weight_formats
from mics_strategy.checkpoint.weights import IncompatibleKeys, prefix_between
from tests import models
from tests.checkpoint.test_interop import build_fsdp2, save_from_fsdp2
from tests.checkpoint.test_sharded import run_of, save_after
from tests.engine.training import Run, Training, assert_identical, start, whole, wholes
from tests.ranks import RankContext, RankPool

State = dict[str, Any]
INDEX = "model.safetensors.index.json"


def state_of(case: Callable[[], models.Case]) -> dict[str, Tensor]:
    """Other values than those the ranks build."""
    state = case().build().state_dict()
    generator = torch.Generator().manual_seed(3)
    for value in state.values():
        value.copy_(torch.randint(-1000, 1000, value.shape, generator=generator))
        value.div_(64) if value.is_floating_point() else None
    return state


def state_after(training: Training, path: Path, **options: Any) -> tuple[dict[str, Tensor], IncompatibleKeys]:
    """What the model holds, and what was not on both sides."""
    difference = load_weights(path, training.sharded, **options)
    return wholes(training.model.state_dict()), difference


def load(
    ctx: RankContext, run: Run, path: Path, options: State | None = None
) -> tuple[dict[str, Tensor], IncompatibleKeys]:
    return state_after(start(ctx, run), path, **(options or {}))


NOTHING = IncompatibleKeys(missing_keys=[], unexpected_keys=[])


def write_index(folder: Path, name: str, files: dict[str, list[str]]) -> None:
    weight_map = {entry: file for file, entries in files.items() for entry in entries}
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def in_parts(state: State, folder: Path, name: str, save: Callable[[State, Path], Any]) -> Path:
    """As Hugging Face does with models that are too large for one file."""
    folder.mkdir()
    stem, suffix = name.split(".")
    entries = list(state)
    parts = {f"{stem}-{number:05}-of-00003.{suffix}": entries[number - 1 :: 3] for number in (1, 2, 3)}
    for file, names in parts.items():
        save({each: state[each] for each in names}, folder / file)
    write_index(folder, name, parts)
    return folder


def one_in_folder(state: State, folder: Path, name: str, save: Callable[[State, Path], Any]) -> Path:
    folder.mkdir()
    save(state, folder / name)
    return folder


def universal(state: State, folder: Path, is_flat: bool) -> Path:
    """As DeepSpeed's `ds_to_universal.py` lays it out: after ZeRO-3 flat, else with notes beside it."""
    last = next(reversed(state))  # as if it were a buffer
    module = {name: value if name == last else value.new_empty(0) for name, value in state.items()}
    folder.mkdir()
    (folder / "step_1_universal").mkdir()
    torch.save({"module": module, "ds_version": "0.19.2"}, folder / "step_1_universal" / "mp_rank_00_model_states.pt")
    for name, value in list(state.items())[:-1]:
        (folder / "step_1_universal" / "zero" / name).mkdir(parents=True)
        content = value.flatten() if is_flat else {"param": value, "cat_dim": 0}
        torch.save(content, folder / "step_1_universal" / "zero" / name / "fp32.pt")
        torch.save(value, folder / "step_1_universal" / "zero" / name / "exp_avg.pt")
    (folder / "latest_universal").write_text("step_1_universal")
    return folder


def lightning_like(state: State, path: Path) -> Path:
    adam = {index: {"exp_avg": torch.ones_like(value)} for index, value in enumerate(state.values())}
    whole_file = {"epoch": 3, "state_dict": {f"net.{name}": value for name, value in state.items()}}
    torch.save(whole_file | {"optimizer_states": [{"state": adam}], "loops": {"fit": [1, None]}}, path)
    return path


def saved_at(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def with_prefix(state: State, prefix: str) -> State:
    return {prefix + name: value for name, value in state.items()}


def safe(state: State, path: Path) -> Path:
    save_file(state, path)
    return path


FORMATS: dict[str, Callable[[State, Path], Path]] = {
    "safetensors file": lambda s, p: safe(s, p / "x.safetensors"),
    "safetensors folder": lambda s, p: one_in_folder(s, p / "x", "model.safetensors", save_file),
    "safetensors parts": lambda s, p: in_parts(s, p / "x", "model.safetensors", save_file),
    "safetensors index": lambda s, p: in_parts(s, p / "x", "model.safetensors", save_file) / INDEX,
    "torch file": lambda s, p: saved_at(s, p / "x.pt"),
    "torch folder": lambda s, p: one_in_folder(s, p / "x", "pytorch_model.bin", torch.save),
    "torch parts": lambda s, p: in_parts(s, p / "x", "pytorch_model.bin", torch.save),
    "ddp": lambda s, p: saved_at({"model_state_dict": with_prefix(s, "module."), "step": 3}, p / "x.pt"),
    "lightning": lambda s, p: lightning_like(s, p / "x.ckpt"),
    "universal": lambda s, p: universal(s, p / "x", is_flat=False),
    "universal of ZeRO-3": lambda s, p: universal(with_prefix(s, "module."), p / "x", is_flat=True),
}


def load_each(
    ctx: RankContext, run: Run, paths: dict[str, Path]
) -> dict[str, tuple[dict[str, Tensor], IncompatibleKeys]]:
    """One after the other, with other values in between."""
    training, found = start(ctx, run), {}
    for kind, path in paths.items():
        for tensor in training.model.state_dict().values():
            tensor.zero_()
        found[kind] = state_after(training, path)
    return found


def test_every_format_arrives_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    expected = state_of(models.transformer)
    paths = {}
    for kind, write in FORMATS.items():
        (tmp_path / kind).mkdir()
        paths[kind] = write(expected, tmp_path / kind)
    for found in ranks(4, load_each, run_of("mics"), paths):
        for kind in FORMATS:
            assert_identical(found[kind][0], expected)
            assert found[kind][1] == NOTHING, kind


CASES = (models.conv_bn, models.scalar, models.tied)


def load_cases(ctx: RankContext, run: Run, folder: Path) -> list[tuple[dict[str, Tensor], IncompatibleKeys]]:
    """Each from its file, which is opened anew for every tensor."""
    usual, weight_formats.MAPPED_BYTES = weight_formats.MAPPED_BYTES, 0
    try:
        return [load(ctx, run.replace(case=case), folder / case.__name__) for case in CASES]
    finally:
        weight_formats.MAPPED_BYTES = usual


@pytest.mark.parametrize("preset", ["zero3", "ddp"])
def test_every_kind_of_tensor_arrives_in_every_sharding(ranks: RankPool, tmp_path: Path, preset: str) -> None:
    """Buffers, scalars, tied parameters, and lengths that the ranks do not divide."""
    for case in CASES:
        torch.save(state_of(case), tmp_path / case.__name__)
    for of_rank in ranks(4, load_cases, run_of(preset), tmp_path):
        for (found, difference), case in zip(of_rank, CASES, strict=True):
            assert_identical(found, state_of(case))
            assert difference == NOTHING


def forward_after_training(ctx: RankContext, run: Run, path: Path) -> tuple[float, float]:
    """The loss of the loaded model in a step, and of the plain one."""
    training = start(ctx, run)
    training.step(0)
    load_weights(path, training.sharded)
    loss = training.loss(1).item() * run.accumulation
    plain = training.case.build()
    plain.load_state_dict(torch.load(path, weights_only=True))
    return loss, training.case.loss(plain, training.batch(1)).item()


@pytest.mark.parametrize("preset", ["zero3", "paro-nig"])
def test_the_next_forward_uses_what_was_loaded(ranks: RankPool, tmp_path: Path, preset: str) -> None:
    torch.save(state_of(models.transformer), tmp_path / "x.pt")
    for loss, expected in ranks(4, forward_after_training, run_of(preset), tmp_path / "x.pt"):
        assert loss == pytest.approx(expected, abs=1e-4, rel=1e-4)


def load_both(ctx: RankContext, run: Run, ours: Path, fsdp2s: Path) -> list[dict[str, Tensor]]:
    """A checkpoint of ours, FSDP2's, and FSDP2's without names around the model's."""
    training = start(ctx, run)
    return [state_after(training, path)[0] for path in (ours, fsdp2s, fsdp2s / "bare")]


def save_fsdp2s(ctx: RankContext, path: Path) -> dict[str, Tensor]:
    dcp.save(build_fsdp2(ctx)[1].state_dict(), checkpoint_id=path / "bare")
    return save_from_fsdp2(ctx, path)


def test_distributed_checkpoints_give_their_weights(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks(4, save_after, run_of("mics"), 2, tmp_path / "ours", False)[0]
    fsdp2s = ranks(2, save_fsdp2s, tmp_path / "fsdp2")[0]
    for found in ranks(2, load_both, run_of("zero3"), tmp_path / "ours", tmp_path / "fsdp2"):
        for state, expected in zip(found, (saved, fsdp2s, fsdp2s), strict=True):
            assert_identical(dict(sorted(state.items())), {n: v for n, v in expected.items() if ":" not in n})


class Noted(nn.Module):
    """Something of its own beside its tensors, as TransformerEngine's modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.note: Any = "new"

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def load_into_another(ctx: RankContext, folder: Path) -> list[Any]:
    model = Noted()
    sharded = shard(model, ShardConfig.preset("zero3", param_dtype="bfloat16"))
    keys = load_weights(folder / "head.pt", sharded, strict=False)
    weight = whole(model.linear.weight)
    load_weights(folder / "two.pt", sharded, rename=lambda name: name.removeprefix("b.") if name[0] == "b" else None)
    return [keys, weight, whole(model.linear.weight), model.note]


def test_names_dtypes_and_extra_states(ranks: RankPool, tmp_path: Path) -> None:
    one, other = (Noted().state_dict() | {"_extra_state": note} for note in ("a", "b"))
    head = {"enc.linear.weight": one["linear.weight"].to(torch.bfloat16), "head.weight": torch.ones(1), "epoch": 3}
    torch.save(head, tmp_path / "head.pt")
    torch.save(with_prefix(one, "a.") | with_prefix(other, "b."), tmp_path / "two.pt")
    for keys, weight, last, note in ranks(2, load_into_another, tmp_path):
        assert keys == IncompatibleKeys(missing_keys=["_extra_state", "linear.bias"], unexpected_keys=["head.weight"])
        assert weight.dtype == torch.float32
        assert torch.equal(weight, head["enc.linear.weight"].float())
        assert torch.equal(last, other["linear.weight"])
        assert note == "b"


PREFIXES = {
    "none": (["a.b", "c"], ["a.b", "c"], ["a.b", "c"]),
    "cut": (["a.b", "c"], ["x.y.a.b", "x.y.c", "z.c"], ["a.b", "c", None]),
    "put": (["m.a.b", "m.c", "head"], ["a.b", "c"], ["m.a.b", "m.c"]),
    "as most": (["m.a", "m.b", "c"], ["a", "b", "c"], ["m.a", "m.b", "m.c"]),
    "inner": (["model.a"], ["module.model.a"], ["model.a"]),
}


@pytest.mark.parametrize(("own", "saved", "expected"), PREFIXES.values(), ids=PREFIXES)
def test_prefixes(own: list[str], saved: list[str], expected: list[str | None]) -> None:
    rename = prefix_between(own, saved, Path("x"))
    assert [rename(name) for name in saved] == expected
